"""`keystage program`: look at a stream program, run one in this process; what other commands need of it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from keystage.cli.errors import fail
from keystage.cli.output import tell_json
from keystage.wire.unreadable import UNREADABLE

if TYPE_CHECKING:
    from keystage.streams.api import Program

app = typer.Typer(help="Stream programs: check one, run one in this process.", no_args_is_help=True)

ProgramOptions = Annotated[
    list[str] | None,
    typer.Option("--option", help="KEY=VALUE for the program's function; VALUE as JSON or text"),
]
HandlerFolder = Annotated[Path | None, typer.Option("--handler", help="folder of the program's own code")]
PATH_HELP = "`diffusion`, `language`, `agents` or MODULE:FUNCTION"
SAMPLES = 256
"""Different bodies of a replay."""


@app.command()
def check(
    path: Annotated[str, typer.Argument(help=PATH_HELP)],
    option: ProgramOptions = None,
    handler: HandlerFolder = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on standard output")] = False,
) -> None:
    """Check a program's graph and print it."""
    program = _opened(path, option, handler)
    if as_json:
        tell_json({"name": program.name, "graph": program.graph})
        return
    for line in describe(program):
        typer.echo(line)


@app.command()
def run(
    path: Annotated[str, typer.Argument(help=PATH_HELP)],
    body: Annotated[list[str] | None, typer.Option(help="request body, or @FILE; may be repeated")] = None,
    content_type: Annotated[str, typer.Option(help="of the bodies")] = "application/json",
    batch: Annotated[int, typer.Option(help="largest batch (0: no bound)")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    trace: Annotated[bool, typer.Option("--trace", help="print every execution of a module")] = False,
    out: Annotated[
        Path | None, typer.Option(help="folder for the answers, else those of text are printed")
    ] = None,
    option: ProgramOptions = None,
    handler: HandlerFolder = None,
) -> None:
    """Run a program to its end in this process, for debugging."""
    from keystage.streams.local import run_local

    program = _opened(path, option, handler)
    bodies = [_body(given) for given in body or []]
    if not bodies:
        fail("--body is needed: text, or @FILE", 2)
    report = (lambda step: typer.echo(str(step), err=True)) if trace else None
    done = run_local(program, bodies, content_type=content_type, batch=batch, device=device, report=report)
    is_well = True
    for number, answer in enumerate(done.answers):
        if answer.refusal:
            is_well = False
            typer.echo(f"request {number}: {answer.http_status}: {answer.refusal}", err=True)
        elif out is not None:
            out.mkdir(parents=True, exist_ok=True)
            file = out / f"answer-{number}{_suffix(answer.content_type)}"
            file.write_bytes(answer.body)
            typer.echo(str(file))
        elif answer.content_type.startswith(("text/", "application/json")) or "+json" in answer.content_type:
            typer.echo(answer.body.decode("utf-8", "replace"))
        else:
            typer.echo(
                f"request {number}: {len(answer.body)} bytes of {answer.content_type} (--out keeps them)"
            )
    raise typer.Exit(0 if is_well else 1)


def describe(program: Program) -> list[str]:
    """A program's graph in lines: modules with their streams, loops and state."""
    from keystage.streams.graph import Routes

    graph = program.graph
    routes = Routes(graph)
    lines = [f"{program.name}: requests on {graph.entry.name}, answers on {graph.exit.name}"]
    for index, module in enumerate(graph.modules):
        inputs = (" and " if module.join == "all" else " or ").join(s.name for s in module.inputs)
        outputs = ", ".join(s.name for s in module.outputs)
        notes = ["loop: " + ", ".join(routes.region(module.name))] if routes.is_loop(module.name) else []
        notes += ["keeps state"] if module.is_stateful else []
        notes += [f"partial SLO {module.partial_slo_s:g} s"] if module.partial_slo_s else []
        lines.append(
            f"  {index} {module.name}: {inputs} -> {outputs}" + (f"  ({'; '.join(notes)})" if notes else "")
        )
    return lines


def program_name(source: str) -> str:
    """The pipeline name of `program:diffusion` or `program:my.module:make` unless another is asked for."""
    from keystage.bundle.program import PREFIX
    from keystage.bundle.source import pipeline_name

    path = source.removeprefix(PREFIX)
    module, _, function = path.partition(":")
    last = module.rpartition(".")[2]
    return pipeline_name(last if function in ("", "program") else f"{last}-{function}")


def make_program(source: str, out: Path, name: str, option: list[str] | None, handler: Path | None) -> Path:
    """Writes the bundle of a program.

    Raises:
        SplitError: see `bundle.program.bundle_program`.
    """
    from keystage.bundle.program import bundle_program

    return bundle_program(source, out, name, options_of(option), handler)


def handler_env(handler: Path | None) -> dict[str, str]:
    """The variable that tells workers where a program's own code is."""
    return {} if handler is None else {"KEYSTAGE_HANDLER": str(handler.absolute())}


def write_samples(bundle: Path, handler: Path | None, seed: int) -> Path:
    """Writes bodies to send to a program, drawn by its module's `sample`; beside its bundle.

    Raises:
        SplitError: the module has none.
    """
    from keystage.bundle.store import load
    from keystage.streams.samples import sample_bodies

    pipeline = load(bundle)
    assert pipeline.program is not None
    file = bundle.parent / f"{pipeline.name}-bodies-{seed}.jsonl"
    bodies = sample_bodies(pipeline.program, SAMPLES, seed, handler)
    file.write_bytes(b"\n".join(bodies) + b"\n")
    return file


def options_of(given: list[str] | None) -> dict[str, Any]:
    """`KEY=VALUE` words as keyword arguments; a value that is no JSON is text."""
    options: dict[str, Any] = {}
    for word in given or []:
        key, equals, value = word.partition("=")
        if not equals or not key.isidentifier():
            fail(f"--option {word!r}: expected KEY=VALUE", 2)
        try:
            options[key] = msgspec.json.decode(value)
        except UNREADABLE:
            options[key] = value
    return options


def _opened(path: str, option: list[str] | None, handler: Path | None) -> Program:
    from keystage.bundle.errors import SplitError
    from keystage.bundle.program import program_path
    from keystage.streams.api import ProgramError
    from keystage.streams.graph_checks import GraphError
    from keystage.streams.handler import open_allowed

    try:
        return open_allowed(program_path(path), options_of(option), handler or Path.cwd())
    except (ProgramError, GraphError, SplitError) as error:
        fail(error, 2)


def _body(given: str) -> bytes:
    if given == "-":
        return sys.stdin.buffer.read()
    if not given.startswith("@"):
        return given.encode()
    try:
        return Path(given[1:]).read_bytes()
    except OSError as error:
        fail(f"--body {given}: {error.strerror}", 2)


def _suffix(content_type: str) -> str:
    import mimetypes

    return mimetypes.guess_extension(content_type.partition(";")[0].strip()) or ".bin"
