"""Shape classes: which stages one standby worker can become.

Asked by the daemon (for `Standbys` and for every `Fork`) and by `standby`. Two stages are of one class
when their files have equal layout, layer numbers apart, and run with equal arithmetic. Told from the
pipeline's description alone, without torch and without the file; `arena.check_equal` makes sure on the
files themselves before anything is copied.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from keystage.bundle import store
from keystage.bundle.api import Pipeline

_NAMES_ONLY = frozenset(
    {
        "_name_or_path",
        "architectures",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "num_hidden_layers",
        "pad_token_id",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
"""Fields of a config.json that change neither a stage's layout nor its arithmetic."""


def shape_of(pipeline: Pipeline, index: int, device: str, dtype: str) -> str:
    """Names the class of a stage.

    Args:
        pipeline: its description.
        index: the stage.
        device: full torch name (`cpu`, `cuda:0`).
        dtype: type it runs in (`float32`, ...), empty takes the bundle's.

    Returns:
        Equal text for stages that one standby can become.

    Raises:
        BundleError: no such stage.
    """
    stage = store.stage_of(pipeline, index)
    first, end = stage.layers
    described: dict[str, Any] = {
        "family": pipeline.family,
        "execution": pipeline.execution,
        "config": {k: v for k, v in pipeline.config.items() if k not in _NAMES_ONLY},
        "stored": pipeline.dtype,
        "layers": end - first,
        "is_first": index == 0,
        "is_last": index == len(pipeline.stages) - 1,
        "parameters": stage.parameters,
    }
    digest = hashlib.sha256(msgspec.json.encode(described, order="deterministic")).hexdigest()
    return f"{pipeline.family}-{digest[:16]}-{dtype or pipeline.dtype}-{device}"
