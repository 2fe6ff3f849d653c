"""Seconds of one layer, of the embedding and of the head, for `keystage split --method time`.

Runs before any parameter is read: parameters are random, only their shapes matter. One part is in
memory at a time; the layer's time is subtracted from those of the stages that hold an end. Caches
are overwritten between runs: in a real stage other layers have just passed through them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from keystage.models.base import Family, Row, StageRole, torch_dtype
from keystage.models.loading import sample_input

_ROWS = 8
_REPEATS = 7
_CACHE_BYTES = 32 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class PartTimes:
    """Seconds per decode step of a few rows."""

    layer_s: float
    embedding_s: float
    head_s: float


def measure_parts(family: Family, config: Mapping[str, Any], dtype: str) -> PartTimes:
    """Measures on one CPU thread.

    Args:
        family: family of the model.
        config: its config.json.
        dtype: type of parameters and activations.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        layer = _step_s(family, config, StageRole(0, 1, False, False), dtype)
        first = _step_s(family, config, StageRole(0, 1, True, False), dtype)
        last = _step_s(family, config, StageRole(0, 1, False, True), dtype)
    finally:
        torch.set_num_threads(before)
    return PartTimes(layer, max(0.0, first - layer), max(0.0, last - layer))


def _step_s(family: Family, config: Mapping[str, Any], role: StageRole, dtype: str) -> float:
    kind = torch_dtype(dtype)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        tensor.name: torch.randn(tensor.shape, generator=generator).mul_(0.02).to(kind)
        for tensor in family.stage_tensors(config, role)
    }
    model = family.build(config, role, tensors, torch.device("cpu"), kind)
    del tensors
    slots = range(_ROWS)
    for slot in slots:
        model.open(slot, 1)
    x = sample_input(model, _ROWS)
    cache = torch.empty(_CACHE_BYTES, dtype=torch.uint8)
    times: list[float] = []
    for run in range(_REPEATS):
        cache.fill_(run)
        begin = time.perf_counter()
        model.forward(x, [Row(slot, 0, 1) for slot in slots], slots)
        times.append(time.perf_counter() - begin)
    return sorted(times)[_REPEATS // 2]
