"""`keystage status`: one table of what runs, and whether all is well."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer
from rich.text import Text

from keystage.cli import asking, completing, judging, naming
from keystage.cli import report_tables as tables
from keystage.cli.columns import lines
from keystage.cli.errors import fail
from keystage.cli.openfaas import DEFAULT_GATEWAY
from keystage.cli.output import tell_json
from keystage.observability.api import Report


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """What `keystage status --json` prints.

    Attributes:
        is_well: nothing is wrong.
        faults: what is, one a thing.
        report: as the gateway has it, of one pipeline alone where one was named.
    """

    is_well: bool
    faults: tuple[judging.Fault, ...]
    report: Report


def status(
    pipeline: Annotated[
        str,
        typer.Argument(
            help="show this one's stages (default: all pipelines)", autocompletion=completing.pipelines
        ),
    ] = "",
    gateway: asking.Gateway = DEFAULT_GATEWAY,
    user: asking.User = "admin",
    password_file: asking.PasswordFile = None,
    home: asking.Home = None,
    timeout: asking.Timeout = 10.0,
    as_json: asking.AsJson = False,
) -> None:
    """Show pipelines, or the stages of one, and what is wrong.

    Exit code 0: all is well; 1: something is wrong; 2: the gateway cannot be asked, or has no such pipeline.
    """
    source = asking.source(gateway, user, password_file, home, timeout)
    try:
        whole, old = source.judged()
        seen = of_pipeline(whole, pipeline) if pipeline else whole
    except (asking.NotAsked, naming.Unknown) as error:
        fail(error, asking.NOT_ASKED)
    found = judging.faults(seen, old)
    if as_json:
        told = Status(is_well=not found, faults=found, report=seen)
        tell_json(told)
    else:
        _show(seen, is_one=bool(pipeline))
        for fault in found:
            typer.echo(str(fault))
        if not found:
            typer.echo("all is well")
    raise typer.Exit(1 if found else 0)


def of_pipeline(report: Report, name: str) -> Report:
    """The report with one pipeline alone.

    Raises:
        naming.Unknown: there is none of that name.
    """
    pipeline = naming.pipeline(report, name)
    functions = {name, *(stage.function for stage in pipeline.stages)}
    return msgspec.structs.replace(
        report,
        pipelines=(pipeline,),
        functions=(),
        decisions=tuple(d for d in report.decisions if d.function in functions),
    )


def table(report: Report, width: int | None, *, is_one: bool, is_plain: bool) -> list[Text]:
    """The one table's lines: stages of one pipeline, else pipelines and functions."""
    if is_one:
        stages = report.pipelines[0].stages
        longest = tables.longest_queue(stages)
        rows = [tables.stage_row(stage, longest, is_plain=is_plain) for stage in stages]
        return lines(tables.STAGES, rows, width)
    made = lines(tables.PIPELINES, [tables.pipeline_row(p) for p in report.pipelines], width)
    if report.functions:
        made += lines(tables.FUNCTIONS, [tables.function_row(f) for f in report.functions], width)
    return made


def _show(report: Report, *, is_one: bool) -> None:
    from rich.console import Console

    console = Console(markup=False, highlight=False)
    width = console.width if console.is_terminal else None
    for line in table(report, width, is_one=is_one, is_plain=console.options.ascii_only):
        console.print(line, soft_wrap=True)
