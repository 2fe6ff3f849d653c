"""Memory beyond the budget: who goes, who stays, and how far it is ever overstepped."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import Self

import pytest
from support.keysmanager_daemon import WAIT_S, Node, memfds, name_of, node_of, write_bundle

MIB = 1 << 20
STAGE_BYTES = 16 * MIB
LIMIT_BYTES = 100 * MIB
BUDGET_BYTES = 85 * MIB
"""85 % of the limit: five stages of 16 MiB fit, six do not."""
STAGES = 10


class Sampler:
    """The most memory that segments ever took, as /proc tells, looked at all the time."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.most_bytes = 0
        self.looks = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(WAIT_S)

    def _run(self) -> None:
        while not self._ended.is_set():
            pids = self._node.processes() | {r.pid for r in list(self._node.replicas)}
            self.most_bytes = max(self.most_bytes, sum(memfds(pids).values()))
            self.looks += 1


@pytest.mark.slow
def test_the_least_recently_used_unmapped_holder_goes_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "b"
    pipeline = write_bundle(folder, "pressure", [STAGE_BYTES] * STAGES, 1)
    identities = [stage.identity for stage in pipeline.stages]

    async def held(node: Node) -> list[int]:
        entries = (await node.client.status()).holders
        return sorted(e.stage for e in entries if e.state == "ready" and e.pid)

    async def use(node: Node, stage: int) -> None:
        """One that ends at once: its holder is used, and mapped by nobody."""
        replica = await node.fork(folder, str(stage))
        assert replica.forked.via == "holder", replica.forked
        replica.end()
        node.replicas.remove(replica)
        await node.wait(lambda: is_unmapped(node, stage), f"stage {stage} is unmapped")

    async def is_unmapped(node: Node, stage: int) -> bool:
        entry = await node.holder(identities[stage])
        return entry is not None and entry.claims == 0

    async def is_mapped(node: Node, stage: int) -> bool:
        return not await is_unmapped(node, stage)

    async def body(node: Node) -> None:
        for stage in range(5):
            await use(node, stage)
        assert await held(node) == [0, 1, 2, 3, 4]
        status = await node.client.status()
        # The files, 160 MiB of them, lie in the page cache: that is not counted.
        assert sum((folder / s.file).stat().st_size for s in pipeline.stages) > LIMIT_BYTES
        assert status.memory.used_bytes == status.memory.segment_bytes == 5 * STAGE_BYTES
        assert (status.memory.budget_bytes, status.memory.origin) == (BUDGET_BYTES, "configured")

        await use(node, 0)  # now 1 is the least recently used
        await use(node, 5)
        assert await held(node) == [0, 2, 3, 4, 5]

        running = [await node.fork(folder, "2"), await node.fork(folder, "3")]  # mapped: they stay
        await use(node, 6)  # 4 is the oldest that nobody maps
        assert await held(node) == [0, 2, 3, 5, 6]
        await use(node, 7)
        assert await held(node) == [2, 3, 5, 6, 7]

        # A child is being started from 5, the least recently used: others pressing for room take 6 and 7.
        pid = (await node.ready(identities[5])).pid
        starting = asyncio.create_task(node.fork(folder, "5"))
        await node.wait(lambda: is_mapped(node, 5), "the start is under way")
        eight, got, second = await asyncio.gather(
            node.fork(folder, "8"), node.client.get(name_of(folder, 9)), node.fork(folder, "5")
        )
        starts = [await starting, second, eight]
        assert [r.forked.via for r in starts] == ["holder"] * 3
        assert [r.forked.source for r in starts] == ["memory", "memory", "disk"]
        assert (await node.ready(identities[5])).pid == pid
        os.close(got.fd)

        # All five are mapped now: nothing can go, so what is wanted beyond is started without a holder.
        assert await held(node) == [2, 3, 5, 8]
        beyond = await node.fork(folder, "0")
        assert (beyond.forked.via, "no room for 16.0 MiB" in beyond.forked.note) == ("fork-server", True)
        assert all(replica.alive for replica in [*running, *starts, beyond])
        got.claim.close()
        await node.wait(lambda: starts_from_a_holder(node), "room is there again")

    async def starts_from_a_holder(node: Node) -> bool:
        return (await node.fork(folder, "0")).forked.via == "holder"

    with node_of(tmp_path, KEYSTAGE_KEYSMANAGER_MEMORY=str(LIMIT_BYTES)) as node:
        with Sampler(node) as sampler:
            asyncio.run(asyncio.wait_for(body(node), WAIT_S))
        assert sampler.looks > 20
        assert 5 * STAGE_BYTES <= sampler.most_bytes <= 1.01 * BUDGET_BYTES
