"""Three hundred random operations against a real daemon; a plain dict and /proc say what is right.

The seed is KEYSTAGE_TEST_SEED (1 by default). The oracle knows which bytes each stage has now, which are
damaged or revoked, and who runs; the daemon's own books are asked for nothing but who maps what.
"""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

import pytest
from support.keysmanager_chaos import (
    SEED,
    Chaos,
    Oracle,
    first_look,
    nothing_is_left,
    operate,
    shuffled,
    strangers,
)
from support.keysmanager_daemon import Node, children, node_of, reap_strangers, write_bundle

from keystage.bundle.api import Pipeline

pytestmark = pytest.mark.slow

STAGES = 8
STAGE_BYTES = 1 << 20
LIMIT_BYTES = 8 * STAGE_BYTES
"""Six stages fit in 85 % of it: the others press."""
COUNTS = {
    "fork": 59, "fork_bare": 8, "fork_twice": 20, "get": 26, "drop": 20, "end": 42, "kill_replica": 24,
    "kill_holder": 16, "kill_holder_in_fork": 12, "kill_replica_in_start": 8, "evict": 22, "damage": 10,
    "mend": 8, "replace": 9, "revoke": 3, "asker_gone": 9, "kill_fork_server": 2, "kill_daemon": 2,
}  # fmt: skip
"""How often each operation comes, in random order."""


def write(folder: Path, version: int) -> Pipeline:
    return write_bundle(folder, "chaos", [STAGE_BYTES] * STAGES, version)


def test_whatever_happens_answers_are_right_and_nothing_is_left(tmp_path: Path) -> None:
    oracle = Oracle(tmp_path / "b", range(STAGES), write)
    known = set(children(os.getpid()))

    async def chaos(node: Node) -> None:
        fds = await first_look(node)
        rng = random.Random(SEED)
        run = Chaos(node, oracle, rng)
        names = shuffled(COUNTS, rng)
        assert len(names) == 300
        await operate(run, names)
        print(f"seed {SEED}: started {run.vias}, refusals {run.refused}")
        await nothing_is_left(run, known, fds)

    with node_of(tmp_path, KEYSTAGE_KEYSMANAGER_MEMORY=str(LIMIT_BYTES)) as node:
        asyncio.run(chaos(node))
        assert node.stop() == 0
        reap_strangers()
        assert strangers(known) == []
