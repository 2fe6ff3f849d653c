"""`keystage trace`: what a trace file looks like, before it is replayed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from keystage.cli.errors import fail
from keystage.cli.load import names

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from keystage.loadgen.traces.survey import Quantiles, Survey

app = typer.Typer(help="Traces of functions and LLM requests.", no_args_is_help=True)


@app.callback()
def trace() -> None:
    """Traces of functions and LLM requests."""


@app.command()
def info(
    file: Annotated[Path, typer.Argument(help="Azure Functions 2019 or 2021, Azure LLM, Mooncake; also .gz")],
    kind: Annotated[str | None, typer.Option(help="format, found out by default")] = None,
    durations: Annotated[Path | None, typer.Option(help="2019: durations file of the same day")] = None,
    memory: Annotated[Path | None, typer.Option(help="2019: memory file of the same day")] = None,
    within: Annotated[
        str | None, typer.Option(help="2019: arrivals within a minute: poisson (default), uniform, gamma:CV")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="of the arrivals within minutes")] = 0,
    functions: Annotated[str, typer.Option(help="app/func, or the func alone; comma-separated")] = "",
    apps: Annotated[str, typer.Option(help="comma-separated")] = "",
    triggers: Annotated[str, typer.Option(help="2019: http, timer, ...; comma-separated")] = "",
    top: Annotated[int | None, typer.Option(help="only the functions with the most invocations")] = None,
    from_s: Annotated[float, typer.Option("--from", help="start of the window, s")] = 0.0,
    to_s: Annotated[float | None, typer.Option("--to", help="end of the window, s, outside it")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on standard output")] = False,
    plots: Annotated[Path | None, typer.Option(help="folder for PNG plots")] = None,
) -> None:
    """Describe a trace: rates, variation at several scales, durations or tokens, busiest functions."""
    from rich.console import Console

    from keystage.loadgen.traces import Selection, TraceError, open_trace
    from keystage.loadgen.traces.opening import POISSON
    from keystage.loadgen.traces.survey import survey
    from keystage.loadgen.traces.survey_plots import draw

    console = Console(stderr=as_json)
    try:
        selection = Selection(names(functions), names(apps), names(triggers), top, from_s, to_s)
        opened = open_trace(file, kind=kind, durations=durations, memory=memory)
        if within is not None and opened.facts.minutes is None:
            fail(f"--within turns counts per minute into arrivals; {file} has a time in each row", 2)
        with console.status("reading"):
            found = survey(opened, selection, within=within or POISSON, seed=seed)
    except (TraceError, ValueError) as error:
        fail(error, 2)
    if as_json:
        typer.echo(json.dumps(found.document(), allow_nan=False))
    else:
        _print(console, found)
    if plots is not None:
        try:
            drawn = draw(found, plots)
        except OSError as error:
            fail(f"--plots {plots}: {error.strerror or error}", 1)
        files = ", ".join(path.name for path in drawn) or "none, there is no data"
        typer.echo(f"plots in {plots}: {files}", err=as_json)


def _print(console: Console, found: Survey) -> None:
    from rich.table import Table

    def line(name: str, text: str) -> None:
        console.print(f"{name:<22}{text}", soft_wrap=True, markup=False, highlight=False)

    line("trace", f"{found.path} ({found.kind})")
    line("cite", found.attribution)
    for note in found.notes:
        line("note", note)
    line("arrivals", found.arrivals)
    if found.first_s is None:
        line("invocations", "0: nothing is selected")
        return
    line("invocations", f"{found.rows} from {found.first_s:.3f} s to {found.last_s:.3f} s")
    line("rate", f"{_shown(found.rate_rps)}/s over {found.window_s:.3f} s")
    line("CV of gaps", _shown(found.gap_cv))
    if found.functions:
        line("functions", f"{found.functions} of {found.apps} apps")
    if found.triggers:
        line("triggers", ", ".join(f"{name} {count}" for name, count in found.triggers.items()))
    _print_quantiles(line, found)
    table = Table(title="arrivals in bins", title_justify="left")
    for name in ("scale", "bins", "mean", "CV", "variance/mean", "peak", "peak at"):
        table.add_column(name, justify="right")
    for scale in found.scales:
        table.add_row(
            f"{scale.scale_s:g} s", str(scale.bins), f"{scale.mean:.4g}" if scale.bins else "-",
            _shown(scale.cv), _shown(scale.dispersion), str(scale.peak), f"{scale.peak_at_s:.0f} s",
        )  # fmt: skip
    console.print(table)
    if found.top:
        table = Table(title="busiest functions", title_justify="left")
        for name in ("function", "trigger", "invocations", "share", "rate"):
            table.add_column(name, justify="left" if name in ("function", "trigger") else "right")
        for one in found.top:
            func = one.function[len(one.app) + 1 :]
            table.add_row(
                f"{_cut(one.app)}/{_cut(func)}", one.trigger, str(one.invocations),
                f"{one.share_ratio:.1%}", f"{_shown(one.rate_rps)}/s",
            )  # fmt: skip
        console.print(table)


def _print_quantiles(line: Callable[[str, str], None], found: Survey) -> None:
    distributions: list[tuple[str, Quantiles | None]] = [
        ("duration (s)", found.duration_s),
        ("memory (MB)", found.memory_mb),
        ("context tokens", found.context_tokens),
        ("generated tokens", found.generated_tokens),
    ]
    for name, quantiles in distributions:
        if quantiles is not None:
            at = dict(quantiles.at)
            shown = ", ".join(f"p{100 * p:g} {at[p]:.4g}" for p in (0.0, 0.25, 0.5, 0.9, 0.99, 1.0))
            line(name, f"mean {quantiles.mean:.4g}; {shown}")


def _cut(name: str) -> str:
    return name if len(name) <= 14 else name[:12] + ".."


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
