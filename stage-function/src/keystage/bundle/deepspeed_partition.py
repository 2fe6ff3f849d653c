"""DeepSpeed's partitioner where it is installed, else this project's own, which gives the same.

Used by `bundle.plan` for the methods `uniform` and `parameters`. DeepSpeed is an optional extra: importing it
takes seconds, so that is left until a split asks, and only its two partition functions are used, neither a
process group nor an accelerator.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import itertools
import logging
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any, Literal

from keystage.bundle import partition

_log = logging.getLogger(__name__)


def bounds_of(
    method: Literal["uniform", "parameters"], weights: Sequence[float], parts: int
) -> tuple[list[int], str]:
    """Bounds of the stages, and who made them.

    Args:
        method: `uniform` (numbers of layers) or `parameters` (their weights).
        weights: weight of each layer; for `uniform` only their number counts.
        parts: number of stages, at most the number of layers.

    Returns:
        `parts + 1` ascending bounds with no part empty; `deepspeed VERSION` or `keystage`.
    """
    theirs = _deepspeed()
    if theirs is not None:
        made = (
            theirs.partition_uniform(num_items=len(weights), num_parts=parts)
            if method == "uniform"
            else theirs.partition_balanced(weights=list(weights), num_parts=parts)
        )
        bounds = [int(bound) for bound in made]
        # Early versions of DeepSpeed could leave parts empty, and a stage without a layer cannot be served.
        if all(end > start for start, end in itertools.pairwise(bounds)):
            return bounds, f"deepspeed {metadata.version('deepspeed')}"
        _log.warning("DeepSpeed's partition %s leaves a stage empty; Keystage's own is used", bounds)
    own = (
        partition.uniform(len(weights), parts)
        if method == "uniform"
        else partition.least_spread(weights, parts)
    )
    return own, "keystage"


def _deepspeed() -> Any:
    """The module with DeepSpeed's partition functions, None where there is none that can be imported."""
    if importlib.util.find_spec("deepspeed") is None:
        return None
    try:
        # It tells of its machine on standard output, which belongs to the command.
        with contextlib.redirect_stdout(sys.stderr):
            return importlib.import_module("deepspeed.runtime.utils")
    except Exception as error:  # noqa: BLE001  # its import runs checks of the machine that raise what they like
        _log.warning("deepspeed is installed but cannot be imported: %s; Keystage's own is used", error)
        return None
