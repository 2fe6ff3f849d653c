"""The list of model families this program can serve. A new family is one line here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keystage.bundle.errors import SplitError
from keystage.models import cuda_support
from keystage.models.base import Family
from keystage.models.bert import BERT
from keystage.models.config_fields import architectures
from keystage.models.decoder_family import DecoderFamily
from keystage.models.gpt2 import GPT2
from keystage.models.llama import LLAMA
from keystage.models.opt import OPT
from keystage.models.program import PROGRAM
from keystage.models.whisper import WhisperFamily
from keystage.models.wide_resnet import WIDE_RESNET

_FAMILIES: tuple[Family, ...] = (LLAMA, OPT, GPT2, WhisperFamily(), BERT, WIDE_RESNET, PROGRAM)


def family_named(name: str) -> Family:
    """The family with this name, as `pipeline.json` has it.

    Raises:
        SplitError: unknown family.
    """
    for family in _FAMILIES:
        if family.name == name:
            return family
    raise SplitError(f"model family {name!r} is unknown: known are {', '.join(f.name for f in _FAMILIES)}")


def family_of(config: Mapping[str, Any]) -> Family:
    """The family that serves a model with this config.json.

    Raises:
        SplitError: no family does.
    """
    names = architectures(config)
    for family in _FAMILIES:
        if any(name in family.architectures for name in names):
            return family
        if not names and config.get("model_type") == family.name:
            return family
    known = ", ".join(name for family in _FAMILIES for name in family.architectures)
    found = ", ".join(names) or f"model_type {config.get('model_type')!r}"
    raise SplitError(f"architecture {found} is unknown: known are {known}")


def runs_as_span(name: str) -> bool:
    """Whether stages of this family run as spans on a GPU here (`models.cuda_span`).

    Raises:
        SplitError: unknown family.
    """
    return isinstance(family_named(name), DecoderFamily) and cuda_support.is_available()
