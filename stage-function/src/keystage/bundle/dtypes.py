"""Names of element types: command line (`fp32`), pipeline.json (`float32`), safetensors (`F32`).

The three places that name a type meet here, so that nobody else translates. Knows no torch:
`keystage.models.base.torch_dtype` turns a name into a torch type.
"""

from __future__ import annotations

from keystage.bundle.errors import SplitError

SHORT_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Command line and `KEYSTAGE_DTYPE` to pipeline.json."""

SAFETENSORS_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""pipeline.json to safetensors header."""

FLOAT_NAMES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Types of source parameters that can be converted, safetensors header to torch name."""

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def full_name(name: str) -> str:
    """Turns `fp32` (or `float32`) into `float32`.

    Raises:
        SplitError: the name is none of the known ones.
    """
    if name in ITEM_BYTES and name in SAFETENSORS_NAMES:
        return name
    if name not in SHORT_NAMES:
        raise SplitError(f"dtype {name!r} is unknown: use one of {', '.join(SHORT_NAMES)}")
    return SHORT_NAMES[name]


def short_name(name: str) -> str:
    """Turns `float32` into `fp32`, as `KEYSTAGE_DTYPE` has it."""
    return next(short for short, full in SHORT_NAMES.items() if full == name)
