"""Seconds of the layers, of the embedding and of the head, for `keystage split --method time`.

Runs before any parameter is read: parameters are random, only their shapes matter. One part is in
memory at a time, and of layers that have the same parameters one is measured. The time of an end is that of
a stage with it, less that of its layer. Caches are overwritten between runs: in a real stage other layers
have just passed through them.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from keystage.models.base import Family, LoadedStage, Row, StageRole, torch_dtype
from keystage.models.loading import sample_input
from keystage.models.single_pass import SinglePassStage, looping_stage

_ROWS = 8
_REPEATS = 7
_PROMPT_TOKENS = 4
_OPENINGS = 3
_ANSWER_TOKENS = 48
"""Tokens of a transcript beside which its opening is weighed: about what half a minute of speech has."""
_CACHE_BYTES = 32 * 1024 * 1024

Kind: TypeAlias = tuple[tuple[str, tuple[int, ...]], ...]
"""Names, without the numbers in them, and shapes of a layer's parameters."""


@dataclass(frozen=True, slots=True)
class PartTimes:
    """Seconds per decode step of a few rows, per session of a model with a prefix, or per item.

    Attributes:
        layers_s: of each layer, in order.
        embedding_s: what comes before the first layer.
        head_s: what comes after the last layer.
    """

    layers_s: list[float]
    embedding_s: float
    head_s: float


def measure_parts(family: Family, config: Mapping[str, Any], dtype: str) -> PartTimes:
    """Measures on one CPU thread.

    Args:
        family: family of the model.
        config: its config.json.
        dtype: type of parameters and activations.
    """
    layers = family.shape(config).layers
    kinds = [layer_kind(family, config, layer) for layer in range(layers)]
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        seconds = {
            kind: _part_s(
                family, config, StageRole(kinds.index(kind), kinds.index(kind) + 1, False, False), dtype
            )
            for kind in dict.fromkeys(kinds)
        }
        first = _part_s(family, config, StageRole(0, 1, True, False), dtype)
        last = _part_s(family, config, StageRole(layers - 1, layers, False, True), dtype)
    finally:
        torch.set_num_threads(before)
    return PartTimes(
        [seconds[kind] for kind in kinds],
        max(0.0, first - seconds[kinds[0]]),
        max(0.0, last - seconds[kinds[-1]]),
    )


def layer_kind(family: Family, config: Mapping[str, Any], layer: int) -> Kind:
    """What tells a layer from one that takes another time."""
    tensors = family.stage_tensors(config, StageRole(layer, layer + 1, False, False))
    return tuple(
        (".".join(part for part in tensor.name.split(".") if not part.isdigit()), tensor.shape)
        for tensor in tensors
    )


def _part_s(family: Family, config: Mapping[str, Any], role: StageRole, dtype: str) -> float:
    kind = torch_dtype(dtype)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        tensor.name: torch.randn(tensor.shape, generator=generator).mul_(0.02).to(kind)
        for tensor in family.stage_tensors(config, role)
    }
    stage = family.build(config, role, tensors, torch.device("cpu"), kind)
    del tensors
    if isinstance(stage, SinglePassStage):
        inputs = stage.samples(1)
        return _median_s(lambda: stage.forward(inputs), _REPEATS)
    model = looping_stage(stage)
    return _session_s(model, model.shape.prefix) if model.shape.prefix else _wave_s(model)


def _wave_s(model: LoadedStage) -> float:
    """Seconds of a decode step of a few sessions."""
    rows = [Row(slot, 0, 1) for slot in range(_ROWS)]
    for row in rows:
        model.open(row.slot, 1)
    x = sample_input(model, _ROWS)
    return _median_s(lambda: model.forward(x, rows, range(_ROWS)), _REPEATS)


def _session_s(model: LoadedStage, prefix: int) -> float:
    """Seconds of a whole session: the row that opens it with all it hears or sees, then its tokens."""
    opening = prefix + _PROMPT_TOKENS
    model.open(0, min(opening + _REPEATS, model.shape.context_length))
    x, first = sample_input(model, opening), [Row(0, 0, opening)]
    opening_s = _median_s(lambda: model.forward(x, first, [0]), _OPENINGS)
    token, places = sample_input(model, 1), itertools.count(opening)
    token_s = _median_s(lambda: model.forward(token, [Row(0, next(places), 1)], [0]), _REPEATS)
    return opening_s + _ANSWER_TOKENS * token_s


def _median_s(run: Callable[[], object], repeats: int) -> float:
    cache = torch.empty(_CACHE_BYTES, dtype=torch.uint8)
    times: list[float] = []
    for number in range(repeats):
        cache.fill_(number)
        begin_s = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin_s)
    return sorted(times)[repeats // 2]
