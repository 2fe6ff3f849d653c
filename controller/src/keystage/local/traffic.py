"""What kind of traffic a pipeline serves: the main job replays prompts, texts, recordings or pictures.

Between a bundle and the load generator, which knows no bundles. Decided from `pipeline.json` alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from keystage.bundle.api import Pipeline
from keystage.bundle.errors import SplitError
from keystage.router.tasks import Task, task_of

if TYPE_CHECKING:
    from keystage.loadgen.target import TargetKind

NO_CONTEXT = 2048
"""Stands for the context length of pipelines whose inputs are not tokens; nothing asks for it then."""


FRAME_TOKENS = 4
"""What a tokenizer puts around a text that is encoded ([CLS], [SEP]), and the mask within it: texts are made
of words of one token each, up to the very length that the model admits."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """How a pipeline is called.

    Attributes:
        kind: of requests.
        context_tokens: tokens of a text that it admits.
        byte_tokens: whether a token is a byte, since it has no tokenizer.
        mask: text that stands for a word to be found; empty where none is.
        bodies: file of what a stream program is sent, None where it is no program.
    """

    kind: TargetKind
    context_tokens: int
    byte_tokens: bool
    mask: str = ""
    bodies: Path | None = None

    def options(self) -> list[str]:
        """As options of `keystage demo`."""
        given = ["--target", self.kind, "--context", str(self.context_tokens)]
        given += ["--byte-tokens"] if self.byte_tokens else []
        given += ["--bodies", str(self.bodies)] if self.bodies is not None else []
        return [*given, "--mask", self.mask] if self.mask else given


def traffic_of(pipeline: Pipeline, device: str = "cpu") -> Traffic:
    """The traffic that fits a pipeline.

    Args:
        pipeline: what is served.
        device: of its stages.

    Raises:
        SplitError: nothing can be sent to it that it could answer.
    """
    task = task_of(pipeline)
    if task not in (None, Task.BYTES) and device.startswith("emulated"):
        raise SplitError(
            f"device {device!r} computes nothing, and {pipeline.family} answers what was computed: "
            f"use it with a model that generates, or with a pipeline of `keystage emulate`"
        )
    mask = pipeline.special_tokens.get("mask_token", "") if task is Task.FILL_MASK else ""
    if task is Task.FILL_MASK and not (mask and pipeline.tokenizer):
        raise SplitError(
            f"pipeline {pipeline.name!r} fills masks and has no tokenizer with one: nothing to send"
        )
    frame = FRAME_TOKENS if task in (Task.EMBED, Task.FILL_MASK) and pipeline.tokenizer else 0
    return Traffic(
        _kind(pipeline, task),
        max(2, (pipeline.context_length or NO_CONTEXT) - frame),
        byte_tokens=not pipeline.tokenizer and pipeline.vocab_size > 0,
        mask=mask,
    )


def _kind(pipeline: Pipeline, task: Task | None) -> TargetKind:
    match task:
        case None:
            return "transcriptions" if pipeline.family == "whisper" else "openai"
        case Task.EMBED:
            return "embeddings"
        case Task.FILL_MASK:
            return "masks"
        case Task.CLASSIFY:
            return "images"
        case Task.BYTES:
            return "raw"
        case Task.PROGRAM:
            return "bodies"
