"""`keystage compare`: two runs of the load generator beside each other."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from keystage.cli.errors import fail

METRIC_HELP = (
    "latency, ttft, tpot (p50, p90, p99, mean of it), latency_p99, .., goodput, failure_share; repeatable"
)


def compare(
    a: Annotated[Path, typer.Argument(help="folder of a report, or requests.jsonl")],
    b: Annotated[Path, typer.Argument(help="likewise; verdicts say what B is beside A")],
    metric: Annotated[list[str] | None, typer.Option(help=METRIC_HELP)] = None,
    json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
    force: Annotated[bool, typer.Option(help="compare runs of other plans, and invalid ones")] = False,
    confidence: Annotated[float, typer.Option(help="of all intervals together")] = 0.95,
    block: Annotated[float | None, typer.Option(help="seconds of a block of the bootstrap")] = None,
    seed: Annotated[int, typer.Option(help="seed of the bootstrap")] = 0,
    slo_ttft: Annotated[float | None, typer.Option(help="bound on TTFT (s), for goodput")] = None,
    slo_tpot: Annotated[float | None, typer.Option(help="bound on TPOT (s)")] = None,
    slo_latency: Annotated[float | None, typer.Option(help="bound on the whole answer (s)")] = None,
    fail_if_worse: Annotated[
        bool, typer.Option("--fail-if-worse", help="exit code 1 if B is worse in any measure")
    ] = False,
) -> None:
    """Compare two runs of one plan: differences, confidence intervals, verdicts."""
    from keystage.loadgen import compare as comparing
    from keystage.loadgen.app import console
    from keystage.loadgen.measures import Slo
    from keystage.loadgen.sheets import printable
    from keystage.loadgen.table import rendered

    given = (("--slo-ttft", slo_ttft), ("--slo-tpot", slo_tpot), ("--slo-latency", slo_latency))
    for flag, bound in given:
        if bound is not None and not (math.isfinite(bound) and bound > 0):
            fail(f"{flag} must be finite and above 0, got {bound:g}", 2)
    if not 0 <= seed < 2**32:
        fail(f"--seed must be in 0..2^32-1, got {seed}", 2)
    try:
        found = comparing.compare(
            a,
            b,
            metrics=metric or (),
            slo=Slo(slo_ttft, slo_tpot, slo_latency),
            is_forced=force,
            alpha=1 - confidence,
            block_s=block,
            seed=seed,
        )
    except comparing.CompareError as error:
        fail(error, 2)
    if json:
        typer.echo(comparing.to_json(found).decode())
    else:
        shown = console()
        shown.print(rendered(comparing.sheet(found)))
        for note in found.notes:
            shown.print(f"note: {printable(note)}", style="yellow")
    raise typer.Exit(1 if fail_if_worse and any(line.verdict == "worse" for line in found.lines) else 0)
