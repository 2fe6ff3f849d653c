"""Bodies to send to a stream program, for replays: drawn by the program's own module.

A program's module may have a function `sample(draw: random.Random) -> bytes` beside the one that makes the
program. The ready programs' samples are here: prompts of a few words, and as many steps or tokens as makes
requests differ.
"""

from __future__ import annotations

import importlib
import os
import random
from collections.abc import Callable, Mapping

import msgspec

from keystage.bundle.errors import SplitError
from keystage.streams.graph import ProgramReference
from keystage.streams.handler import BUILT_IN, open_allowed

_WORDS = ("a", "blue", "bridge", "cat", "city", "field", "garden", "of", "old", "river", "stone", "under")
STEPS = (5, 10, 15, 20, 30, 50)
"""Steps that people ask of diffusion models; schedulers with few steps and with many are both in use."""


def sample_bodies(
    reference: ProgramReference, count: int, seed: int, handler: str | os.PathLike[str] | None = None
) -> list[bytes]:
    """Draws bodies.

    Args:
        reference: the program.
        count: how many.
        seed: of the draw.
        handler: folder of the user's code.

    Raises:
        SplitError: the module has no `sample`, or what it gives is not one line of bytes.
        ProgramError: there is no such program.
    """
    draw = random.Random(seed)
    sample = _sample_of(reference, handler)
    bodies = [sample(draw) for _ in range(count)]
    for body in bodies:
        if not isinstance(body, bytes) or not body or b"\n" in body:
            raise SplitError(f"sample() of {reference.path} must give one line of bytes, got {body!r:.80}")
    return bodies


def _sample_of(
    reference: ProgramReference, handler: str | os.PathLike[str] | None
) -> Callable[[random.Random], bytes]:
    module = reference.path.partition(":")[0]
    if module.startswith(BUILT_IN) and module.removeprefix(BUILT_IN) in _READY:
        return _READY[module.removeprefix(BUILT_IN)]
    open_allowed(reference.path, reference.options, handler)
    sample: Callable[[random.Random], bytes] | None = getattr(importlib.import_module(module), "sample", None)
    if sample is None:
        raise SplitError(f"module {module} has no sample(draw): nothing to send to {reference.path}")
    return sample


def _prompt(draw: random.Random) -> str:
    return " ".join(draw.choices(_WORDS, k=draw.randint(3, 12)))


def _diffusion(draw: random.Random) -> bytes:
    fields = {"prompt": _prompt(draw), "steps": draw.choice(STEPS), "seed": draw.randrange(1 << 31)}
    return msgspec.json.encode(fields)


def _language(draw: random.Random) -> bytes:
    fields = {"prompt": _prompt(draw), "max_tokens": draw.randint(4, 32), "seed": draw.randrange(1 << 31)}
    return msgspec.json.encode(fields)


def _agents(draw: random.Random) -> bytes:
    fields = {"question": _prompt(draw), "max_tokens": draw.randint(4, 16), "seed": draw.randrange(1 << 31)}
    return msgspec.json.encode(fields)


_READY: Mapping[str, Callable[[random.Random], bytes]] = {
    "diffusion": _diffusion,
    "language": _language,
    "agents": _agents,
}
