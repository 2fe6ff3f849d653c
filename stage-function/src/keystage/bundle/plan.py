"""The plan of a split: which layers and which parameters each stage gets, checked before writing.

Between `bundle.source` (what the model holds) and `bundle.stage_file` (what is written). Only the
method `time` touches a device here, to measure the layers and the ends.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

from keystage.bundle import partition
from keystage.bundle.deepspeed_partition import bounds_of
from keystage.bundle.errors import SplitError
from keystage.models.base import Family, StageRole, StageTensor

Method = Literal["uniform", "parameters", "time"]


def check_method(method: str) -> None:
    """Refuses a method that is none.

    Raises:
        SplitError: it is.
    """
    if method not in get_args(Method):
        raise SplitError(f"method {method!r} is unknown: use one of {', '.join(get_args(Method))}")


def roles(
    family: Family,
    config: Mapping[str, Any],
    stages: int,
    method: str,
    dtype: str,
    seconds: Sequence[float] | None = None,
) -> tuple[list[StageRole], str]:
    """Chooses the layers of each stage.

    Args:
        family: family of the model.
        config: its config.json.
        stages: number of stages.
        method: `uniform`, `parameters` or `time`.
        dtype: type the stages will have (`float32`, ...), for `time`.
        seconds: of each layer, the ends counted in, for `time`; None: they are measured here.

    Returns:
        The stages in order, and which partitioner chose them.

    Raises:
        SplitError: more stages than layers, or fewer than 1; seconds of another number of layers.
    """
    layers = family.shape(config).layers
    partition.check_stages(stages, layers)
    if seconds is not None and len(seconds) != layers:
        raise SplitError(f"the profiled bundle has {len(seconds)} layers, the model has {layers}")
    if method == "time":
        times = time_weights(family, config, dtype) if seconds is None else seconds
        bounds, chosen_by = partition.balanced(times, stages), "keystage"
    else:
        weights = parameter_weights(family, config)
        bounds, chosen_by = bounds_of("uniform" if method == "uniform" else "parameters", weights, stages)
    partition.check_bounds(bounds, layers)
    found = [
        StageRole(first, end, index == 0, index == stages - 1)
        for index, (first, end) in enumerate(itertools.pairwise(bounds))
    ]
    return found, chosen_by


def parameter_weights(family: Family, config: Mapping[str, Any]) -> list[float]:
    """Parameters per layer; the embedding counts with the first, norm and head with the last."""
    layers = range(family.shape(config).layers)
    inner = [family.stage_tensors(config, StageRole(i, i + 1, False, False)) for i in layers]
    embedding, head = family.end_parameters(config)
    return partition.with_ends([float(parameters(tensors)) for tensors in inner], embedding, head)


def time_weights(family: Family, config: Mapping[str, Any], dtype: str) -> list[float]:
    """Seconds per layer, measured here with random parameters; the ends count as in `parameter_weights`."""
    from keystage.models.layer_time import measure_parts

    times = measure_parts(family, config, dtype)
    return partition.with_ends(times.layers_s, times.embedding_s, times.head_s)


def parameters(tensors: Sequence[StageTensor]) -> int:
    """Number of parameters."""
    return sum(math.prod(tensor.shape) for tensor in tensors)


def check_plan(
    plan: Sequence[Sequence[StageTensor]],
    found: Mapping[str, tuple[int, ...]],
    is_derived: Callable[[str], bool],
) -> None:
    """Proves that each parameter is there, has its shape and is held where it must be.

    Only a tied matrix may be held twice, under two names; a parameter of the model that no stage
    takes is refused, since leaving it out would change what the model computes.

    Args:
        plan: parameters of each stage.
        found: shape of each parameter of the source.
        is_derived: whether a parameter of this name may be left out.

    Raises:
        SplitError: a parameter is missing, doubled, left over or of another shape.
    """
    tensors = [tensor for stage in plan for tensor in stage]
    for tensor in tensors:
        if tensor.source not in found:
            raise SplitError(f"parameter {tensor.source} is missing from the model")
        if found[tensor.source] != tensor.source_shape:
            raise SplitError(
                f"parameter {tensor.source}: shape {list(tensor.source_shape)} expected from config.json, "
                f"{list(found[tensor.source])} found"
            )
    doubled = [name for name, times in Counter(tensor.name for tensor in tensors).items() if times > 1]
    if doubled:
        raise SplitError(f"parameter {doubled[0]} would be held by two stages")
    taken = {tensor.source for tensor in tensors}
    left = sorted(name for name in set(found) - taken if not is_derived(name))
    if left:
        raise SplitError(f"parameter {left[0]} ({len(left)} in all) of the model belongs to no stage")
