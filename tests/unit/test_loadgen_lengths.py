"""Token lengths and prompt texts."""

import numpy as np
import pytest

from keystage.loadgen import lengths, prompts, trace
from keystage.loadgen.lengths import Length


def test_scaled_means_are_those_of_the_trace() -> None:
    sizes = lengths.drawn(20_000, seed=3, divisor=16, bound_tokens=100_000)
    # The published trace has means of 1,154.7 and 211.1 tokens.
    assert 16 * np.mean([size.prompt_tokens for size in sizes]) == pytest.approx(1154.7, rel=0.05)
    assert 16 * np.mean([size.output_tokens for size in sizes]) == pytest.approx(211.1, rel=0.05)
    assert not any(size.clipped for size in sizes)


def test_undivided_lengths_stay_within_the_trace() -> None:
    sizes = lengths.drawn(5_000, seed=3, divisor=1, bound_tokens=100_000)
    assert min(size.prompt_tokens for size in sizes) >= trace.AZURE_CONV_CONTEXT_TOKENS[0]
    assert max(size.output_tokens for size in sizes) <= trace.AZURE_CONV_GENERATED_TOKENS[-1]


def test_a_seed_gives_the_same_lengths_and_a_longer_run_begins_alike() -> None:
    one = lengths.drawn(50, seed=7, divisor=16, bound_tokens=2048)
    assert one == lengths.drawn(50, seed=7, divisor=16, bound_tokens=2048)
    assert one == lengths.drawn(80, seed=7, divisor=16, bound_tokens=2048)[:50]
    assert one != lengths.drawn(50, seed=8, divisor=16, bound_tokens=2048)


@pytest.mark.parametrize(
    ("context", "generated", "divisor", "bound", "expected"),
    [
        (1600, 160, 16, 2048, Length(100, 10)),
        (2, 7, 16, 2048, Length(1, 1)),
        (0, 0, 1, 2048, Length(1, 1)),
        (14050, 1000, 1, 2048, Length(1048, 1000, clipped=True)),
        (100, 5000, 1, 2048, Length(100, 1024, clipped=True)),
        (14050, 5000, 1, 2048, Length(1024, 1024, clipped=True)),
        (9, 9, 1, 2, Length(1, 1, clipped=True)),
    ],
)
def test_clipping(context: int, generated: int, divisor: float, bound: int, expected: Length) -> None:
    assert lengths.fitted([context], [generated], divisor=divisor, bound_tokens=bound) == [expected]


def test_rows_keep_prompt_and_answer_together() -> None:
    sizes = lengths.fitted([320, 16], [32, 160], divisor=16, bound_tokens=512)
    assert sizes == [Length(20, 2), Length(1, 10)]


def test_prompts_have_the_asked_words_and_differ() -> None:
    assert [len(prompts.text(count, 1, 0).split()) for count in (1, 50, 900)] == [1, 50, 900]
    assert prompts.text(30, 1, 4) == prompts.text(30, 1, 4)
    assert len({prompts.text(30, 1, index) for index in range(100)}) == 100
    assert len(set(prompts.WORDS)) == len(prompts.WORDS) > 400


def test_payloads_have_the_asked_size_and_differ() -> None:
    assert len(prompts.payload(4096, 1, 0)) == 4096
    assert prompts.payload(64, 1, 0) == prompts.payload(64, 1, 0)
    assert prompts.payload(64, 1, 0) != prompts.payload(64, 1, 1)
