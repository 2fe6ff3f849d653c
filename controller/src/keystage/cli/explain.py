"""`keystage explain STAGE`: why it has the replicas it has."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from keystage.cli import asking, completing, explaining, judging, naming
from keystage.cli.errors import fail
from keystage.cli.openfaas import DEFAULT_GATEWAY
from keystage.cli.output import tell_json
from keystage.observability.api import DecisionReport, FunctionReport, StageReport

STAGE_HELP = "function's name, PIPELINE/INDEX, or PIPELINE for all of its stages"


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """What `keystage explain --json` prints.

    Attributes:
        function: its function's name; the pipeline's for a pipeline.
        pipeline: where it belongs, empty for a function that is no stage.
        stage: how the stage stands, None for others.
        alone: how a function that is no stage stands, None for others.
        faults: what is wrong with it.
        decisions: the last ones, the newest last.
        old: in words how old all of it is, empty where it is fresh.
    """

    function: str
    pipeline: str
    stage: StageReport | None
    alone: FunctionReport | None
    faults: tuple[judging.Fault, ...]
    decisions: tuple[DecisionReport, ...]
    old: str


def explain(
    stage: Annotated[str, typer.Argument(help=STAGE_HELP, autocompletion=completing.stages)],
    last: Annotated[int, typer.Option(help="decisions at the most", min=1)] = 10,
    gateway: asking.Gateway = DEFAULT_GATEWAY,
    user: asking.User = "admin",
    password_file: asking.PasswordFile = None,
    home: asking.Home = None,
    timeout: asking.Timeout = 10.0,
    as_json: asking.AsJson = False,
) -> None:
    """Tell why a stage has the replicas it has: how it stands, and the last decisions with their inputs.

    Exit code 0: told; 2: the gateway cannot be asked, or has no such stage.
    """
    source = asking.source(gateway, user, password_file, home, timeout)
    try:
        report, old = source.judged()
        meant = naming.stage(report, stage)
    except (asking.NotAsked, naming.Unknown) as error:
        fail(error, asking.NOT_ASKED)
    found = explaining.decisions(report, meant, last)
    wrong = explaining.faults(meant)
    if as_json:
        made = Explanation(
            function=meant.function,
            pipeline=meant.pipeline.pipeline if meant.pipeline is not None else "",
            stage=meant.stage,
            alone=meant.alone,
            faults=wrong,
            decisions=found,
            old=old,
        )
        tell_json(made)
        return
    for line in explaining.standing(meant):
        typer.echo(line)
    for fault in wrong:
        typer.echo(f"wrong: {fault}")
    if old:
        typer.echo(f"wrong: {old}")
    for line in explaining.history(found, report.at_s):
        typer.echo(line)
