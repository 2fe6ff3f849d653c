"""`keystage simulate`: one run of a simulated world under one policy, with report and plots."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from keystage.cli.errors import fail, make_folder

if TYPE_CHECKING:
    from keystage.controller.domain.decision import Action
    from keystage.controller.domain.snapshot import Snapshot
    from keystage.controller.domain.steering import Steering
    from keystage.controller.policy.settings import PolicySettings
    from keystage.simulator.api import World

POLICIES = ("keystage", "infless", "inferline", "cocktail", "static", "none")
LINE_EVERY_S = 10.0
MOST_LOG_BYTES = 1 << 40
"""A recorded run is kept whole; only a controller that runs for ever puts files aside."""


def simulate(
    world: Annotated[str, typer.Argument(help="WORLD.json, or a preset (--list shows them)")] = "demo",
    policy: Annotated[str, typer.Option(help=f"who steers: {', '.join(POLICIES)}")] = "keystage",
    seed: Annotated[int, typer.Option(help="seed of everything drawn")] = 0,
    out: Annotated[Path, typer.Option(help="folder of report and plots")] = Path("out"),
    log: Annotated[Path | None, typer.Option(help="write the event log here")] = None,
    decisions: Annotated[
        Path | None, typer.Option(help="write decisions here, for `keystage replay-decisions`")
    ] = None,
    effort: Annotated[float, typer.Option(help="the policy's knob: more replicas above 1")] = 1.0,
    table: Annotated[str, typer.Option(help="presets: A, the paper's loading; B, the same for all")] = "A",
    list_presets: Annotated[bool, typer.Option("--list", help="show the presets and end")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on standard output")] = False,
) -> None:
    """Simulate a cluster and its traffic; the same seed gives the same run, byte for byte."""
    from keystage.bench.paper_arrivals import PaperTraceError
    from keystage.bench.presets import presets
    from keystage.simulator import plots, report
    from keystage.simulator import table as tables
    from keystage.simulator.errors import WorldError
    from keystage.simulator.run import simulate as run
    from keystage.simulator.watch import Watched

    if list_presets:
        if as_json:
            typer.echo(json.dumps(presets(), indent=1))
            return
        for name, meaning in presets().items():
            typer.echo(f"{name:28} {meaning}")
        return
    if policy not in POLICIES:
        fail(f"--policy must be one of {', '.join(POLICIES)}, got {policy!r}", 2)
    if decisions is not None and policy != "keystage":
        fail(f"--decisions records Keystage's decisions, not those of {policy!r}", 2)
    if table not in ("A", "B"):
        fail(f"--table must be A or B, got {table!r}", 2)
    if seed < 0:
        fail(f"--seed must be 0 or more, got {seed}", 2)
    if not 0 < effort < math.inf:
        fail(f"--effort must be positive and finite, got {effort}", 2)
    make_folder(out)
    console = Console(stderr=as_json)
    try:
        described = _world(world, policy, seed, table)
        steering = _steering(policy, effort, described, decisions)
        watched = Watched(steering)
        with _following(console, described.duration_s, f"{world} under {policy}") as told:
            outcome = run(described, watched, seed, log=log, progress=told)
        made = report.reported(described, outcome, world, policy, seed)
        paths = report.write(made, outcome, out)
        paths += plots.draw(made, report.drawn(outcome, watched.points), out)
    except (WorldError, PaperTraceError) as error:
        fail(error, 2)
    except OSError as error:
        fail(f"{error.filename or out} cannot be written: {error.strerror}", 1)
    if as_json:
        typer.echo(paths[0].read_text().rstrip())
        return
    console.print(tables.render(made))
    console.print(f"written: {', '.join(str(path) for path in paths)}", highlight=False)


def _world(name: str, policy: str, seed: int, table: str) -> World:
    """A preset, else a file.

    Raises:
        WorldError: it is neither, or no world.
    """
    from keystage.bench.presets import preset_world, presets
    from keystage.simulator.errors import WorldError
    from keystage.simulator.files import read_world

    if name in presets():
        return preset_world(name, policy, seed, "A" if table == "A" else "B")
    if not Path(name).exists():
        raise WorldError(f"no preset and no file {name!r}; presets: {', '.join(presets())}")
    return read_world(Path(name))


def _steering(policy: str, effort: float, world: World, decisions: Path | None) -> Steering | None:
    from keystage.bench.paper_policies import Traffic
    from keystage.bench.paper_policies import policy as policy_of
    from keystage.bench.presets import traffic
    from keystage.bench.tuning_chosen import chosen

    if policy == "none":
        return None
    if decisions is not None:
        from keystage.controller.policy.settings import PolicySettings

        return _Logged(PolicySettings(effort=effort), decisions)
    known = traffic(world)
    if policy == "static" and len(known) != 1:
        fail(f"--policy static needs a world of one pipeline with arrivals, this has {len(known)}", 2)
    tuned, values = chosen(policy)
    return policy_of(policy, values).make(tuned * effort, known[0] if known else Traffic("", 0.0, 1.0))


class _Logged:
    """Keystage's policy whose every decision goes to a file."""

    def __init__(self, settings: PolicySettings, path: Path) -> None:
        from keystage.controller.decisions import DecisionLog
        from keystage.controller.policy.steering import Keystage

        path.unlink(missing_ok=True)
        self._settings = settings
        self._steering = Keystage(settings)
        self._log = DecisionLog(path, MOST_LOG_BYTES)

    def steer(self, snapshot: Snapshot) -> Sequence[Action]:
        """See `Steering.steer`."""
        from keystage.controller.decisions import Record
        from keystage.controller.domain.state import PolicyState

        before = self._steering.last.state if self._steering.last is not None else PolicyState()
        actions = self._steering.steer(snapshot)
        assert self._steering.last is not None
        self._log.append(
            Record(settings=self._settings, before=before, snapshot=snapshot, decision=self._steering.last)
        )
        return actions


@contextlib.contextmanager
def _following(console: Console, duration_s: float, what: str) -> Iterator[Callable[[float], None]]:
    """Yields a function to call with the simulated time: a bar on a terminal, else a line now and then."""
    if not console.is_terminal:
        yield _lines(console, duration_s, what)
        return
    from rich import progress as bars

    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.TextColumn("{task.fields[at_s]:.0f} s simulated"),
        bars.TimeElapsedColumn(),
    )
    with bars.Progress(*columns, console=console, refresh_per_second=5) as shown:
        task = shown.add_task(what, total=duration_s, at_s=0.0)
        yield lambda at_s: shown.update(task, completed=min(at_s, duration_s), at_s=at_s)


def _lines(console: Console, duration_s: float, what: str) -> Callable[[float], None]:
    told_s = time.monotonic()

    def advance(at_s: float) -> None:
        nonlocal told_s
        now_s = time.monotonic()
        if now_s - told_s >= LINE_EVERY_S:
            told_s = now_s
            console.print(f"{what}: {at_s:.0f} s simulated, arrivals end at {duration_s:.0f} s")

    return advance
