"""`keystage split`, `stack`, `emulate`: from a model to a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from keystage.cli.errors import fail
from keystage.cli.output import tell_json

MODEL_HELP = (
    "model folder, .gguf file, `smollm2`, `minilm` or `whisper-tiny.en` (in packages), "
    "`random:SHAPE` for random parameters of a model's shape, or a stream program: `program:diffusion`, "
    "`program:language`, `program:agents`, `program:MODULE:FUNCTION`"
)


AsJson = Annotated[bool, typer.Option("--json", help="one JSON object on standard output")]


def split(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    stages: Annotated[int, typer.Option(help="number of stages")] = 4,
    method: Annotated[str, typer.Option(help="uniform, parameters or time")] = "parameters",
    out: Annotated[Path | None, typer.Option(help="bundle folder (default .keystage/bundles/NAME)")] = None,
    name: Annotated[str, typer.Option(help="pipeline name (default: from the model)")] = "",
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16")] = "fp32",
    force: Annotated[bool, typer.Option("--force", help="make it again even if it is there")] = False,
    profile: Annotated[
        str,
        typer.Option(help="with --method time: bundle of the model, measured by `keystage profile`"),
    ] = "",
    option: Annotated[list[str] | None, typer.Option(help="KEY=VALUE for a stream program")] = None,
    handler: Annotated[Path | None, typer.Option(help="folder of a stream program's own code")] = None,
    as_json: AsJson = False,
) -> None:
    """Split a model into a bundle: pipeline.json, one file per stage, and stack.yml for faas-cli."""
    from keystage.bundle.errors import BundleError, SplitError
    from keystage.bundle.program import PREFIX
    from keystage.bundle.source import pipeline_name
    from keystage.bundle.split import split as split_model
    from keystage.cli.program import make_program, program_name

    if model.startswith(PREFIX):
        chosen = name or program_name(model)
        try:
            made = make_program(model, out or bundle_folder(chosen), chosen, option, handler)
        except SplitError as error:
            fail(error, error.exit_code)
        _tell(made, as_json=as_json)
        return
    chosen = name or pipeline_name(model)
    try:
        folder = split_model(
            model, stages, method, out or bundle_folder(chosen), chosen, dtype, force, profile or None
        )
    except (SplitError, BundleError) as error:
        fail(error, error.exit_code)
    _tell(folder, as_json=as_json)


def stack(
    bundle: Annotated[str, typer.Argument(help="bundle folder")],
    home: Annotated[str, typer.Option(help="address of the bundle where it will run")] = "",
    registry: Annotated[str, typer.Option(help="where the images `router` and `stage` are")] = "",
    tag: Annotated[str, typer.Option(help="of the images (default: this version)")] = "",
) -> None:
    """Print the stack.yml of a bundle for another place: a cluster's address of it, its images."""
    from keystage.bundle.errors import BundleError
    from keystage.bundle.stack_yml import REGISTRY, stack_yml
    from keystage.bundle.store import bundle_path, load

    if home and not home.startswith(("file:///", "http://", "https://")):
        fail(f"--home must be file:///folder or http(s)://host/folder, got {home!r}", 2)
    for option, value in (("--home", home), ("--registry", registry), ("--tag", tag)):
        if "$" in value:
            fail(f"{option} {value!r} holds a dollar, in whose place faas-cli would put its environment", 2)
    try:
        pipeline = load(bundle)
    except BundleError as error:
        fail(error, error.exit_code)
    place = home.rstrip("/") or bundle_path(bundle).resolve()
    typer.echo(stack_yml(pipeline, place, registry=registry or REGISTRY, tag=tag), nl=False)


def emulate(
    name: Annotated[str, typer.Argument(help="pipeline name")],
    stages: Annotated[int, typer.Option(help="number of stages")] = 4,
    execution: Annotated[str, typer.Option(help="looping or single-pass")] = "single-pass",
    activation_bytes: Annotated[int, typer.Option(help="bytes per row from stage to stage")] = 4096,
    context_length: Annotated[int, typer.Option(help="token positions of a looping session")] = 4096,
    out: Annotated[Path | None, typer.Option(help="bundle folder (default .keystage/bundles/NAME)")] = None,
    as_json: AsJson = False,
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
    _tell(folder, as_json=as_json)


def bundle_folder(name: str, home: Path | None = None) -> Path:
    """Where a bundle of this name lies by default: in the state folder."""
    from keystage.local.config import LocalSettings

    return (home or LocalSettings().home) / "bundles" / name


def _tell(folder: Path, *, as_json: bool) -> None:
    """Says where a bundle is; as JSON also what is in it."""
    if not as_json:
        typer.echo(str(folder))
        return
    from keystage.bundle.store import load

    tell_json({"bundle": str(folder), "pipeline": load(folder)})
