"""Worlds that cannot be are refused with the thing, the bound and the value; worlds come from files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.simulated_worlds import GB, gpu_stage, line, server, world

from keystage.controller.domain.snapshot import Slo
from keystage.simulator.api import FailureSpec, LoadSpec, NodeSpec, StageSpec, World
from keystage.simulator.check import check_world
from keystage.simulator.errors import WorldError
from keystage.simulator.files import read_world
from keystage.simulator.platform import SimulatedPlatform

STAGE = StageSpec(alpha_s=0.1)


def _stages(*stages: StageSpec, **fields: Any) -> World:
    return world(line(*stages), **fields)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            world(line(STAGE, rate_rps=-1)),
            "pipeline p: arrivals.rate_rps must be 0 or more and finite, not -1",
        ),
        (world(line(STAGE, rate_rps=math.nan)), "rate_rps must be 0 or more and finite, not nan"),
        (world(line(STAGE, times_s=(1.0, 0.5))), "times_s must ascend from 0, 0.5 follows 1.0"),
        (world(line(STAGE, times_s=(math.nan,))), "must ascend from 0, nan follows"),
        (world(line(STAGE, cv=math.inf)), "arrivals.cv must be 0 or more and finite, not inf"),
        (_stages(StageSpec(alpha_s=-0.1)), "stage 0: alpha_s must be 0 or more and finite, not -0.1"),
        (_stages(StageSpec(alpha_s=1, most=0)), "stage 0: most must be positive and finite, not 0"),
        (_stages(StageSpec(alpha_s=1, min_replicas=3, max_replicas=2)), "min_replicas 3 .. max_replicas 2"),
        (_stages(), "needs a name and at least one stage, has 0"),
        (_stages(STAGE, StageSpec(alpha_s=1, after=(2,))), "stage 1: after names 2, stages are 0..1"),
        (
            _stages(StageSpec(alpha_s=1, after=(1,)), StageSpec(alpha_s=1, after=(0,))),
            r"stages \[0, 1\] wait for each other",
        ),
        (world(line(STAGE), line(STAGE)), "different names"),
        (_stages(STAGE, tick_s=0), "tick_s must be positive and finite, not 0"),
        (_stages(STAGE, load=LoadSpec(disk_bps=-1)), "load.disk_bps must be 0 or more"),
        (_stages(gpu_stage(), nodes=(server(gpus=0),)), "no node has 1 GPUs of at least 5000000000 bytes"),
        (
            _stages(StageSpec(alpha_s=1, gpus=1, parameter_bytes=50 * GB), nodes=(server(),)),
            "of at least 50000000000 bytes and 1.0 cores; the largest has 4 GPUs of 40000000000 bytes",
        ),
        (_stages(StageSpec(alpha_s=1, cores=20), nodes=(server(),)), "20 cores; the largest has .* 16 cores"),
        (
            _stages(STAGE, nodes=(NodeSpec(disk=False),), load=LoadSpec(disk_bps=1)),
            r"nodes\[0\]: parameters have no source",
        ),
        (_stages(STAGE, failures=(FailureSpec(at_s=1, function="q"),)), "there is no function q"),
        (_stages(STAGE, failures=(FailureSpec(at_s=1, node="node-0"),)), "there is no node node-0"),
        (_stages(STAGE, failures=(FailureSpec(at_s=1),)), "needs either a function or a node"),
        (
            world(line(STAGE, StageSpec(alpha_s=1, after=(0,)), execution="looping")),
            "stages of a looping pipeline are a chain",
        ),
        (
            world(line(STAGE, execution="looping", steps=0.5)),
            "slots and steps must be at least 1, not 8, 0.5",
        ),
        (
            world(line(STAGE, rate_rps=1e7), duration_s=60),
            r"pipeline p: arrivals expected must be at most 5e\+07, not 6e\+08",
        ),
        (world(line(STAGE, rate_rps=1e308)), "arrivals expected must be at most"),
        (world(line(STAGE, rate_rps=1, count=10**12)), "arrivals expected must be at most"),
        (world(line(STAGE, rate_rps=1e-9, count=10**6)), r"arrivals end \(s\) must be at most 1e\+09"),
        (world(line(STAGE, rate_rps=1, cv=1e200)), "arrivals.cv must be at most 100, not 1e"),
        (_stages(StageSpec(alpha_s=1e308)), r"stage 0: alpha_s must be at most 1e\+06, not 1e\+308"),
        (_stages(StageSpec(alpha_s=1, cores=1e-300)), "stage 0: cores must be at least 0.01"),
        (_stages(StageSpec(alpha_s=1, replicas=10**7)), "stage 0: replicas must be at most 100000"),
        (_stages(STAGE, nodes=(NodeSpec(count=10**9),)), r"nodes\[0\].count must be at most 100000"),
        (_stages(STAGE, nodes=(NodeSpec(count=60_000),) * 2), "nodes in all must be at most 100000"),
        (_stages(STAGE, tick_s=1e-9), r"duration_s / tick_s must be at most 1e\+08, not 6e\+10"),
        (world(line(STAGE, execution="looping", steps=1e12)), r"steps must be at most 1e\+06, not 1e\+12"),
        (_stages(STAGE, budget_replicas=-1), "budget_replicas must be 0 or more and finite, not -1"),
        (_stages(STAGE, load=LoadSpec(disk_bps=1e-300)), "load.disk_bps must be 0 .none. or at least 1"),
        (
            world(line(STAGE, slo=Slo(deadline_s=0.0))),
            "pipeline p: slo.deadline_s must be positive and finite, not 0.0",
        ),
        (_stages(STAGE, duration_s=60, warm_s=61), r"warm_s must be at most 60.* not 61"),
        (
            _stages(STAGE, nodes=(server(),), load=LoadSpec(holders="ran", prewarm=True)),
            r"nodes\[0\]: load.prewarm needs a source to fetch from",
        ),
    ],
)
def test_a_world_that_cannot_be_is_refused(wrong: World, message: str) -> None:
    with pytest.raises(WorldError, match=message):
        check_world(wrong)


def test_worlds_are_read_from_files(tmp_path: Path) -> None:
    good = world(line(gpu_stage(), STAGE, rate_rps=3), nodes=(server(2),), load=LoadSpec(disk_bps=GB))
    path = tmp_path / "world.json"
    path.write_bytes(msgspec.json.encode(good))
    assert read_world(path) == good
    path.write_text('{"pipelines": [{"name": 3}]}')
    with pytest.raises(WorldError, match=r"is no world: .*name"):
        read_world(path)
    path.write_bytes(msgspec.json.encode(world(line(STAGE), tick_s=-1)))
    with pytest.raises(WorldError, match="tick_s"):
        read_world(path)
    with pytest.raises(WorldError, match="cannot be read: No such file"):
        read_world(tmp_path / "none.json")


def test_a_negative_seed_is_refused() -> None:
    with pytest.raises(WorldError, match="seed must be 0 or more, not -1"):
        SimulatedPlatform(_stages(STAGE), -1)
