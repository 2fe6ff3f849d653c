"""Published tables, arrivals and cells of the batching benchmarks."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from keystage.bench.batching_arrivals import arrivals, gamma, poisson, shares, uniform
from keystage.bench.batching_cells import MIXED, Cell, every, sample
from keystage.bench.batching_models import (
    A100,
    GTX1080TI,
    TABLE_2,
    capacity_rps,
    named,
    staggered,
    uncoordinated,
)


def test_table_2_bounds_are_the_papers() -> None:
    for row in TABLE_2:
        assert uncoordinated(row.model, 8)[1] == pytest.approx(row.uncoordinated_rps, abs=1)
        assert staggered(row.model, 8)[1] == pytest.approx(row.staggered_rps, abs=1)
    assert [uncoordinated(row.model, 8)[0] for row in TABLE_2] == [7, 3]
    assert [staggered(row.model, 8)[0] for row in TABLE_2] == [16, 8]


def test_tables_3_and_4_have_all_models_in_the_printed_order() -> None:
    assert (len(GTX1080TI), len(A100)) == (35, 37)
    for table in (GTX1080TI, A100):
        effect = [model.profile.beta_s / model.profile.alpha_s for model in table]
        assert effect == sorted(effect, reverse=True)
        assert len({model.name for model in table}) == len(table)
    # Ratios that the paper prints beside them.
    for gpu, name, ratio in (
        ("1080Ti", "NASNetMobile", 25.172),
        ("1080Ti", "EfficientNetV2L", 0.700),
        ("A100", "DenseNet121", 195.296),
        ("A100", "EfficientNetB7", 0.168),
    ):
        model = named(gpu, name)
        assert model.profile.beta_s / model.profile.alpha_s == pytest.approx(ratio, abs=6e-4)
    # Column sums of the printed tables: SLO, alpha and beta in ms.
    for table, sums in ((GTX1080TI, (2395, 220.489, 311.486)), (A100, (1303, 91.847, 219.828))):
        rows = [(model.slo_s, model.profile.alpha_s, model.profile.beta_s) for model in table]
        assert 1000 * np.sum(rows, axis=0) == pytest.approx(sums)


def test_a_model_of_the_tables_can_run_in_fours_as_the_paper_says() -> None:
    # "Latency SLO ... ensures that each model can run with batch size greater than or equal to 4": with
    # nothing to wait for. NASNetMobile needs 2 l(4) = 33.3 ms, so it is not 2 l(4).
    for model in (*GTX1080TI, *A100):
        assert model.profile.largest_batch(model.slo_s) >= 4, model


def test_capacity_is_every_replica_busy_with_the_largest_batches() -> None:
    model = TABLE_2[0].model
    batch = model.profile.largest_batch(model.slo_s)
    assert capacity_rps([model], [1.0], 8) == pytest.approx(8 * batch / model.profile.latency_s(batch))
    impossible = dataclasses.replace(model, slo_s=0.001)
    assert capacity_rps([model, impossible], [0.5, 0.5], 8) == 0


@pytest.mark.parametrize("shape", [0.1, 0.3, 1.0])
def test_gamma_arrivals_have_their_rate_and_shape(shape: float) -> None:
    found = []
    for seed in range(8):
        drawn = arrivals([1000.0], 20.0, seed, gamma(shape))
        gaps = np.diff(drawn.times_s)
        found.append((len(drawn.times_s) / 20.0, gaps.var() / gaps.mean() ** 2))
    rates, scvs = np.array(found).T
    # 8 runs of 20,000 gaps: the count's variance is n / shape; the SCV's own spread is taken from the runs.
    assert rates.mean() == pytest.approx(1000, abs=4 * np.sqrt(1000 / shape / 20 / 8))
    assert scvs.mean() == pytest.approx(1 / shape, abs=4 * scvs.std(ddof=1) / np.sqrt(8) + 0.01)


def test_one_seed_at_two_rates_is_one_pattern() -> None:
    slow, fast = (arrivals([rate, rate / 2], 100.0, 7, gamma(0.2)) for rate in (60.0, 120.0))
    for model in (0, 1):
        first = slow.times_s[slow.model == model]
        assert fast.times_s[fast.model == model][: len(first)] == pytest.approx(first / 2)
    assert not np.array_equal(arrivals([60.0], 10.0, 8, poisson).times_s[:50], slow.times_s[:50])


def test_merged_arrivals_ascend_and_belong_to_their_models() -> None:
    drawn = arrivals([100.0, 0.0, 300.0], 50.0, 3)
    assert (np.diff(drawn.times_s) >= 0).all()
    assert drawn.times_s[-1] < 50
    counts = np.bincount(drawn.model, minlength=3)
    assert counts[1] == 0
    assert counts[[0, 2]] == pytest.approx([5000, 15000], rel=0.06)


def test_uniform_arrivals_are_evenly_spaced_at_a_phase() -> None:
    drawn = arrivals([4.0], 5.0, 0, uniform)
    assert np.diff(drawn.times_s) == pytest.approx(np.full(len(drawn.times_s) - 1, 0.25))
    assert 0 <= drawn.times_s[0] < 0.25


def test_popularity() -> None:
    assert shares(4) == pytest.approx([0.25] * 4)
    skewed = shares(20, zipf=0.9)
    assert skewed.sum() == pytest.approx(1)
    assert skewed[0] / skewed[9] == pytest.approx(10**0.9)


@pytest.mark.parametrize("rate", [-1.0, float("nan"), float("inf")])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="rate must be"):
        arrivals([rate], 1.0, 0)
    with pytest.raises(ValueError, match="shape must be above 0"):
        gamma(0)


def test_the_sample_covers_every_dimension_evenly() -> None:
    cells = sample(60, 0)
    assert cells == sample(60, 0)
    assert len(cells) >= 58  # twice the same cell counts once
    strata = {(cell.gpu, cell.name) for cell in cells}
    assert len(strata) == 14
    for values in ([cell.shape for cell in cells], [cell.ratio for cell in cells]):
        counts = np.unique(values, return_counts=True)[1]
        assert counts.max() - counts.min() <= 3
    slos = [cell.slo_ms for cell in cells if cell.name != MIXED]
    assert set(slos) == {20, 25, 30, 40, 50}


def test_all_cells_are_feasible_and_mixed_ones_have_the_tables() -> None:
    cells = every()
    assert len(cells) == len(set(cells)) == 2 * (6 * 6 * 7 * 5 * 6 + 7 * 6)
    assert not Cell("1080Ti", "DenseNet121", 8, 1.0, 11, 1.0).is_feasible  # l(1) is 11.4 ms
    mixed = next(cell for cell in cells if cell.name == MIXED and cell.gpu == "A100" and cell.ratio == 1.5)
    assert mixed.models == A100
    assert mixed.replicas == 56
