"""What a single-pass pipeline is for, by which the HTTP face chooses what it takes and answers. Pure."""

from __future__ import annotations

import enum

from keystage.bundle.api import Pipeline
from keystage.models.bert_config import MASK_FILLER
from keystage.models.config_fields import architectures


class Task(enum.Enum):
    """What one item is and becomes.

    Attributes:
        BYTES: whatever it is (emulated pipelines).
        EMBED: a text becomes a vector.
        FILL_MASK: a text with masks becomes tokens for them.
        CLASSIFY: an image becomes a score per class.
        PROGRAM: what a stream program's parser takes, and its renderer makes.
    """

    BYTES = "bytes"
    EMBED = "embed"
    FILL_MASK = "fill-mask"
    CLASSIFY = "classify"
    PROGRAM = "program"


def task_of(pipeline: Pipeline) -> Task | None:
    """The task of a single-pass pipeline; None for a looping one."""
    if pipeline.execution == "looping":
        return None
    if pipeline.execution == "program":
        return Task.PROGRAM
    match pipeline.family:
        case "bert" if MASK_FILLER in architectures(pipeline.config):
            return Task.FILL_MASK
        case "bert":
            return Task.EMBED
        case "wide_resnet":
            return Task.CLASSIFY
    return Task.BYTES
