"""Sampling is a pure function of (logits, seed, position), and draws what it should."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keystage.worker.sampling import SamplingError, sample, uniform

seeds = st.integers(0, 2**64 - 1)
logit_rows = st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=200)


def draw(logits: list[float], seed: int, position: int, temperature: float, top_p: float) -> int:
    return sample(torch.tensor([logits]), [seed], [position], [temperature], [top_p])[0]


@given(seeds, st.integers(0, 2**40))
def test_the_uniform_number_is_fixed_and_in_range(seed: int, position: int) -> None:
    number = uniform(seed, position)
    assert 0 <= number < 1
    assert number == uniform(seed, position)


def test_uniform_numbers_differ_between_seeds_and_positions() -> None:
    numbers = {uniform(seed, position) for seed in range(40) for position in range(40)}
    assert len(numbers) == 1600
    assert abs(np.mean(list(numbers)) - 0.5) < 4 * math.sqrt(1 / 12 / 1600)


def test_known_values_never_change() -> None:
    assert [uniform(0, 0), uniform(1, 0), uniform(2**64 - 1, 77)] == [
        0.03855806254256533,
        0.13253035434487792,
        0.5210294807501706,
    ]


@given(
    st.lists(
        st.tuples(
            seeds, st.integers(0, 9999), st.sampled_from([0, 0.3, 1, 2]), st.sampled_from([0.2, 0.9, 1])
        ),
        min_size=1,
        max_size=6,
    ),
    st.randoms(),
)
@settings(max_examples=30)
def test_a_row_does_not_see_its_batch(rows: list[tuple[int, int, float, float]], random: object) -> None:
    logits = torch.randn(len(rows), 50, generator=torch.Generator().manual_seed(len(rows)))
    columns = [list(column) for column in zip(*rows, strict=True)]
    together = sample(logits, *columns)
    alone = [sample(logits[i : i + 1], *([value] for value in row))[0] for i, row in enumerate(rows)]
    assert together == alone
    order = list(range(len(rows)))
    random.shuffle(order)  # type: ignore[attr-defined]
    shuffled = sample(logits[order], *([column[i] for i in order] for column in columns))
    assert shuffled == [together[i] for i in order]


@given(logit_rows, seeds, st.floats(0.05, 1), st.floats(0.01, 5))
def test_only_the_nucleus_is_drawn(logits: list[float], seed: int, top_p: float, temperature: float) -> None:
    token = draw(logits, seed, 3, temperature, top_p)
    values = torch.tensor(logits, dtype=torch.float64)
    masses = torch.softmax(values / temperature, -1)
    likelier = float(masses[masses > masses[token]].sum())
    assert likelier < top_p + 1e-9


@given(logit_rows, seeds)
def test_greedy_takes_the_first_maximum(logits: list[float], seed: int) -> None:
    doubled = logits + logits
    assert draw(doubled, seed, 0, 0, 1.0) == doubled.index(max(doubled))


@given(seeds)
def test_a_tiny_temperature_or_nucleus_is_greedy(seed: int) -> None:
    logits = [0.5, 2.0, 1.9, -1.0]
    assert draw(logits, seed, 5, 1e-6, 1.0) == 1
    assert draw(logits, seed, 5, 1.0, 1e-6) == 1


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_frequencies_follow_the_masses(top_p: float) -> None:
    logits = [1.0, 0.0, 2.0, -4.0]
    draws = 4000
    counts = np.bincount([draw(logits, 11, p, 1.5, top_p) for p in range(draws)], minlength=4)
    masses = np.exp(np.array(logits) / 1.5)
    masses /= masses.sum()
    if top_p < 1:  # 0.55 + 0.28 + 0.14 reach 0.9 with the third
        masses[3] = 0
        masses /= masses.sum()
    assert np.all(np.abs(counts / draws - masses) <= 4 * np.sqrt(masses / draws))


def test_a_large_vocabulary_needs_more_candidates() -> None:
    logits = torch.zeros(1, 49152)
    logits[0, ::2] = 1e-3
    tokens = {sample(logits, [5], [p], [1.0], [0.4])[0] for p in range(50)}
    assert len(tokens) > 40
    assert all(token % 2 == 0 for token in tokens)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_logits_are_named_by_row(bad: float) -> None:
    logits = torch.zeros(3, 5)
    logits[1, 2] = bad
    with pytest.raises(SamplingError, match=r"rows \[1\]") as caught:
        sample(logits, [1, 2, 3], [0, 0, 0], [0, 1, 0], [1, 1, 1])
    assert caught.value.rows == [1]


def test_masked_logits_are_allowed_unless_all_are() -> None:
    assert draw([-math.inf, 1.0, -math.inf], 3, 0, 1.0, 1.0) == 1
    with pytest.raises(SamplingError, match="no finite maximum"):
        draw([-math.inf, -math.inf], 3, 0, 1.0, 1.0)


@pytest.mark.parametrize(("temperature", "top_p"), [(-1, 1), (math.nan, 1), (1, 0), (1, 1.1), (1, math.nan)])
def test_parameters_out_of_range_are_refused(temperature: float, top_p: float) -> None:
    with pytest.raises(SamplingError, match="row 0: temperature"):
        draw([0.0, 1.0], 0, 0, temperature, top_p)


def test_no_rows() -> None:
    assert sample(torch.empty(0, 5), [], [], [], []) == []
