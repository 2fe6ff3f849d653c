"""Sessions leave a worker that drains with their KV state: real processes, answers as without a move."""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.processes import WAIT_S, EmulatedFunction
from support.solo_runs import Solo, solos
from support.tiny_llama import tiny_model, write_folder

from keystage.bundle.split import split
from keystage.bundle.store import load
from keystage.router.admission import AdmissionBounds
from keystage.router.engine import Generation
from keystage.router.node import RouterNode
from keystage.wire.events import EventLog
from keystage.wire.opening import open_router

TOKENS = 700
SESSIONS = 8


async def client(node: RouterNode, solo: Solo, got: list[int]) -> None:
    async for tokens in node.generate(Generation(solo.prompt, TOKENS, 0.0, 1.0, 0, ())):
        got += tokens


async def run(
    bundle: Path, router: str, found: list[Solo], leaving: list[subprocess.Popen[bytes]]
) -> tuple[int, int]:
    """(moves, tokens that were computed again for them)."""
    node = RouterNode(load(bundle), open_router(router), AdmissionBounds(), EventLog(None, "r"), 1 << 20)
    node.start()
    try:
        async with asyncio.timeout(120), asyncio.TaskGroup() as clients:
            while len([r for r in node.stats().replicas if r.state == "ready"]) < 4:
                await asyncio.sleep(0.01)
            answers: list[list[int]] = [[] for _ in range(SESSIONS)]
            for got, solo in zip(answers, itertools.cycle(found), strict=False):
                clients.create_task(client(node, solo, got))
            for process in leaving:
                held = min(len(got) for got in answers) + 50
                while min(len(got) for got in answers) < held:
                    await asyncio.sleep(0.001)
                moves = node.stats().moves
                process.send_signal(signal.SIGTERM)
                while node.stats().moves < moves + SESSIONS // 2:
                    assert min(len(got) for got in answers) < TOKENS, "nobody was there to be moved"
                    await asyncio.sleep(0.001)
            # Not before: a process that lets go of a GPU takes as long as all sessions together.
            for process in leaving:
                assert await asyncio.to_thread(process.wait, WAIT_S) == 0
        for got, solo in zip(answers, itertools.cycle(found), strict=False):
            assert got == solo.tokens
        stats = node.stats()
        assert stats.moves >= SESSIONS, "half of the sessions left either worker"
        assert all(worker.held_kv == 0 for worker in node.fleet.workers.values())
        return stats.moves, stats.replayed_tokens
    finally:
        await node.stop()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "copies"),
    [
        ("cpu", True),
        ("cpu", False),
        pytest.param("cuda:0", True, marks=pytest.mark.gpu),
        pytest.param("cuda:0", False, marks=pytest.mark.gpu),
    ],
)
def test_sessions_take_their_kv_state_along_from_any_stage(tmp_path: Path, device: str, copies: bool) -> None:
    rng = random.Random(3)
    model = tiny_model(num_hidden_layers=3, max_position_embeddings=1024)
    bundle = split(write_folder(model, tmp_path / "model"), 2, "uniform", tmp_path / "bundle", "em")
    prompts = ([rng.randrange(97) for _ in range(rng.randint(5, 30))] for _ in itertools.count())
    found = solos(bundle, prompts, 2, TOKENS)
    with tempfile.TemporaryDirectory(prefix="ks", dir="/tmp") as folder:
        function = EmulatedFunction(Path(folder), "looping", 2)

        def start(index: int) -> subprocess.Popen[bytes]:
            return function.start(
                "worker",
                f"w{index}",
                KEYSTAGE_BUNDLE=f"file://{bundle}",
                KEYSTAGE_DEVICE=device,
                KEYSTAGE_KV_COPY=str(int(copies)),
                KEYSTAGE_STAGES="0011"[index],
            )[0]

        try:
            with ThreadPoolExecutor(4) as starters:  # one alone takes seconds on a GPU
                workers = list(starters.map(start, range(4)))
            router = f"ipc://{folder}/run/router"
            moves, replayed = asyncio.run(run(bundle, router, found, [workers[3], workers[0]]))
        finally:
            function.stop()
    # Each session had some 60 tokens when it left.
    if copies:
        assert replayed <= (6 if device == "cpu" else 30) * moves
    else:
        assert replayed >= 50 * moves
