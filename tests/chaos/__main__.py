"""`python -m chaos`: one run, from its command line to its exit code.

Exit codes: 0 nothing was lost, wrong or duplicated, and every class of faults was reached as often as asked;
1 not so; 2 it cannot be run here; 130 ended by a signal.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import signal
import sys
import tempfile
import time
import uuid
from pathlib import Path

from chaos import network, schedule
from chaos.faults import Faults
from chaos.load import Load
from chaos.model import cases, write_bundle
from chaos.proof import prove, read_events
from chaos.report import Run, document, reached, text
from chaos.world import NAME, World, WorldError
from keystage.bundle.store import load

MORE_ROUNDS = 8
"""Classes that found nobody at work are tried again so often."""
SETTLE_S = 60.0


def options(words: list[str]) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="make chaos",
        description="Faults over a live system under load, and what became of every request.",
    )
    parser.add_argument(
        "--seed", type=int, default=None, help="of everything drawn; printed (default: drawn)"
    )
    parser.add_argument("--requests", type=int, default=10_000, help="at least so many")
    parser.add_argument("--clients", type=int, default=16, help="requests at once")
    parser.add_argument("--rate", type=float, default=12.0, help="requests a second at most, 0: no bound")
    parser.add_argument("--least", type=int, default=20, help="times each class strikes in mid-request")
    parser.add_argument("--gap", type=float, default=3.0, help="mean seconds from one fault to the next")
    parser.add_argument("--stages", type=int, default=3, help="stages of the pipeline (2 to 4)")
    parser.add_argument("--replicas", type=int, default=2, help="of each stage")
    parser.add_argument("--cases", type=int, default=160, help="distinct requests whose answers are computed")
    parser.add_argument("--only", default="", help="classes, comma separated (default: all that can be)")
    parser.add_argument("--without", default="", help="classes to leave out, comma separated")
    parser.add_argument("--no-redis", action="store_true", help="without journal: the narrower promise")
    parser.add_argument("--out", type=Path, default=Path("../out/chaos.json"), help="the report as JSON")
    parser.add_argument("--keep", action="store_true", help="keep state, logs and events, and say where")
    return parser.parse_args(words)


def chosen(asked: argparse.Namespace, cannot_cut: str) -> tuple[list[str], list[str]]:
    """Classes of faults of this run, and why others are left out.

    Raises:
        KeyError: a name is none.
    """
    wanted = [word for word in asked.only.split(",") if word] or schedule.names()
    left_out = [word for word in asked.without.split(",") if word]
    kinds, notes = [], []
    for name in dict.fromkeys(wanted):
        kind = schedule.by_name(name)
        if name in left_out:
            notes.append(f"{name} is left out: asked for")
        elif kind.deed == "cut" and cannot_cut:
            notes.append(f"{name} is left out: {cannot_cut}")
        elif kind.part == "redis" and asked.no_redis:
            notes.append(f"{name} is left out: no Redis")
        else:
            kinds.append(name)
    for name in left_out:
        schedule.by_name(name)
    return kinds, notes


async def run(asked: argparse.Namespace, folder: Path, kinds: list[str], notes: list[str]) -> Run:
    """One run, to its end."""
    bundle, model = await asyncio.to_thread(write_bundle, folder, NAME, asked.stages)
    known = await asyncio.to_thread(cases, model, asked.seed, asked.cases)
    world = World(folder, bundle, load(bundle), asked.replicas, has_redis=not asked.no_redis)
    requests = Load(asked.seed, uuid.uuid4().hex[:12], known, asked.requests)
    failed: list[str] = []
    left: list[str] = []
    is_striking = True
    faults = Faults(world, lambda: requests.in_flight > 0, lambda: not is_striking)
    try:
        await world.start()
        say(f"up: {world.gateway}, {asked.stages} stages x {asked.replicas}, state in {folder}")
        sending = asyncio.create_task(
            requests.run(world.url, NAME, asked.clients, lambda: is_striking, asked.rate)
        )
        try:
            await strike(asked, world, faults, kinds)
        finally:
            is_striking = False
            await sending
        if not await whole_again(world):
            failed.append(f"not every replica is ready {SETTLE_S:g} s after the last fault")
    finally:
        left = await world.stop()
    failed += [f"left over: {line}" for line in left]
    found = prove(read_events(world.events, NAME), faults.hits)
    notes = [*notes, *(f"not done: {one}" for one in faults.missed)]
    return Run(
        asked.seed, tuple(kinds), asked.least, requests.asked, faults.hits, found, tuple(notes), tuple(failed)
    )


async def strike(asked: argparse.Namespace, world: World, faults: Faults, kinds: list[str]) -> None:
    """The schedule, then once more what found nobody in mid-request."""
    await faults.run(schedule.schedule(asked.seed, kinds, asked.least, asked.gap))
    rng = random.Random(f"{asked.seed} more")
    for _ in range(MORE_ROUNDS):
        await asyncio.sleep(1.5)  # the event logs are flushed with the heartbeats
        seen = reached(faults.hits, prove(read_events(world.events, NAME), faults.hits))
        more = schedule.missing(asked.least, seen, kinds)
        if not more:
            return
        await faults.run([schedule.drawn(rng, kind, asked.gap) for kind in more])


async def whole_again(world: World) -> bool:
    """Whether everything that is wanted runs again within a bound."""
    end_s = time.monotonic() + SETTLE_S
    while time.monotonic() < end_s:
        if await world.is_whole():
            return True
        await asyncio.sleep(0.2)
    return False


def say(what: str) -> None:
    """Tells who watches."""
    sys.stderr.write(f"chaos: {what}\n")
    sys.stderr.flush()


def main(words: list[str]) -> int:
    """Runs, reports, and returns the exit code."""
    asked = options(words)
    cannot_cut = network.enter(["-m", "chaos", *words])
    if asked.seed is None:
        asked.seed = random.SystemRandom().randrange(1 << 31)
    if not asked.no_redis and shutil.which("redis-server") is None:
        say("redis-server is not installed: the run goes without it, and so without its promise (--no-redis)")
        asked.no_redis = True
    try:
        kinds, notes = chosen(asked, cannot_cut)
    except KeyError as error:
        say(str(error.args[0]))
        return 2
    say(f"seed {asked.seed}; {asked.least} times each: {', '.join(kinds)}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # whoever ends a run leaves nothing behind
    folder = Path(tempfile.mkdtemp(prefix="kc", dir="/tmp"))
    done = None
    try:
        done = asyncio.run(run(asked, folder, kinds, notes))
    except WorldError as error:
        say(str(error))
        return 2
    except KeyboardInterrupt:
        say("ended by a signal: no report")
        return 130
    finally:
        has_failed = done is None or bool(document(done)["faults"])
        if asked.keep or has_failed:
            say(f"state, logs and events are kept in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    told = document(done)
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(told, indent=1))
    print(text(told))
    return 1 if told["faults"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
