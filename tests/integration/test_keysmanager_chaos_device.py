"""Random operations on replicas with real stages on a device, standby workers among them.

On a GPU, NVML's word for what is allocated is an oracle of its own: three times in three hundred
operations everything is ended, and the device must have back every byte. The same operations run on the
CPU, where they find all that is no matter of CUDA. The seed is KEYSTAGE_TEST_SEED (1 by default).
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from support.keysmanager_chaos import (
    SEED,
    at_rest,
    evict_all,
    first_look,
    nothing_is_left,
    operate,
    shuffled,
    strangers,
)
from support.keysmanager_chaos_device import (
    CPU_SHAPE,
    GPU_SHAPE,
    TOLERANCE_BYTES,
    DeviceChaos,
    DeviceOracle,
    GpuMemory,
    gpu_memory,
)
from support.keysmanager_daemon import Node, children, node_of, reap_strangers

COUNTS = {
    "fork": 49, "fork_host": 8, "fork_bare": 4, "fork_twice": 12, "get": 18, "drop": 14, "end": 40,
    "kill_replica": 24, "kill_holder": 10, "kill_holder_in_fork": 8, "kill_replica_in_start": 6,
    "kill_in_copy": 12, "evict": 14, "damage": 6, "mend": 5, "replace": 6, "revoke": 2, "asker_gone": 8,
    "kill_fork_server": 2, "kill_daemon": 2, "standbys_ask": 8, "standby_use": 24, "standbys_dismiss": 4,
    "kill_standby": 6, "kill_standby_in_fill": 8,
}  # fmt: skip
"""How often each operation comes, in random order."""
FEW = {
    "fork": 4, "fork_host": 1, "fork_twice": 2, "get": 1, "end": 4, "kill_replica": 2, "kill_holder": 1,
    "kill_holder_in_fork": 1, "kill_replica_in_start": 1, "kill_in_copy": 1, "evict": 1, "damage": 1,
    "replace": 1, "asker_gone": 1, "kill_fork_server": 1, "kill_daemon": 1, "standby_use": 3,
    "standbys_dismiss": 1, "kill_standby": 1, "kill_standby_in_fill": 2,
}  # fmt: skip
"""For the CPU, in every run of the tests."""
PARTS = 3
"""Times that everything is ended."""
FREED_S = 20.0

Rest = Callable[[DeviceChaos], Awaitable[None]]


async def run_chaos(
    node: Node, oracle: DeviceOracle, device: str, names: list[str], rng: random.Random, rest: Rest
) -> DeviceChaos:
    """All operations, in parts; after each nothing is left."""
    known = set(children(os.getpid())) - {node.process.pid if node.process is not None else 0}
    fds = await first_look(node)
    run = DeviceChaos(node, oracle, rng, device, node.folder / "run")
    size = -(-len(names) // PARTS)
    try:
        for part in range(PARTS):
            began_s = time.monotonic()
            await operate(run, names[part * size : (part + 1) * size], part * size)
            await run.standbys_dismiss()
            await nothing_is_left(run, known, fds)
            reap_strangers()
            await rest(run)
            print(
                f"seed {SEED}, part {part + 1} in {time.monotonic() - began_s:.0f} s: started {run.vias}, "
                f"killed with a copy queued {run.copying}, refusals {run.refused}",
                flush=True,
            )
    finally:
        run.close()
    return run


def settings(oracle: DeviceOracle) -> dict[str, str]:
    """Six stages fit in 85 % of the memory: the others press. Standbys come when they are asked for only."""
    return {
        "KEYSTAGE_KEYSMANAGER_MEMORY": str(8 * oracle.stage_bytes),
        "KEYSTAGE_STANDBYS_PER_KEY_STAGE": "0",
    }


@pytest.mark.slow
def test_the_same_on_the_cpu(tmp_path: Path) -> None:
    oracle = DeviceOracle(tmp_path / "b", CPU_SHAPE)
    rng = random.Random(SEED)
    counts = COUNTS if os.environ.get("KEYSTAGE_TEST_CHAOS") == "all" else FEW

    async def rest(_: DeviceChaos) -> None:
        return

    with node_of(tmp_path, **settings(oracle)) as node:
        run = asyncio.run(run_chaos(node, oracle, "cpu", shuffled(counts, rng), rng, rest))
        assert node.stop() == 0
    assert min(run.vias.get(via, 0) for via in ("holder", "standby")) >= 1


@pytest.mark.gpu
@pytest.mark.timeout(600)  # three hundred starts, each with a context of its own
@pytest.mark.filterwarnings("default")
def test_on_a_gpu_nothing_is_lost_but_what_is_ended(tmp_path: Path) -> None:
    oracle = DeviceOracle(tmp_path / "b", GPU_SHAPE)
    rng = random.Random(SEED)
    names = shuffled(COUNTS, rng)
    assert len(names) == 300
    known = set(children(os.getpid()))

    with node_of(tmp_path, **settings(oracle)) as node, gpu_memory() as memory:
        asyncio.run(use_once(node, oracle, memory))
        before = memory.used_bytes(), memory.processes()
        print(f"before: {before[0]} bytes used, {before[1]} processes with a context", flush=True)

        async def rest(run: DeviceChaos) -> None:
            def is_free() -> bool:
                return memory.used_bytes() <= before[0] + TOLERANCE_BYTES

            now: Any = memory.used_bytes
            await run.node.wait(is_free, f"{now()} bytes of GPU memory, {before[0]} at first", FREED_S)
            assert memory.processes() <= before[1]
            print(f"after: {now()} bytes used, {memory.processes()} processes with a context", flush=True)

        run = asyncio.run(run_chaos(node, oracle, "cuda:0", names, rng, rest))
        assert node.stop() == 0
        reap_strangers()
        assert strangers(known) == []
    assert run.vias["holder"] >= 20
    assert run.vias["standby"] >= 8
    assert run.copying >= 1


async def use_once(node: Node, oracle: DeviceOracle, memory: GpuMemory) -> None:
    """The first context of a machine leaves something in the driver; and NVML must see a replica."""
    empty = memory.used_bytes()
    run = DeviceChaos(node, oracle, random.Random(0), "cuda:0", node.folder / "first")
    await run.fork()
    (replica,) = node.replicas
    assert replica.forked.via == "holder"
    assert memory.used_bytes() > empty + oracle.stage_bytes
    node.replicas.clear()
    replica.end()
    run.close()
    await node.wait(lambda: at_rest(node), "the claim is released")
    await evict_all(node)
    await asyncio.sleep(1)
