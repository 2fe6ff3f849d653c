"""What runs on a GPU, on the CPU under Triton's interpreter: a worker a stage, tensors by a lane, KV moves.

Needs the package triton, which CPU builds of torch do not bring: `TRITON_INTERPRET=1 pytest -m extra`.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from support.processes import WAIT_S
from support.solo_runs import Solo, solos
from support.tiny_llama import tiny_model, write_folder

from keystage.bundle.split import split
from keystage.bundle.store import load
from keystage.router import fleet
from keystage.router.admission import AdmissionBounds
from keystage.router.engine import Generation
from keystage.router.node import RouterNode
from keystage.wire.endpoints import listen
from keystage.wire.events import EventLog
from keystage.wire.opening import open_router

pytestmark = [
    pytest.mark.extra,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
        reason="no triton, or TRITON_INTERPRET is not 1",
    ),
]
STAGES, PROMPT, TOKENS = 3, 40, 24
SUPPORT = Path(__file__).resolve().parent.parent


def started(folder: str, bundle: Path, replica: str, stage: int, handoff: str) -> subprocess.Popen[bytes]:
    listening = listen("127.0.0.1:0")
    process = subprocess.Popen(
        [sys.executable, "-m", "support.lane_worker"],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")]),
            "KEYSTAGE_PIPELINE": "em",
            "KEYSTAGE_BUNDLE": f"file://{bundle}",
            "KEYSTAGE_ROUTER": f"ipc://{folder}/router",
            "KEYSTAGE_RUN": folder,
            "KEYSTAGE_REPLICA": replica,
            "KEYSTAGE_STAGES": str(stage),
            "KEYSTAGE_HTTP": f"fd://{listening.fileno()}",
            "KEYSTAGE_HANDOFF": handoff,
            "KEYSTAGE_KV_BYTES": str(1 << 22),
            "KEYSTAGE_SLOTS": "4",
            "OMP_NUM_THREADS": "1",
        },
        pass_fds=(listening.fileno(),),
    )
    listening.close()
    return process


async def ask(node: RouterNode, solo: Solo, got: list[int]) -> None:
    async for tokens in node.generate(Generation(solo.prompt, TOKENS, 0.0, 1.0, 0, ())):
        got += tokens


async def asked(bundle: Path, router: str, found: list[Solo], leaving: subprocess.Popen[bytes] | None) -> int:
    node = RouterNode(load(bundle), open_router(router), AdmissionBounds(), EventLog(None, "r"), 1 << 20)
    node.start()
    try:
        answers: list[list[int]] = [[] for _ in found]
        async with asyncio.timeout(500), asyncio.TaskGroup() as clients:
            workers = STAGES + (leaving is not None)
            while len([r for r in node.stats().replicas if r.state == "ready"]) < workers:
                await asyncio.sleep(0.05)
            for solo, got in zip(found, answers, strict=True):
                clients.create_task(ask(node, solo, got))
            if leaving is not None:
                while min(map(len, answers)) < 2:
                    await asyncio.sleep(0.01)
                assert max(map(len, answers)) < TOKENS // 2
                leaving.terminate()
                assert await asyncio.to_thread(leaving.wait, 10 * WAIT_S) == 0
        assert answers == [solo.tokens for solo in found]
        assert leaving is None or node.stats().moves >= 1
        return node.stats().replayed_tokens
    finally:
        await node.stop()


@pytest.mark.parametrize("handoff", ["auto", "pinned"])
@pytest.mark.parametrize("moves", [False, True])
def test_answers_are_those_of_the_eager_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handoff: str, moves: bool
) -> None:
    monkeypatch.setattr(fleet, "DEAD_AFTER_S", 120.0)  # an interpreted wave takes seconds
    rng = random.Random(3)
    model = tiny_model(num_hidden_layers=STAGES, max_position_embeddings=256)
    bundle = split(write_folder(model, tmp_path / "m"), STAGES, "uniform", tmp_path / "bundle", "em")
    prompts = ([rng.randrange(97) for _ in range(PROMPT)] for _ in itertools.count())
    found = solos(bundle, prompts, 2, TOKENS)
    with tempfile.TemporaryDirectory(prefix="ks", dir="/tmp") as folder:
        workers = [started(folder, bundle, f"w{k}", k, handoff) for k in range(STAGES)]
        leaving = None
        if moves:
            leaving = workers[1]
            workers.append(started(folder, bundle, "w1b", 1, handoff))
        try:
            replayed = asyncio.run(asked(bundle, f"ipc://{folder}/router", found, leaving))
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
    # With what had been generated every session had more than its prompt; few tokens were computed again.
    assert replayed <= (PROMPT // 2) * len(found) if moves else replayed == 0
