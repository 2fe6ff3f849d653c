"""The one command, `keystage`: each sub-command reads its flags and calls its part.

Parts are imported inside the commands, so that `keystage --help` is quick and an image without
torch can still run the others. Errors of a part are one line on standard error and its exit code;
a traceback is a bug.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from keystage.cli import (
    async_calls,
    bench,
    compare,
    completing,
    doctor,
    doctor_versions,
    explain,
    keysmanager,
    load,
    load_agent,
    openfaas,
    pipelines,
    profile,
    program,
    simulate,
    status,
    top,
    trace,
    train,
    upgrade,
    world,
)
from keystage.cli.errors import bad_settings, fail
from keystage.cli.output import closing, prepare, tell_json

NAME = "keystage"
SHOW_COMPLETION, INSTALL_COMPLETION = "--show-completion", "--install-completion"
COMPLETE = "_KEYSTAGE_COMPLETE"
"""What a shell sets to be completed, or to be given its script."""

PARTS = ("worker", "router", "gateway", "controller", "keysmanager")
"""Commands that are processes of a world."""

app = typer.Typer(
    name=NAME,
    help="Serve models too large for one GPU as independently scaled stage functions.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=True,
)


def _version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"{NAME} {doctor_versions.own() or 'of an unknown version'}")
        raise typer.Exit


@app.callback()
def keystage(
    version: Annotated[
        bool, typer.Option("--version", help="print this package's version", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Serve models too large for one GPU as independently scaled stage functions."""


app.command(name="run")(world.run)
app.command(name="up")(world.up)
app.command(name="upgrade")(upgrade.upgrade)
app.command(name="demo")(world.demo)
app.command(name="load")(load.load)
app.command(name="load-agent")(load_agent.load_agent)
app.command(name="compare")(compare.compare)
app.command(name="split")(pipelines.split)
app.command(name="stack")(pipelines.stack)
app.command(name="emulate")(pipelines.emulate)
app.command(name="profile")(profile.profile)
app.command(name="simulate")(simulate.simulate)
app.command(name="train-cv")(train.train_cv)
app.command(name="bench")(bench.bench)
app.command(name="keysmanager")(keysmanager.keysmanager)
app.command(name="cache")(keysmanager.cache)
app.add_typer(async_calls.app, name="async")
app.add_typer(program.app, name="program")
app.add_typer(trace.app, name="trace")
app.command(name="check-gateway")(openfaas.check_gateway)
app.command(name="doctor")(doctor.doctor)
app.command(name="status")(status.status)
app.command(name="top")(top.top)
app.command(name="explain")(explain.explain)


@app.command()
def worker() -> None:
    """Run a stage function (configured by KEYSTAGE_* variables)."""
    from keystage.worker.app import main as run_worker

    raise typer.Exit(run_worker())


@app.command()
def router() -> None:
    """Run a router function (configured by KEYSTAGE_* variables)."""
    from keystage.router.app import main as run_router

    raise typer.Exit(run_router())


@app.command()
def gateway() -> None:
    """Run the gateway (configured by KEYSTAGE_* variables)."""
    from keystage.gateway.app import main as run_gateway

    raise typer.Exit(run_gateway())


@app.command()
def controller() -> None:
    """Run the controller (configured by KEYSTAGE_* variables)."""
    from keystage.controller.app import main as run_controller

    raise typer.Exit(run_controller())


@app.command(name="replay-decisions")
def replay_decisions(
    file: Annotated[Path, typer.Argument(help="decisions.jsonl of a controller")],
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on standard output")] = False,
) -> None:
    """Run the policy again on every logged snapshot; exit 1 if any decision differs."""
    if not as_json:
        from keystage.controller.app import replay_decisions as replay

        raise typer.Exit(replay(file))
    from keystage.controller.decisions import replay as replayed

    try:
        count, differences = replayed(file)
    except OSError as error:
        fail(f"{file}: {error.strerror}", 2)
    tell_json({"decisions": count, "differences": differences})
    raise typer.Exit(1 if differences else 0)


def main() -> None:
    """Entry point of the `keystage` command."""
    arguments = sys.argv[1:]
    prepare(arguments)
    if arguments[:1] in ([one] for one in PARTS):
        _called(arguments)  # what it writes is its log: a supervisor reads what went wrong there
        return
    with closing():
        _called(arguments)


def _called(arguments: Sequence[str]) -> None:
    try:
        _complete(arguments)
        app(prog_name=NAME)
    except KeyboardInterrupt:
        sys.exit(130)
    except ValueError as error:
        told = bad_settings(error)
        if not told:
            raise  # not about the environment: a bug
        typer.echo(f"{NAME}: {told}", err=True)
        sys.exit(2)


def _complete(arguments: Sequence[str]) -> None:
    """What typer's completion lacks: addresses on a line of bash, and a shell by name.

    Its own flags take no shell, they look which one they run in.
    """
    words, place = os.environ.get("COMP_WORDS", "").split("\n"), os.environ.get("COMP_CWORD", "")
    if os.environ.get(COMPLETE) == "complete_bash" and len(words) > 1 and place.isdecimal():
        words, number = completing.joined(words, int(place))
        os.environ.update(COMP_WORDS="\n".join(words), COMP_CWORD=str(number))
    if len(arguments) != 2:
        return
    flag, shell = arguments
    if flag == SHOW_COMPLETION:
        os.environ[COMPLETE] = f"source_{shell}"
    elif flag == INSTALL_COMPLETION:
        from typer._completion_shared import install

        try:
            _, path = install(shell=shell, prog_name=NAME)
        except typer.Exit as unknown:
            sys.exit(unknown.exit_code)
        typer.echo(f"{shell}: completion is in {path}; it is there in the next terminal")
        sys.exit(0)


if __name__ == "__main__":
    main()
