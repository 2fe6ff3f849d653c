"""How long prompts and answers are, in tokens, clipped to what the model admits.

Comes after `trace` (rows or its quantile constants) and before `prompts`, which writes the text.
Pure: seeds come in, lengths go out.

Without a trace, lengths are drawn by inverting the piecewise-linear CDF through the quantiles of
the Azure LLM 2023 conversation trace. Prompt and answer are drawn independently: in the trace
they correlate by -0.11 only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np

from keystage.loadgen import arrivals, trace

_LENGTH_STREAM = 2


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


def fit(context_tokens: float, generated_tokens: float, divisor: float, bound_tokens: int) -> Length:
    """Scales one pair down and clips it so that prompt + answer <= bound_tokens.

    The answer is clipped to half the bound first, then the prompt to the rest: an answer that is
    long keeps its length as far as the model allows.

    Args:
        context_tokens: prompt tokens in the trace.
        generated_tokens: answer tokens in the trace.
        divisor: both are divided by it and rounded, at least 1.
        bound_tokens: tokens the model's context holds, at least 2.
    """
    prompt = max(round(context_tokens / divisor), 1)
    output = max(round(generated_tokens / divisor), 1)
    fitted_output = min(output, max(bound_tokens // 2, 1))
    fitted_prompt = min(prompt, max(bound_tokens - fitted_output, 1))
    return Length(fitted_prompt, fitted_output, (fitted_prompt, fitted_output) != (prompt, output))


def drawn(count: int, *, seed: int, divisor: float, bound_tokens: int) -> list[Length]:
    """Draws lengths from the conversation trace's quantiles.

    Args:
        count: how many.
        seed: seed; arrivals of the same seed are drawn from another stream.
        divisor: see `fit`.
        bound_tokens: see `fit`.
    """
    uniform = arrivals.stream(seed, _LENGTH_STREAM).uniform(size=(count, 2))
    context = np.interp(uniform[:, 0], trace.QUANTILE_PROBABILITIES, trace.AZURE_CONV_CONTEXT_TOKENS)
    generated = np.interp(uniform[:, 1], trace.QUANTILE_PROBABILITIES, trace.AZURE_CONV_GENERATED_TOKENS)
    return [fit(float(c), float(g), divisor, bound_tokens) for c, g in zip(context, generated, strict=True)]


def of_rows(rows: Iterable[trace.TraceRow], *, divisor: float, bound_tokens: int) -> list[Length]:
    """Takes lengths from a trace's rows, prompt and answer of one row together."""
    return [fit(row.context_tokens, row.generated_tokens, divisor, bound_tokens) for row in rows]
