"""How long prompts and answers are, in tokens, clipped to what the model admits.

Comes after `trace` (rows or its quantile constants) and before `prompts`, which writes the text.
Pure: seeds come in, lengths go out.

Without a trace, lengths are drawn by inverting the piecewise-linear CDF through the quantiles of
the Azure LLM 2023 conversation trace. Prompt and answer are drawn independently: in the trace
they correlate by -0.11 only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import overload

import numpy as np
import numpy.typing as npt

from keystage.loadgen import arrivals, trace

_LENGTH_STREAM = 2
_CHUNK = 1 << 20
_MOST_TOKENS = 2**31 - 1


@dataclasses.dataclass(frozen=True, slots=True)
class Length:
    """One request's size.

    Attributes:
        prompt_tokens: asked prompt length, at least 1.
        output_tokens: asked answer length (`max_tokens`), at least 1.
        clipped: whether it was cut to fit the model's context.
    """

    prompt_tokens: int
    output_tokens: int
    clipped: bool = False


class Lengths(Sequence[Length]):
    """Lengths kept as columns, 9 bytes each: a `Length` is made where one is asked for.

    Attributes:
        prompt: asked prompt tokens, shape (n,).
        output: asked answer tokens, shape (n,).
        clipped: whether each was cut to fit, shape (n,).
    """

    def __init__(
        self, prompt: npt.NDArray[np.int32], output: npt.NDArray[np.int32], clipped: npt.NDArray[np.bool_]
    ) -> None:
        self.prompt, self.output, self.clipped = prompt, output, clipped

    def __len__(self) -> int:
        return len(self.prompt)

    @overload
    def __getitem__(self, index: int) -> Length: ...

    @overload
    def __getitem__(self, index: slice) -> Lengths: ...

    def __getitem__(self, index: int | slice) -> Length | Lengths:
        if isinstance(index, slice):
            return Lengths(self.prompt[index], self.output[index], self.clipped[index])
        return Length(int(self.prompt[index]), int(self.output[index]), bool(self.clipped[index]))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # compared by what it holds


def same(length: Length, count: int) -> Lengths:
    """One length, `count` times."""
    return Lengths(
        np.full(count, length.prompt_tokens, np.int32),
        np.full(count, length.output_tokens, np.int32),
        np.full(count, length.clipped, np.bool_),
    )


def fitted(
    context_tokens: npt.ArrayLike, generated_tokens: npt.ArrayLike, *, divisor: float, bound_tokens: int
) -> Lengths:
    """Scales pairs of tokens down and clips them so that prompt + answer <= bound_tokens.

    The answer is clipped to half the bound first, then the prompt to the rest: an answer that is
    long keeps its length as far as the model allows.

    Args:
        context_tokens: prompt tokens in the trace, shape (n,).
        generated_tokens: answer tokens in the trace, shape (n,).
        divisor: both are divided by it and rounded, at least 1.
        bound_tokens: tokens the model's context holds, at least 2.
    """
    prompt, output = (
        np.clip(np.rint(np.asarray(column, np.float64) / divisor), 1, _MOST_TOKENS)
        for column in (context_tokens, generated_tokens)
    )
    fitted_output = np.minimum(output, max(bound_tokens // 2, 1))
    fitted_prompt = np.minimum(prompt, np.maximum(bound_tokens - fitted_output, 1))
    clipped = (fitted_prompt != prompt) | (fitted_output != output)
    return Lengths(fitted_prompt.astype(np.int32), fitted_output.astype(np.int32), clipped)


def drawn(count: int, *, seed: int, divisor: float, bound_tokens: int) -> Lengths:
    """Draws lengths from the conversation trace's quantiles.

    Args:
        count: how many.
        seed: seed; arrivals of the same seed are drawn from another stream.
        divisor: see `fitted`.
        bound_tokens: see `fitted`.
    """
    source = arrivals.stream(seed, _LENGTH_STREAM)
    parts = []
    for begin in range(0, count, _CHUNK) if count else [0]:
        uniform = source.uniform(size=(min(_CHUNK, count - begin), 2))
        context = np.interp(uniform[:, 0], trace.QUANTILE_PROBABILITIES, trace.AZURE_CONV_CONTEXT_TOKENS)
        generated = np.interp(uniform[:, 1], trace.QUANTILE_PROBABILITIES, trace.AZURE_CONV_GENERATED_TOKENS)
        parts.append(fitted(context, generated, divisor=divisor, bound_tokens=bound_tokens))
    return _joined(parts)


def _joined(parts: Sequence[Lengths]) -> Lengths:
    if len(parts) == 1:
        return parts[0]
    return Lengths(
        np.concatenate([part.prompt for part in parts]),
        np.concatenate([part.output for part in parts]),
        np.concatenate([part.clipped for part in parts]),
    )
