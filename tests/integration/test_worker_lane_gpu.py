"""Workers that share a GPU hand over through its memory: eight of them, a stage each, same answers."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import random
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from support.lane_consumer import consume
from support.processes import EmulatedFunction
from support.solo_runs import Solo, solos
from support.tiny_llama import tiny_model, write_folder

from keystage.bundle.split import split
from keystage.bundle.store import load
from keystage.router.admission import AdmissionBounds
from keystage.router.engine import Generation
from keystage.router.node import RouterNode
from keystage.wire.events import EventLog
from keystage.wire.opening import open_router

STAGES, PROMPT, TOKENS = 8, 512, 96

on_a_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("default"),
]


async def ask(node: RouterNode, prompt: list[int], tokens: int) -> list[int]:
    found: list[int] = []
    async for got in node.generate(Generation(prompt, tokens, 0.0, 1.0, 0, ())):
        found += got
    return found


async def asked(bundle: Path, router: str, found: list[Solo]) -> None:
    """32 short requests at once, then long ones, one after another and together."""
    node = RouterNode(load(bundle), open_router(router), AdmissionBounds(), EventLog(None, "r"), 1 << 20)
    node.start()
    try:
        async with asyncio.timeout(150):
            while len([r for r in node.stats().replicas if r.state == "ready"]) < STAGES:
                await asyncio.sleep(0.01)
            short = [[(7 * i + j) % 97 for j in range(16)] for i in range(32)]
            warm = await asyncio.gather(*(ask(node, prompt, 8) for prompt in short))
            assert [len(tokens) for tokens in warm] == [8] * 32
            for solo in found:
                assert await ask(node, solo.prompt, TOKENS) == solo.tokens
            together = await asyncio.gather(*(ask(node, solo.prompt, TOKENS) for solo in found))
            assert together == [solo.tokens for solo in found]
        assert node.stats().replayed_tokens == 0
    finally:
        await node.stop()


@pytest.mark.parametrize(
    ("device", "handoff"),
    [
        pytest.param("cpu", "auto", marks=pytest.mark.slow),
        *(pytest.param("cuda:0", kind, marks=on_a_gpu) for kind in ("auto", "pinned", "pageable")),
    ],
)
def test_a_long_prompt_passes_eight_workers(tmp_path: Path, device: str, handoff: str) -> None:
    rng = random.Random(11)
    model = tiny_model(num_hidden_layers=STAGES, max_position_embeddings=1024)
    bundle = split(write_folder(model, tmp_path / "model"), STAGES, "uniform", tmp_path / "bundle", "em")
    prompts = ([rng.randrange(97) for _ in range(PROMPT)] for _ in itertools.count())
    found = solos(bundle, prompts, 2, TOKENS)
    with tempfile.TemporaryDirectory(prefix="ks", dir="/tmp") as folder:
        function = EmulatedFunction(Path(folder), "looping", STAGES)

        def start(stage: int) -> None:
            function.start(
                "worker",
                f"w{stage}",
                KEYSTAGE_BUNDLE=f"file://{bundle}",
                KEYSTAGE_DEVICE=device,
                KEYSTAGE_STAGES=str(stage),
                KEYSTAGE_HANDOFF=handoff,
                KEYSTAGE_WAVE_TOKENS="512",
                KEYSTAGE_SLOTS="32",
                OMP_NUM_THREADS="1",
            )

        try:
            with ThreadPoolExecutor(STAGES) as starters:  # one alone takes seconds on a GPU
                list(starters.map(start, range(STAGES)))
            asyncio.run(asked(bundle, f"ipc://{folder}/run/router", found))
        finally:
            function.stop()


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_an_arena_is_read_by_another_process_where_it_lies() -> None:
    from keystage.worker.cuda_lane import CudaLaneDriver

    torch.cuda.set_device(0)
    mine = torch.full((1 << 20,), 3, dtype=torch.uint8, device="cuda:0")
    driver = CudaLaneDriver(mine.device)
    arena = driver.arena(4 << 20)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    other = context.Process(target=consume, args=(there,), daemon=True)
    other.start()
    try:
        here.send(arena.handle)
        for number, offset in enumerate((0, 1 << 20, 3 << 20)):
            driver.copy(arena.address + offset, mine.data_ptr(), mine.numel())
            driver.settle()
            here.send(offset)
            assert here.poll(60)
            assert here.recv() == (3 + number) << 20
            mine += 1
        here.send(None)
        other.join(30)
        assert other.exitcode == 0
    finally:
        other.kill()


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_ring_is_pinned_where_it_lies() -> None:
    from keystage.wire.ring import Ring
    from keystage.worker.cuda_lane import open_lane
    from keystage.worker.executor import DeviceActivation

    data = torch.arange(1 << 20, device="cuda:0").to(torch.uint8)
    lane = open_lane(data.device, 1 << 22, "pinned")
    assert lane is not None
    ring = Ring(1 << 22)
    lane.ring_mapped(ring.whole)
    ref = ring.reserve(data.numel(), "uint8", (data.numel(),))
    assert ref is not None
    activation = DeviceActivation("uint8", (data.numel(),), data.numel(), data.data_ptr(), data)
    lane.fill(activation, ring.window(ref.slot, ref.offset, ref.nbytes))
    assert bytes(ring.window(ref.slot, ref.offset, ref.nbytes)) == bytes(data.cpu().numpy())
    assert torch.frombuffer(ring.whole, dtype=torch.uint8).is_pinned()
    lane.ring_dropped(ring.whole)
