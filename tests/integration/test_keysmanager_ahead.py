"""Standbys register segments ahead: used when one is filled, let go of before memory counts as free.

On the CPU the mapping alone is made ahead; messages, choice and order of events are those of a GPU.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from keystage.bench.load import output_of
from keystage.bench.load_bundles import STAGE, write_bundle
from keystage.bench.load_world import LoadWorld
from keystage.bundle.api import Pipeline
from keystage.keysmanager.api import StandbyEntry

WAIT_S = 60.0
NAMES = ("one", "two", "three")


@pytest.fixture(scope="module")
def world() -> Iterator[LoadWorld]:
    with LoadWorld("cpu", "float32", 1) as made:
        yield made


@pytest.fixture(scope="module")
def bundles(world: LoadWorld) -> dict[Path, Pipeline]:
    """Three of one shape class."""
    return {
        world.folder / name: write_bundle(world.folder / name, name, 0.02, "float32", seed)
        for seed, name in enumerate(NAMES)
    }


@pytest.fixture
def folders(world: LoadWorld, bundles: dict[Path, Pipeline]) -> Iterator[list[Path]]:
    """All three are in memory, raw, used lately; afterwards no standby is wanted."""
    found = list(bundles)
    for folder in found:
        load(world, folder)
    yield found
    world.keep_standbys(found[0], 0)


def load(world: LoadWorld, folder: Path) -> None:
    async def body() -> None:
        got = await world.client.get(world.name(folder))
        os.close(got.fd)
        got.claim.close()

    asyncio.run(body())


def segments(pid: int) -> int:
    """Segments of the bundles that a process maps; 0 once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(f"/memfd:keystage-{name}-" in line for line in lines for name in NAMES)


def idle(world: LoadWorld) -> StandbyEntry:
    (standby,) = world.status().standbys
    assert standby.state == "idle"
    return standby


def wait(is_so: Callable[[], bool], what: str) -> None:
    until_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < until_s, what
        time.sleep(0.01)


def evict(world: LoadWorld, identity: str) -> None:
    async def body() -> None:
        entry = [h for h in (await world.client.status()).holders if h.identity == identity]
        assert entry
        await world.client.evict(identity)

    wait(lambda: all(h.claims == 0 for h in world.status().holders), "claims are closed")
    asyncio.run(body())


@pytest.mark.slow
def test_what_was_registered_is_used_and_everything_is_let_go_of_afterwards(
    world: LoadWorld, bundles: dict[Path, Pipeline], folders: list[Path]
) -> None:
    one, two, _ = folders
    fresh = world.fresh(two)
    try:
        fresh.timeline()
        expected = output_of(fresh, bundles[two])
    finally:
        fresh.end()
    world.keep_standbys(one, 1, folders)
    standby = idle(world)
    assert segments(standby.pid) == len(folders)
    assert set(standby.registered) == {bundles[folder].stages[STAGE].identity for folder in folders}
    replica = world.forked(two)
    try:
        replica.timeline()
        assert (replica.via, replica.pid) == ("standby", standby.pid)
        assert output_of(replica, bundles[two]) == expected
        assert "memory mapped ahead" in replica.output()
        wait(lambda: segments(replica.pid) == 0, "all segments are unmapped")
    finally:
        replica.end()


@pytest.mark.slow
def test_without_leave_nothing_is_registered(world: LoadWorld, folders: list[Path]) -> None:
    world.keep_standbys(folders[0], 1, None)
    standby = idle(world)
    replica = world.forked(folders[1])
    try:
        replica.timeline()
        assert replica.via == "standby"
        assert (standby.registered, standby.note) == ((), "")
        assert "mapped ahead" not in replica.output()
    finally:
        replica.end()


def test_an_evicted_segment_is_unmapped_before_its_eviction_is_told(
    world: LoadWorld, bundles: dict[Path, Pipeline], folders: list[Path]
) -> None:
    world.keep_standbys(folders[0], 1, folders)
    standby = idle(world)
    evict(world, bundles[folders[2]].stages[STAGE].identity)
    assert segments(standby.pid) == 2
    load(world, folders[2])
    wait(lambda: len(idle(world).registered) == 3, "it is registered again")
    assert idle(world).pid == standby.pid


@pytest.mark.slow
def test_a_standby_that_does_not_let_go_is_ended_before_memory_counts_as_free(
    world: LoadWorld, bundles: dict[Path, Pipeline], folders: list[Path]
) -> None:
    world.keep_standbys(folders[0], 1, folders)
    standby = idle(world)
    os.kill(standby.pid, signal.SIGSTOP)
    evict(world, bundles[folders[2]].stages[STAGE].identity)
    _, status = os.waitpid(standby.pid, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    wait(lambda: [s.state for s in world.status().standbys] == ["idle"], "another takes its place")


def test_a_standby_killed_while_it_has_segments_leaves_nothing_behind(
    world: LoadWorld, bundles: dict[Path, Pipeline], folders: list[Path]
) -> None:
    world.keep_standbys(folders[0], 1, folders)
    standby = idle(world)
    os.kill(standby.pid, signal.SIGKILL)
    os.waitpid(standby.pid, 0)
    evict(world, bundles[folders[2]].stages[STAGE].identity)

    def has_another() -> bool:
        found = world.status().standbys
        return len(found) == 1 and found[0].pid != standby.pid and len(found[0].registered) == 2

    wait(has_another, "another registers what is left")


def test_a_segment_beside_the_one_that_is_used_can_be_evicted_meanwhile(
    world: LoadWorld, bundles: dict[Path, Pipeline], folders: list[Path]
) -> None:
    world.keep_standbys(folders[0], 1, folders)
    replica = world.forked(folders[0])
    try:
        asyncio.run(world.client.evict(bundles[folders[1]].stages[STAGE].identity))
        assert segments(replica.pid) == 0
        replica.timeline()
        assert replica.via == "standby"
    finally:
        replica.end()


def test_invalidated_parameters_are_let_go_of(
    world: LoadWorld, bundles: dict[Path, Pipeline], folders: list[Path]
) -> None:
    world.keep_standbys(folders[0], 1, folders)
    standby = idle(world)
    asyncio.run(world.client.invalidate(bundles[folders[2]].stages[STAGE].identity))
    wait(lambda: segments(standby.pid) == 2, "it is unmapped")
    assert idle(world).pid == standby.pid
