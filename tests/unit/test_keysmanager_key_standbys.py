"""Standbys that nobody asked for: they follow the key-stage list, and leave a class that is somebody's."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
from support.keysmanager_forks import random_bundle

from keystage.keysmanager import events
from keystage.keysmanager.api import Fork, Gpu, Parameters, StageName
from keystage.keysmanager.catalog import Catalog
from keystage.keysmanager.daemon_forkserver import ForkServer
from keystage.keysmanager.daemon_key_standbys import KeyStandbys
from keystage.keysmanager.daemon_names import Names
from keystage.keysmanager.daemon_standbys import Standbys
from keystage.keysmanager.ledger import Ledger, LedgerSettings

GIB = 1 << 30


class World:
    """A daemon's parts without its processes: what the ledger wants started or ended is noted.

    Attributes:
        running: standbys by number, with their shape.
        free_bytes: of each of the two GPUs.
        is_short: of host memory.
    """

    def __init__(self, folder: Path, each: int = 1) -> None:
        self.bundle = random_bundle(folder / "b", layers=4, stages=4)
        self.ledger = Ledger(LedgerSettings(prepare="none"))
        self.names = Names(Catalog(folder / "bundles"), lambda _: None)
        self.standbys = Standbys(ForkServer({}), self.tell)
        self.running: dict[int, str] = {}
        self.free_bytes = 80 * GIB
        self.is_short = False
        self._now_s = 0.0
        self.keys = KeyStandbys(
            self.ledger, self.names, self.standbys, each, lambda: self.is_short, self._gpus
        )

    def _gpus(self) -> list[Gpu]:
        return [
            Gpu(index=n, uuid=f"GPU-{n}", name="g", total_bytes=100 * GIB, free_bytes=self.free_bytes)
            for n in range(2)
        ]

    def tell(self, event: events.Event) -> None:
        self._now_s += 10.0
        for instruction in self.ledger.handle(event, self._now_s):
            match instruction:
                case events.StartStandby(number, shape):
                    self.running[number] = shape
                    self.tell(events.StandbyReady(number, 1000 + number))
                case events.EndStandby(number):
                    del self.running[number]
                    self.tell(events.StandbyGone(number, "ended"))
                case _:
                    continue

    def name(self, stage: int) -> StageName:
        return StageName(self.bundle.as_uri(), stage)

    async def list_stages(self, *stages: int) -> None:
        found = await self.names.resolve_known([self.name(stage) for stage in stages])
        assert len(found) == len(stages)
        self.tell(events.KeyStagesSet(found))

    async def fork(self, stage: int, sharing: Literal["shared", "private"] = "shared", **env: str) -> None:
        found: tuple[Parameters, bytes] = await self.names.resolve(self.name(stage))
        own = {"KEYSTAGE_BUNDLE": self.bundle.as_uri(), "KEYSTAGE_STAGES": str(stage)}
        own |= {"KEYSTAGE_DEVICE": "cuda:0", "KEYSTAGE_REPLICA": "r1", **env}
        self.keys.learn(
            Fork(replica="r1", module="m", env=own, wanted_at_s=0.0, sharing=sharing), own, [found[0]]
        )

    async def looks(self, times: int = 5) -> list[int]:
        """Numbers of standbys by class, after so many looks."""
        for _ in range(times):
            await self.keys.look()
        counts: Mapping[str, int] = {s: list(self.running.values()).count(s) for s in self.running.values()}
        return sorted(counts.values())

    def close(self) -> None:
        self.keys.close()
        self.names.close()


@pytest.fixture
def run(tmp_path: Path) -> Callable[[Callable[[World], Coroutine[Any, Any, None]]], None]:
    def go(body: Callable[[World], Coroutine[Any, Any, None]]) -> None:
        async def whole() -> None:
            world = World(tmp_path)
            try:
                await body(world)
                await world.standbys.close()
            finally:
                world.close()

        asyncio.run(whole())

    return go


Run = Callable[[Callable[[World], Coroutine[Any, Any, None]]], None]


def test_key_stages_get_one_each_of_their_class_once_a_replica_has_shown_how(run: Run) -> None:
    async def body(world: World) -> None:
        await world.list_stages(0, 1, 2)
        assert await world.looks() == []
        await world.fork(1, KEYSTAGE_KV_BYTES="1000")
        assert await world.looks() == [1, 2]  # the first stage is of its own class, two middle ones share
        for shape in set(world.running.values()):
            wish = world.standbys.wish(shape)
            assert wish is not None
            assert (wish.is_own, wish.device) == (True, "cuda:0")
            assert (wish.env["KEYSTAGE_REPLICA"], wish.env["KEYSTAGE_KV_BYTES"]) == ("standby", "1000")

    run(body)


def test_one_waits_on_the_gpu_where_the_next_replica_goes(run: Run) -> None:
    async def body(world: World) -> None:
        await world.list_stages(1)
        await world.fork(1, KEYSTAGE_DEVICE="cuda:1", KEYSTAGE_NEXT_DEVICE="cuda:0")
        assert await world.looks() == [1]
        (shape,) = world.running.values()
        wish = world.standbys.wish(shape)
        assert wish is not None
        assert wish.device == wish.env["KEYSTAGE_DEVICE"] == "cuda:0"

    run(body)


def test_they_follow_the_list(run: Run) -> None:
    async def body(world: World) -> None:
        await world.fork(0)
        await world.list_stages(1, 2)
        assert await world.looks() == [2]
        await world.list_stages(2, 3)
        assert await world.looks() == [1, 1]
        await world.list_stages()
        assert await world.looks(1) == []
        assert not world.standbys.is_wanted()

    run(body)


def test_one_that_was_used_or_died_is_replaced_before_another_comes(run: Run) -> None:
    async def body(world: World) -> None:
        await world.fork(1)
        await world.list_stages(1)
        assert await world.looks() == [1]
        (number,) = world.running
        del world.running[number]
        world.tell(events.StandbyGone(number, "it died"))
        assert await world.looks() == []
        world.tell(events.Ticked())
        assert await world.looks() == [1]

    run(body)


def test_a_full_gpu_or_host_has_none(run: Run) -> None:
    async def body(world: World) -> None:
        await world.fork(1)
        await world.list_stages(0, 1)
        assert await world.looks() == [1, 1]
        world.free_bytes = 4 * GIB
        assert await world.looks(1) == [1]
        assert await world.looks(1) == []
        world.free_bytes = 11 * GIB  # enough to stay, too little to come
        assert await world.looks() == []
        world.free_bytes = 80 * GIB
        assert await world.looks() == [1, 1]
        world.is_short = True
        assert await world.looks() == []

    run(body)


def test_replicas_that_no_standby_could_become_teach_nothing(run: Run) -> None:
    async def body(world: World) -> None:
        await world.list_stages(1)
        await world.fork(1, KEYSTAGE_DEVICE="cpu")
        await world.fork(1, sharing="private")
        await world.fork(1, KEYSTAGE_DEVICE_COPY="0")
        assert await world.looks() == []

    run(body)


def test_a_class_that_somebody_asked_for_is_left_to_him(run: Run) -> None:
    async def body(world: World) -> None:
        await world.fork(1)
        await world.list_stages(1)
        assert await world.looks() == [1]
        (shape,) = set(world.running.values())
        read, write = os.pipe()
        world.standbys.want(shape, {"KEYSTAGE_DEVICE": "cuda:0"}, read, 3)
        assert await world.looks() == [3]
        await world.list_stages()
        assert await world.looks() == [3]
        await world.list_stages(1)
        os.close(write)
        await asyncio.sleep(0)
        while (wish := world.standbys.wish(shape)) is not None and not wish.is_own:
            await asyncio.sleep(0.001)  # the loop reads the end of his lifeline
        assert await world.looks() == [1]

    run(body)
