"""How many standbys of each shape class key stages shall have, given what the GPUs have free. Pure.

Used by `daemon_key_standbys`. A standby takes GPU memory that a replica could need: so they come one at a
time, only where enough stays free beside them, and go again, those of the least important stages
first, when little is left. Between the two bounds nothing changes, so that none come and go in turn.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from keystage.keysmanager.api import Gpu

LEAST_FREE_RATIO = 0.05
"""Of a GPU's memory: below it standbys go."""
ENOUGH_FREE_RATIO = 0.10
"""What stays free, beside a new standby, for it to come."""
CONTEXT_BYTES = 1 << 30
"""Of GPU memory, for a standby's context, libraries and decode graph."""


@dataclasses.dataclass(frozen=True, slots=True)
class Class:
    """A shape class of key stages.

    Attributes:
        shape: its name.
        wanted: how many standbys it shall have.
        gpu: index of the GPU it runs on, -1: unknown.
        need_bytes: GPU memory that one standby takes.
    """

    shape: str
    wanted: int
    gpu: int
    need_bytes: int


def decided(
    classes: Sequence[Class], now: Mapping[str, int], gpus: Sequence[Gpu], *, is_short: bool, is_settled: bool
) -> dict[str, int]:
    """How many idle standbys each class shall have next.

    Args:
        classes: of the key stages, the most important first.
        now: how many were asked for so far; classes that are no longer there get 0.
        gpus: as NVML sees them now.
        is_short: host memory is over its budget.
        is_settled: every standby asked for so far is idle, so what is free will stay free.

    Returns:
        A number for every class of `classes` and `now`, at most one of them raised, and at most one
        lowered because of memory.
    """
    found = dict.fromkeys(now, 0)
    found |= {each.shape: min(now.get(each.shape, 0), each.wanted) for each in classes}
    free = {gpu.index: gpu for gpu in gpus}
    for each in reversed(classes):
        gpu = free.get(each.gpu)
        is_tight = gpu is None or gpu.free_bytes < LEAST_FREE_RATIO * gpu.total_bytes
        if found[each.shape] and (is_short or is_tight):
            found[each.shape] -= 1
            return found
    for each in classes:
        gpu = free.get(each.gpu)
        if is_short or not is_settled or gpu is None or found[each.shape] >= each.wanted:
            continue
        if gpu.free_bytes - each.need_bytes >= ENOUGH_FREE_RATIO * gpu.total_bytes:
            found[each.shape] += 1
            return found
    return found


def gpu_of(device: str, visible: str, gpus: Sequence[Gpu]) -> int:
    """Index of the GPU that a replica calls `cuda:N`, -1: it cannot be told.

    Args:
        device: `cuda` or `cuda:N`.
        visible: CUDA_VISIBLE_DEVICES as the replica has it, empty: all.
        gpus: in NVML's order, which is taken for CUDA's.
    """
    name, _, number = device.partition(":")
    if name != "cuda" or not (number or "0").isdecimal():
        return -1
    index = int(number or "0")
    if not visible:
        return next((gpu.index for gpu in gpus if gpu.index == index), -1)
    shown = [part.strip() for part in visible.split(",")]
    if index >= len(shown) or not shown[index]:
        return -1
    wanted = shown[index]
    return next((g.index for g in gpus if wanted == str(g.index) or g.uuid.startswith(wanted)), -1)
