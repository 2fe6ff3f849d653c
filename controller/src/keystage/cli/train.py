"""`keystage train-cv`: learns how the variation of arrivals travels, and says whether that pays."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from keystage.cli.errors import fail
from keystage.cli.output import tell_json


def train_cv(
    out: Annotated[
        Path, typer.Option(help="weights file: .json, or .py for the module a release ships")
    ] = Path("attention.json"),
    seeds: Annotated[int, typer.Option(help="simulated chains to learn from, one per seed")] = 800,
    first_seed: Annotated[int, typer.Option(help="first of the seeds")] = 1,
    held_out: Annotated[int, typer.Option(help="chains per entry CV to test on, other seeds and rates")] = 12,
    recorded: Annotated[
        list[Path] | None,
        typer.Option(help="decisions.jsonl of a real run to learn from too; may be repeated"),
    ] = None,
    epochs: Annotated[int, typer.Option(help="passes over the chains")] = 250,
    workers: Annotated[int, typer.Option(help="processes that simulate")] = 2,
    quick: Annotated[
        bool, typer.Option("--quick", help="short runs, few chains: a look, not weights")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on standard output")] = False,
) -> None:
    """Train the CV predictor of the smoother; print its errors beside qna and a guess; write the weights.

    Exit 3 when the weights are not better than qna: they are written all the same, and say so.
    """
    from importlib.util import find_spec

    from rich import progress as bars
    from rich.console import Console

    from keystage.controller.maths.attention import Attention
    from keystage.training.report import example_text, text
    from keystage.training.session import TrainOptions, train
    from keystage.training.weights import check_path, save

    if find_spec("torch") is None:
        fail("train-cv needs torch: install keystage[worker]", 2)
    options = TrainOptions(
        seeds=min(seeds, 64) if quick else seeds,
        first_seed=first_seed,
        held_out=min(held_out, 2) if quick else held_out,
        recorded=tuple(recorded or ()),
        epochs=min(epochs, 60) if quick else epochs,
        workers=workers,
        scale=0.1 if quick else 1.0,
    )
    bar = bars.Progress(
        bars.TextColumn("{task.description}"), bars.BarColumn(), bars.TimeRemainingColumn(),
        console=Console(stderr=True), transient=True,
    )  # fmt: skip
    try:
        check_path(out)
        options.check()
        with bar:
            task = bar.add_task("", total=None)
            trained = train(
                options,
                lambda what, done, total: bar.update(task, description=what, completed=done, total=total),
            )
        save(trained.weights, out)
    except (ValueError, OSError) as error:
        fail(error, 2)
    metrics = trained.weights.metrics
    assert metrics is not None
    if as_json:
        told = {
            "file": str(out),
            "version": trained.weights.version,
            "recorded": trained.recorded,
            "metrics": metrics,
            "rows": trained.rows,
        }
        tell_json(told)
    else:
        for example in trained.shown:
            typer.echo(example_text(example, Attention(trained.weights)))
        typer.echo(text(trained.rows))
        typer.echo(
            f"{out}: version {trained.weights.version}, {metrics.chains} chains "
            f"({trained.recorded} recorded), error {metrics.attention:.3f} against {metrics.qna:.3f} by qna "
            f"and {metrics.guess:.3f} by the guess"
        )
    if metrics.attention >= metrics.qna:
        typer.echo("attention is not better than qna here: keep smoothing at qna", err=True)
        raise typer.Exit(3)
