"""`keystage bench NAME`: finds the benchmark, runs it, lets the frame report it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from keystage.cli.errors import fail

_NAMES = {
    "hop": "hand-off of an activation between two workers, beside a raw UNIX socket",
    "router": "router and eight zero-time stages, beside a trivial FastAPI application",
    "burst": "the controller under bursts, beside the best static allocation",
}


def bench(
    name: Annotated[str, typer.Argument(help="; ".join(f"{key}: {text}" for key, text in _NAMES.items()))],
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on standard output")] = False,
    out: Annotated[Path, typer.Option(help="folder for bench-NAME.json")] = Path("out"),
    quick: Annotated[bool, typer.Option("--quick", help="fewer rounds: a look, not a result")] = False,
) -> None:
    """Run a benchmark; medians with spread, exit 3 when it was too noisy to be a result."""
    import importlib

    if name not in _NAMES:
        fail(f"no benchmark {name!r}; there are {', '.join(_NAMES)}", 2)
    from keystage.bench.frame import report

    module = importlib.import_module(f"keystage.bench.{name}")
    raise typer.Exit(report(name, module.run(quick=quick), as_json=as_json, out=out))
