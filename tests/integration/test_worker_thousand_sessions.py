"""A thousand sessions on KV blocks for twenty: real worker processes, two owners that share a stage.

All end, with exactly the tokens that each would get alone; some are cancelled at any moment; afterwards
every worker has all its blocks back.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import tempfile
from pathlib import Path

import pytest
from support.processes import EmulatedFunction, wait_for
from support.solo_runs import Solo, metric, solos
from support.tiny_llama import tiny_model, write_folder

from keystage.bundle.split import split
from keystage.bundle.store import load
from keystage.models.blocks import BLOCK_TOKENS
from keystage.router.admission import AdmissionBounds
from keystage.router.engine import Generation
from keystage.router.node import RouterNode
from keystage.wire.events import EventLog
from keystage.wire.opening import open_router

SESSIONS = 1000
BLOCKS = 80
"""Twenty sessions of the mean length, 52 positions, have four blocks each; the longest needs eleven."""
LONGEST = 160
PROMPTS = 40
CANCELLED_RATIO = 0.15
KV_BLOCK_BYTES = BLOCK_TOKENS * 2 * 2 * 16 * 4
"""16 positions of keys and values in one layer with two KV heads of 16 floats."""


async def client(node: RouterNode, solo: Solo, want: int, stop_after: int | None, arrival_s: float) -> None:
    """One request: all of `want` tokens, or gone after `stop_after` of them."""
    await asyncio.sleep(arrival_s)
    got: list[int] = []
    stream = node.generate(Generation(solo.prompt, want, 0.0, 1.0, 0, ()))
    async with contextlib.aclosing(stream):
        if stop_after == 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(arrival_s):
                    got += await anext(stream)
            return
        async for tokens in stream:
            got += tokens
            if stop_after is not None and len(got) >= stop_after:
                break
    if stop_after is None:
        assert got == solo.tokens[:want]
    else:
        assert got == solo.tokens[: len(got)]


async def run(bundle: Path, router: str, found: list[Solo], rng: random.Random) -> None:
    node = RouterNode(
        load(bundle), open_router(router), AdmissionBounds(queue_items=SESSIONS), EventLog(None, "r"), 1 << 20
    )
    node.start()
    try:
        async with asyncio.timeout(150), asyncio.TaskGroup() as clients:
            for _ in range(SESSIONS):
                solo = rng.choice(found)
                longest = len(solo.tokens)
                want = min(
                    longest, rng.choice((rng.randint(1, 24), rng.randint(1, 24), rng.randint(20, longest)))
                )
                stop_after = rng.randrange(want) if rng.random() < CANCELLED_RATIO else None
                clients.create_task(client(node, solo, want, stop_after, 3 * rng.random()))
        assert all(worker.held_slots == 0 for worker in node.fleet.workers.values())
    finally:
        await node.stop()


@pytest.mark.slow
def test_a_thousand_sessions_on_blocks_for_twenty(tmp_path: Path) -> None:
    rng = random.Random(5)
    model = tiny_model(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    bundle = split(write_folder(model, tmp_path / "model"), 2, "uniform", tmp_path / "bundle", "em")
    prompts = ([rng.randrange(97) for _ in range(rng.randint(1, 16))] for _ in itertools.count())
    found = solos(bundle, prompts, PROMPTS, LONGEST)
    with tempfile.TemporaryDirectory(prefix="ks", dir="/tmp") as folder:
        function = EmulatedFunction(Path(folder), "looping", 2)
        try:
            workers = [
                function.start(
                    "worker",
                    f"w{index}",
                    KEYSTAGE_BUNDLE=f"file://{bundle}",
                    KEYSTAGE_DEVICE="cpu",
                    KEYSTAGE_STAGES=stage,
                    KEYSTAGE_SLOTS="64",
                    KEYSTAGE_KV_BYTES=str(BLOCKS * KV_BLOCK_BYTES),
                )[1]
                for index, stage in enumerate("001")
            ]
            assert [metric(url, "keystage_stage_kv_blocks") for url in workers] == [BLOCKS] * 3
            asyncio.run(run(bundle, f"ipc://{folder}/run/router", found, rng))
            for url in workers:
                wait_for(lambda url=url: not metric(url, "keystage_stage_kv_blocks_used"), "all blocks back")
                wait_for(lambda url=url: not metric(url, "keystage_worker_sessions"), "no session held")
            assert sum(metric(url, "keystage_preemptions_total") for url in workers) > 10
        finally:
            function.stop()
