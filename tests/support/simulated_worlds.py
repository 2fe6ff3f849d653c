"""Small simulated worlds, and steerings that follow a script."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from keystage.controller.domain.decision import Action
from keystage.controller.domain.snapshot import Snapshot
from keystage.simulator.api import ArrivalSpec, LoadSpec, NodeSpec, PipelineSpec, StageSpec, World

GB = 1_000_000_000


def line(
    *stages: StageSpec,
    rate_rps: float = 0.0,
    cv: float = 1.0,
    count: int = 0,
    times_s: tuple[float, ...] | None = None,
    name: str = "p",
    **fields: Any,
) -> PipelineSpec:
    """A pipeline with its traffic."""
    arrivals = ArrivalSpec(rate_rps=rate_rps, cv=cv, count=count, times_s=times_s)
    return PipelineSpec(name=name, stages=stages, arrivals=arrivals, **fields)


def world(*pipelines: PipelineSpec, **fields: Any) -> World:
    """A world of pipelines."""
    return World(pipelines=pipelines, **fields)


def gpu_stage(alpha_s: float = 0.1, **fields: Any) -> StageSpec:
    """A stage of 5 GB that holds one GPU."""
    return StageSpec(alpha_s=alpha_s, gpus=1, parameter_bytes=5 * GB, **fields)


def server(count: int = 1, gpus: int = 4, **fields: Any) -> NodeSpec:
    """GPU servers."""
    return NodeSpec(count=count, gpus=gpus, gpu_bytes=40 * GB, cores=16, **fields)


BY_SOURCE = LoadSpec(
    fixed_s=0.5, gpu_bps=50 * GB, memory_bps=10 * GB, disk_bps=1 * GB, remote_bps=0.1 * GB, key_stages=1
)
"""5 GB take 0.6 s from a GPU, 1.0 s from memory, 5.5 s from disk, 50.5 s from remote."""


class Script:
    """A steering that does given actions at the first tick at or after their time.

    Args:
        actions: (time in seconds, action), ascending.
        watch: called with every snapshot.
    """

    def __init__(
        self, actions: Sequence[tuple[float, Action]], watch: Callable[[Snapshot], None] | None = None
    ) -> None:
        self._actions = list(actions)
        self._watch = watch

    def steer(self, snapshot: Snapshot) -> Sequence[Action]:
        if self._watch is not None:
            self._watch(snapshot)
        due = [action for at_s, action in self._actions if at_s <= snapshot.at_s]
        self._actions = self._actions[len(due) :]
        return due
