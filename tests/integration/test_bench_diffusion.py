"""Bench diffusion's two ways to serve, live: real nets, router and workers; batches, refusals, a profile."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest

from keystage.bench import diffusion
from keystage.bench.diffusion_live import Arrivals, System, replay, serving
from keystage.bench.diffusion_rival import Rule
from keystage.bench.diffusion_whole import RequestLevel, measured
from keystage.streams.programs.diffusion import request

TINY = "keystage.streams.programs.diffusion:program"
OPTIONS = {"image": "npy"}
WHOLE = System(
    "request", "diffusion_programs:whole", {"inner": TINY, "inner_options": OPTIONS}, "eager", "demote", 1
)


@pytest.mark.slow
def test_whole_requests_are_measured_batched_answered_and_refused(tmp_path: Path) -> None:
    few, many = request("few", 2), request("many", 10)

    async def work() -> None:
        async with serving(WHOLE, tmp_path / "home", devices=1, device="cpu") as up:
            profile, margin_ratio = await measured(up, (few, many), (2, 10), 1, (1, 4), 2)
            assert profile.step.batches == (1, 4)
            assert profile.seconds([10]) > profile.seconds([2]) > 0
            assert 0 <= margin_ratio <= 0.05
            front = RequestLevel(up, profile, Rule("padded"), 1, 4)
            # The first has the device to itself; those that come meanwhile share it, four at a time.
            bodies = [request(f"picture {n}", 10 - n % 2, n) for n in range(7)]
            arrivals = Arrivals([0.0] * 7, [*bodies], [60.0] * 7, [10 - n % 2 for n in range(7)])
            done = await replay(front, arrivals)
            assert (done.offered, done.good, done.failed) == (7, 7, 0)
            assert await front.batches() == (7, 3)
            # Nobody makes ten steps in no time: refused at once, and no batch is run for it.
            status, seconds = await front.ask(many, 1e-6)
            assert status == 504
            assert seconds < 30
            assert await front.batches() == (7, 3)
            # What the program refuses is no success.
            assert (await front.ask(b'{"prompt": "x", "steps": 0}', 60.0))[0] == 400

    asyncio.run(work())


@pytest.mark.slow
def test_a_small_run_of_all_systems(tmp_path: Path) -> None:
    chosen = dataclasses.replace(
        diffusion.setting(quick=True, full=False, device="cpu"),
        steps=(6, 7, 8), loads=(2.0,), seconds=3.0, sizes=(1, 4), ways=(("eager", "refuse"),),
    )  # fmt: skip
    cells = [diffusion.Cell(1.0, 500.0, 2.0, 0)]
    alone, outcomes, rival = asyncio.run(diffusion.measure(chosen, cells, tmp_path))
    found = diffusion.result(chosen, cells, alone, outcomes, rival)
    (row,) = found.rows
    assert not found.disturbance
    assert row["offered"] == 2 * 2 * 3.0 // (alone[0] * 7 + alone[1])
    # Nobody is refused who has so much time.
    assert row["module good"] == row["equal good"] == row["padded good"] == row["offered"]
    assert row["module lost"] == row["equal lost"] == row["padded lost"] == "0 / 0 / 0"
    assert min(row["module batch"], row["equal batch"], row["padded batch"]) >= 1
