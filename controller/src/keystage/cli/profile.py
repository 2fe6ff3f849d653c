"""`keystage profile`: what the stages of a bundle cost, over batch, tokens and cores."""

from __future__ import annotations

import json
import os
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keystage.cli.errors import fail
from keystage.wire.threads import SPIN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from keystage.models.profile import Grid, Measured


def profile(
    bundle: Annotated[str, typer.Argument(help="bundle folder")],
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N")] = "cpu",
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16 (default: the bundle's)")] = "",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of a worker, for the profile")] = 1,
    cores: Annotated[
        str, typer.Option(help="CPU threads to set against one another, as 2,4; with --write also written")
    ] = "",
    batches: Annotated[str, typer.Option(help="rows of a batch, as 1,2,4,8")] = "1,2,4,8",
    tokens: Annotated[int, typer.Option(help="positions of KV state that decode attends to")] = 64,
    item_tokens: Annotated[
        int, typer.Option(min=0, help="tokens of an item of single-pass work, as requests have (0: about 20)")
    ] = 0,
    chunks: Annotated[str, typer.Option(help="tokens of a prefill chunk, as 16,64,256")] = "16,64,256",
    repeats: Annotated[int, typer.Option(help="timed runs of each kind")] = 9,
    write: Annotated[
        bool, typer.Option("--write", help="write pipeline.json, and cpu-profile.json if --cores is given")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on standard output")] = False,
) -> None:
    """Measure the service time l(b) = alpha b + beta of every stage, with 95 % intervals."""
    os.environ.update(SPIN | dict(os.environ))  # as workers have it; read when torch is imported
    from rich.console import Console

    from keystage.bundle import store
    from keystage.bundle.errors import BundleError, SplitError
    from keystage.models.cpu_profile import cpu_profile, write_cpu_profile
    from keystage.models.profile import Grid, measure_bundle

    console = Console(stderr=as_json)
    try:
        grid = Grid(
            batches=_numbers("--batches", batches),
            tokens=tokens,
            item_tokens=item_tokens,
            chunks=_numbers("--chunks", chunks),
            cores=_numbers("--cores", cores) if cores else (),
            repeats=repeats,
        )
    except ValueError as error:
        fail(error, 2)
    if grid.cores and device != "cpu":
        fail(f"--cores sets CPU threads against one another, the device is {device}", 2)
    _check_kind(bundle)
    try:
        with console.status("loading") as status:
            measured = measure_bundle(
                bundle, device, dtype or None, threads, grid, write=write,
                report=lambda stage, _: status.update(f"stage {stage} done"),
            )  # fmt: skip
        if write and grid.cores:
            folder = store.bundle_path(bundle)
            write_cpu_profile(folder, cpu_profile(store.load(folder).stages, measured))
    except (SplitError, BundleError) as error:
        fail(error, error.exit_code)
    except OSError as error:
        fail(f"{error.filename or bundle}: {error.strerror}", 1)
    if as_json:
        typer.echo(json.dumps(_document(bundle, grid, measured)))
        return
    _print_lines(console, f"{bundle} on {device}", measured)
    if grid.cores:
        _print_cores(console, grid, measured)


def _check_kind(bundle: str) -> None:
    """Ends the command for a bundle that has no parameters to be timed."""
    from keystage.bundle import store
    from keystage.bundle.errors import BundleError

    try:
        pipeline = store.load(bundle)
    except BundleError as error:
        fail(error, error.exit_code)
    if pipeline.family == "emulated":
        fail(f"{bundle} is emulated: its times are those of --device emulated:alpha=..,beta=..", 2)
    if pipeline.program is not None:
        fail(f"{bundle} is a stream program: `keystage profile` times stages of models", 2)


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        fail(f"{option} takes numbers with commas between them, got {text!r}", 2)


def _print_lines(console: Console, title: str, measured: Sequence[Measured]) -> None:
    from rich.table import Table

    table = Table(title=title, caption="ms, +- half the 95 % interval (bootstrap over the repeats)")
    names = ("stage", "per row", "per batch", "misfit", "per prompt token", "per chunk", "per row, KV token")
    for name in names:
        table.add_column(name, justify="right")
    for index, result in enumerate(measured):
        found = result.profile
        is_looping = bool(result.prefill)
        table.add_row(
            str(index),
            _ms(found.alpha_s, found.alpha_error_s),
            _ms(found.beta_s, found.beta_error_s),
            f"{result.misfit_ratio:.0%}",
            _ms(found.prefill_token_s, found.prefill_error_s) if is_looping else "-",
            _ms(found.prefill_beta_s) if is_looping else "-",
            _ms(found.kv_token_s, found.kv_error_s) if is_looping else "-",
        )
    console.print(table)


def _print_cores(console: Console, grid: Grid, measured: Sequence[Measured]) -> None:
    from rich.table import Table

    few = min(grid.cores)
    table = Table(
        title="latency of a batch over threads (ms)", caption=f"change against {few}, 95 % interval"
    )
    for name in ("stage", "rows", *(f"{count} threads" for count in grid.cores), "change"):
        table.add_column(name, justify="right")
    for row in _core_rows(grid, measured):
        shown = [f"{1e3 * seconds:.3g}" for seconds in row["seconds"]]
        low, high = row["interval"]
        change = f"{row['ratio'] - 1:+.0%} ({low - 1:+.0%} .. {high - 1:+.0%})"
        table.add_row(str(row["stage"]), str(row["rows"]), *shown, change if len(shown) > 1 else "")
    console.print(table)
    ratios = [row["ratio"] for row in _core_rows(grid, measured)]
    if len(grid.cores) > 1:
        console.print(
            f"{max(grid.cores)} threads instead of {few}: median change over stages and batches "
            f"{statistics.median(ratios) - 1:+.0%}"
        )


def _core_rows(grid: Grid, measured: Sequence[Measured]) -> list[dict[str, Any]]:
    """Medians by cores, and the most cores over the fewest, of every stage and batch."""
    from keystage.models.service_time import median_ratio

    few, many = min(grid.cores), max(grid.cores)
    rows: list[dict[str, Any]] = []
    for stage, result in enumerate(measured):
        for batch in grid.batches:
            ratio, low, high = median_ratio(result.batches[many, batch], result.batches[few, batch])
            seconds = [statistics.median(result.batches[count, batch]) for count in grid.cores]
            rows.append(
                {"stage": stage, "rows": batch, "seconds": seconds, "ratio": ratio, "interval": [low, high]}
            )
    return rows


def _document(bundle: str, grid: Grid, measured: Sequence[Measured]) -> dict[str, Any]:
    import dataclasses

    import msgspec

    return {
        "bundle": str(Path(bundle)),
        "grid": dataclasses.asdict(grid),
        "stages": [
            {
                "profile": msgspec.to_builtins(result.profile),
                "misfit_ratio": result.misfit_ratio,
                "batches": [
                    {"cores": cores, "rows": rows, "seconds": list(times)}
                    for (cores, rows), times in result.batches.items()
                ],
                "prefill": [
                    {"tokens": length, "seconds": list(times)} for length, times in result.prefill.items()
                ],
            }
            for result in measured
        ],
        "cores": _core_rows(grid, measured) if grid.cores else [],
    }


def _ms(seconds: float, error_s: float | None = None) -> str:
    value = f"{1e3 * seconds:.4g}"
    return value if error_s is None else f"{value} +- {1e3 * error_s:.2g}"
