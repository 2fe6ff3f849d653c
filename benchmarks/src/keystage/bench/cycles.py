"""`keystage bench cycles`: ten thousand starts and ends of replicas, and what the platform holds after each.

One `keystage up` with a tiny random Llama in two stages: all replicas of a stage are asked for, serve a
request, and leave, turn after turn (`cycles_world`). Between turns, when none is there, descriptors, threads,
memory, shared memory, files and zombies of all lasting parts are read (`cycles_watch`), and of the replicas
when they are there. A line is fitted through each over the cycles (`soak_trend`: 12 blocks of the second
half); what leaks has a slope whose interval lies above 0, where all are told together with an error of 5 %.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from keystage.bench import cycles_figures
from keystage.bench.cycles_watch import Reading, cpu_s, memory_bytes
from keystage.bench.cycles_world import STAGES, CyclesWorld
from keystage.bench.frame import BenchError, BenchResult, Figure
from keystage.bench.machine_use import MachineUse
from keystage.bench.results_page import FOLDER, write_page
from keystage.bench.soak_trend import LEVEL, Trend, trend

FULL, PART, QUICK = 10_000, 1_000, 48
AT_ONCE, QUICK_AT_ONCE = 8, 4
"""Replicas of each stage that start together."""
SAMPLES = 160
"""Readings over a run at most: each walks through /proc."""
FILL = 8500
"""Requests to the lasting replicas before a full run's turns: tables of 8,192 sessions are full then."""
REQUESTS = 2
"""Served in each turn, by whichever replicas the router chooses."""
WARM_RATIO = 0.5
"""Of the cycles: heaps fill in it, and bounded tables (starts, names of those that left, decisions)."""
PER = 1000
PICTURE = "cycles.png"
_MIB = float(1 << 20)


@dataclasses.dataclass(slots=True)
class Seen:
    """What a run saw.

    Attributes:
        cycles: starts so far at each reading.
        readings: by name, one value each.
        up_s: seconds from the wish to the last ready replica, of each turn.
        down_s: likewise to the last end.
        requests: served.
        ended: whether a lasting part ended meanwhile, in words.
        cpu_s: processor seconds by role over the run.
        wall_s: seconds of all turns.
    """

    cycles: list[int] = dataclasses.field(default_factory=list)
    readings: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    up_s: list[float] = dataclasses.field(default_factory=list)
    down_s: list[float] = dataclasses.field(default_factory=list)
    requests: int = 0
    ended: str = ""
    cpu_s: dict[str, float] = dataclasses.field(default_factory=dict)
    wall_s: float = 0.0

    def add(self, cycles: int, reading: Reading) -> None:
        """One more reading; all have the same names."""
        for name, value in reading.items():
            self.readings.setdefault(name, []).append(value)
        self.cycles.append(cycles)


def run(
    *,
    quick: bool = False,
    full: bool = False,
    device: str | None = None,
    seconds: float | None = None,
    out: Path = Path("out"),
) -> BenchResult:
    """Runs the turns.

    Args:
        quick: tens of cycles: a look that can tell no slope.
        full: ten thousand; a thousand without either.
        device: of the stages, `cpu` by default.
        seconds: no turn begins after so many, however many cycles are left.
        out: the picture goes to its folder `cycles`.

    Raises:
        BenchError: a part did not become ready, a request was not served rightly, a replica did not end.
    """
    count, at_once = (QUICK, QUICK_AT_ONCE) if quick else (FULL if full else PART, AT_ONCE)
    use = MachineUse()
    with (
        tempfile.TemporaryDirectory(prefix="keystage-cycles-") as folder,
        CyclesWorld(Path(folder), at_once, device or "cpu") as world,
    ):
        if full:
            world.fill(FILL)
        seen = turns(world, count, math.inf if seconds is None else seconds)
    disturbance = use.disturbance()
    trends = trends_of(seen)
    picture = cycles_figures.draw(out / "cycles" / PICTURE, seen.cycles, seen.readings, trends, WARM_RATIO)
    result = BenchResult(
        [_row(name, one, len(trends)) for name, one in trends.items()],
        _figures(seen, trends),
        [*_notes(seen, at_once), f"picture: {picture}"],
        disturbance,
    )
    if full and seconds is None:
        cycles_figures.draw(FOLDER / PICTURE, seen.cycles, seen.readings, trends, WARM_RATIO)
        write_page("cycles", "Ten thousand starts and ends of replicas", result, pictures=[PICTURE])
    return result


def turns(world: CyclesWorld, count: int, seconds: float = math.inf) -> Seen:
    """Starts and ends replicas until `count` were started, or time is up, reading now and then.

    Raises:
        BenchError: see `run`.
    """
    seen = Seen()
    every = max(1, round(count / (world.at_once * STAGES) / SAMPLES))
    world.ask()
    parts = world.parts()
    before_s, begun_s = _used(parts), time.monotonic()
    first = started = world.started()
    turn = 0
    while True:
        is_over = started - first >= count or time.monotonic() - begun_s >= seconds
        is_read = is_over or turn % every == 0
        held = _of_replicas([r.pid for r in world.replicas()]) if is_read else {}
        at_s = time.monotonic()
        world.down()
        seen.down_s.append(time.monotonic() - at_s)
        stats = world.settle()
        if is_read:
            try:
                reading = world.watch.read(parts)
            except (psutil.Error, OSError) as error:
                raise BenchError(f"a lasting part ended after {started - first} cycles: {error}") from error
            known = {"router: workers known": float(len(stats.replicas))}
            seen.add(started - first, reading | known | held)
            print(f"{started - first} of {count} cycles", file=sys.stderr)
        if is_over:
            break
        at_s = time.monotonic()
        world.up()
        seen.up_s.append(time.monotonic() - at_s)
        started = world.started()
        for _ in range(REQUESTS):
            world.ask()
        seen.requests += REQUESTS
        turn += 1
    seen.wall_s = time.monotonic() - begun_s
    if world.parts() != parts:
        seen.ended = f"lasting parts were {parts}, are {world.parts()}"
    after_s = _used(parts)
    seen.cpu_s = {role: used - before_s.get(role, 0.0) for role, used in after_s.items()}
    return seen


