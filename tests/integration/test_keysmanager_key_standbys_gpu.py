"""On a GPU, key stages have standbys that nobody asked for, and give their memory back."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from support.keysmanager_chaos import at_rest, evict_all
from support.keysmanager_chaos_device import (
    GPU_SHAPE,
    IDLE_S,
    STAGES,
    TOLERANCE_BYTES,
    DeviceChaos,
    DeviceOracle,
    gpu_memory,
)
from support.keysmanager_daemon import Node, name_of, node_of

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]


async def are_idle(node: Node, count: int) -> bool:
    standbys = (await node.client.status()).standbys
    return [entry.state for entry in standbys] == ["idle"] * count


def test_key_stages_have_standbys_of_their_class_and_lose_them_with_their_place(tmp_path: Path) -> None:
    oracle = DeviceOracle(tmp_path / "b", GPU_SHAPE)

    async def body(node: Node) -> None:
        run = DeviceChaos(node, oracle, random.Random(1), "cuda:0", tmp_path / "run")
        names = [name_of(oracle.folder, stage) for stage in STAGES]
        await run.fork()
        node.replicas.pop().end()
        await asyncio.sleep(1)  # of that first context something stays in the driver
        before = memory.used_bytes()
        await node.client.key_stages(names[:2])
        await node.wait(lambda: are_idle(node, 2), "two standbys, one for each", IDLE_S)
        replica = await run.start(STAGES[1])
        assert replica is not None
        assert replica.forked.via == "standby"
        await run.check(STAGES[1], replica)
        await node.wait(lambda: are_idle(node, 2), "another in its place", IDLE_S)
        await node.client.key_stages(names[:1])
        await node.wait(lambda: are_idle(node, 1), "one left", IDLE_S)
        await node.client.key_stages([])
        await node.wait(lambda: are_idle(node, 0), "none left", IDLE_S)
        assert replica.alive
        node.replicas.remove(replica)
        replica.end()
        await node.wait(lambda: at_rest(node), "nothing is mapped")
        await evict_all(node)
        await node.wait(lambda: memory.used_bytes() <= before + TOLERANCE_BYTES, "its memory is free")
        run.close()

    with node_of(tmp_path) as node, gpu_memory() as memory:
        asyncio.run(body(node))
