"""Reading config.json: one checked field at a time, and the rotary positions in both of their forms.

The family modules read with these, so that a field that is missing or impossible, or asks for what
is not implemented, is refused in the same words everywhere.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from keystage.bundle.errors import SplitError
from keystage.models.decoder_config import Activation, RopeScaling

_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def refuse_others(config: Mapping[str, Any], family: str, allowed: Mapping[str, Sequence[object]]) -> None:
    """Refuses values that are not implemented; a missing field counts as None.

    Raises:
        SplitError: a field has a value that is not among the allowed ones.
    """
    for key, values in allowed.items():
        if config.get(key) not in values:
            raise SplitError(f"config.json: {key} = {config[key]!r} is not supported for {family}")


MOST = 2**31 - 1
"""Above every size of a model that there is; larger ones are mistakes, and no memory is taken for them."""
MOST_LAYERS = 10_000
"""Layers are written out one by one in places, so their number has a lower bound than widths."""


def count(fields: Mapping[str, Any], key: str, default: int | None = None, most: int = MOST) -> int:
    """A whole number from 1 to `most`.

    Raises:
        SplitError: it is none, or missing without a default.
    """
    value = fields.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise SplitError(f"config.json: {key} must be a whole number from 1 to {most}, got {shown(value)}")
    return value


def layers_in(fields: Mapping[str, Any], key: str) -> int:
    """A number of layers, 1 to `MOST_LAYERS`.

    Raises:
        SplitError: it is none, or missing.
    """
    return count(fields, key, most=MOST_LAYERS)


def architectures(config: Mapping[str, Any]) -> list[str]:
    """The class names that a model is of; none where they are not told.

    Raises:
        SplitError: they are no list of names.
    """
    names = config.get("architectures") or []
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise SplitError(f"config.json: architectures must be a list of names, got {shown(names)}")
    return list(names)


def shown(value: object) -> str:
    """A value as it may stand in a message: cut."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def number(fields: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A number above 0.

    Raises:
        SplitError: it is none, or missing without a default.
    """
    value = fields.get(key)
    if value is None:
        value = default
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
        raise SplitError(f"config.json: {key} must be a number above 0, got {shown(value)}")
    return float(value)


def flag(fields: Mapping[str, Any], key: str, default: bool) -> bool:
    """True or false.

    Raises:
        SplitError: it is neither.
    """
    value = fields.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise SplitError(f"config.json: {key} must be true or false, got {value!r}")
    return value


def activation(config: Mapping[str, Any], key: str, default: str, family: str) -> Activation:
    """The activation of the MLP.

    Raises:
        SplitError: an unknown one.
    """
    name = config.get(key) or default
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise SplitError(f"config.json: {key} = {name!r} is not supported for {family}")
    return _ACTIVATIONS[name]


def head_size(hidden_size: int, heads: int) -> int:
    """Elements of a head where config.json does not say it.

    Raises:
        SplitError: the heads do not divide the width.
    """
    if hidden_size % heads:
        raise SplitError(f"config.json: hidden_size {hidden_size} is no multiple of {heads} heads")
    return hidden_size // heads


def rope(config: Mapping[str, Any], context_length: int) -> tuple[float, RopeScaling]:
    """The base and the scaling: from `rope_parameters`, or from `rope_theta` and `rope_scaling`.

    `dynamic` stretches only positions beyond `max_position_embeddings`, and no session gets there.

    Raises:
        SplitError: a field is missing or impossible, or the kind is not implemented.
    """
    fields = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(fields, Mapping):
        raise SplitError(f"config.json: rope_scaling must be an object, got {fields!r}")
    partial = fields.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise SplitError(f"config.json: partial_rotary_factor = {partial!r} is not supported: use 1")
    fields = {"rope_theta": config.get("rope_theta"), **fields}
    kind = fields.get("rope_type") or fields.get("type") or "default"
    theta = number(fields, "rope_theta", 10000.0)
    if kind in ("default", "dynamic"):
        return theta, RopeScaling()
    if kind == "linear":
        return theta, RopeScaling("linear", number(fields, "factor"))
    if kind == "llama3":
        return theta, RopeScaling(
            "llama3",
            number(fields, "factor"),
            number(fields, "low_freq_factor"),
            number(fields, "high_freq_factor"),
            count(fields, "original_max_position_embeddings"),
        )
    if kind == "yarn":
        return theta, _yarn(fields, context_length)
    raise SplitError(
        f"config.json: rope type {kind!r} is not supported: use default, linear, dynamic, llama3 or yarn"
    )


def _yarn(fields: Mapping[str, Any], context_length: int) -> RopeScaling:
    """Its attention factor is a field, or follows from the stretch (YaRN, arXiv 2309.00071, eq. 22)."""
    original = count(fields, "original_max_position_embeddings", context_length)
    factor = number(fields, "factor", context_length / original)
    attention_factor = _mscale(factor, 1.0)
    if fields.get("attention_factor") is not None:
        attention_factor = number(fields, "attention_factor")
    elif fields.get("mscale") and fields.get("mscale_all_dim"):
        above, below = number(fields, "mscale"), number(fields, "mscale_all_dim")
        attention_factor = _mscale(factor, above) / _mscale(factor, below)
    return RopeScaling(
        "yarn",
        factor,
        original_context=original,
        beta_fast=number(fields, "beta_fast", 32.0),
        beta_slow=number(fields, "beta_slow", 1.0),
        is_truncated=flag(fields, "truncate", default=True),
        attention_factor=attention_factor,
    )


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