def _of_replicas(pids: Sequence[int]) -> Reading:
    """What a replica holds, as a mean over those that are there."""
    sums = np.zeros(4)
    for pid in pids:
        folder = Path(f"/proc/{pid}")
        pss, anonymous = memory_bytes(pid)
        files, threads = (sum(1 for _ in (folder / name).iterdir()) for name in ("fd", "task"))
        sums += (files, threads, anonymous / _MIB, pss / _MIB)
    names = ("files", "threads", "anonymous MiB", "PSS MiB")
    return {f"one replica: {what}": float(v) / len(pids) for what, v in zip(names, sums, strict=True)}


def _used(parts: Mapping[str, Sequence[int]]) -> dict[str, float]:
    """Processor seconds by role; those of ended replicas are their parent's, the supervisor."""
    found: dict[str, float] = {}
    for role, pids in parts.items():
        own, children = (sum(values) for values in zip(*(cpu_s(pid) for pid in pids), strict=True))
        found[role] = own
        if role == "supervisor":
            found["replicas"] = children
    return found


def trends_of(seen: Seen) -> dict[str, Trend]:
    """A line through every reading, over cycles."""
    at = np.array(seen.cycles, float)
    end = float(at[-1])
    return {
        name: trend(at, np.array(values), end, warm_ratio=WARM_RATIO)
        for name, values in seen.readings.items()
    }


def rising(trends: Mapping[str, Trend], *, alone: bool = False) -> list[str]:
    """Slopes above 0.

    Args:
        trends: all that are told.
        alone: those whose own interval of 95 % lies above 0; else that which holds for all together.
    """
    count = 1 if alone else len(trends)
    return [name for name, one in trends.items() if one.low_among(count) > 0]


def _row(name: str, one: Trend, count: int) -> dict[str, Any]:
    told = bool(np.isfinite(one.low))
    words = "holds 0" if one.low <= 0 <= one.high else "falls" if one.low < 0 else "holds 0 among all"
    return {
        "what": name,
        "level": one.level,
        f"per_{PER}_cycles": PER * one.slope,
        "low": PER * one.low if told else "",
        "high": PER * one.high if told else "",
        "low_among_all": PER * one.low_among(count) if told else "",
        "interval": ("RISES" if one.low_among(count) > 0 else words) if told else "too short to tell",
    }


def _figures(seen: Seen, trends: Mapping[str, Trend]) -> dict[str, Figure]:
    rises, alone = rising(trends), rising(trends, alone=True)
    count = max(1, seen.cycles[-1])
    used_s = sum(seen.cpu_s.values()) / count
    by_chance = (1 - LEVEL) / 2 * sum(one.error > 0 for one in trends.values())
    return {
        "cycles": Figure([seen.cycles[-1]], "replicas started, used and ended"),
        "rising": Figure(
            [len(rises)], f"slopes above 0, all told together: {', '.join(rises) or 'none'}", "0"
        ),
        "rising_alone": Figure(
            [len(alone)],
            f"slopes whose own 95 % interval lies above 0: {', '.join(alone) or 'none'}",
            f"{by_chance:.1f} by chance",
        ),
        "parts_ended": Figure([float(bool(seen.ended))], seen.ended or "no lasting part ended", "0"),
        "zombies": Figure([max(seen.readings["zombies"])], "most dead processes not reaped", "0"),
        "cycles_per_s": Figure([count / seen.wall_s], "starts and ends a second"),
        "cpu_ms_per_cycle": Figure([1e3 * used_s], "processor time of all parts for one start and end"),
    }


def _notes(seen: Seen, at_once: int) -> list[str]:
    count = max(1, seen.cycles[-1])
    shares = ", ".join(
        f"{role} {1e3 * used / count:.1f}" for role, used in sorted(seen.cpu_s.items(), key=lambda i: -i[1])
    )
    busy = sum(seen.cpu_s.values()) / seen.wall_s
    return [
        (
            f"{len(seen.up_s)} turns of {STAGES} x {at_once} replicas in {seen.wall_s:.0f} s; up "
            f"{np.median(seen.up_s):.2f} s, down {np.median(seen.down_s):.2f} s (medians); {seen.requests} "
            "requests, all answered with the same tokens"
        ),
        (
            f"what bounds it: {busy:.2f} cores busy with the platform; processor time of one cycle in ms: "
            f"{shares}"
        ),
        (
            "memory is anonymous (heaps and stacks, what a fork inherited among them) and proportional (PSS, "
            "in which an inherited page counts more once it is written to); read between turns, when no "
            "replica that comes and goes is there, but for those of one replica: means over all before they "
            "leave"
        ),
        "trends: least squares through 12 blocks of the second half, 95 % Student intervals",
    ]
