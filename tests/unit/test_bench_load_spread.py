"""How `keystage bench load --gpus` spreads parameters from one GPU to others: order, figures, refusals."""

from __future__ import annotations

import pytest

from keystage.bench.frame import BenchError
from keystage.bench.load import run
from keystage.bench.load_spread import Spread, figures, rounds_of


@pytest.mark.parametrize("gpus", range(1, 17))
def test_a_tree_reaches_every_gpu_once_and_nobody_gives_twice_in_a_round(gpus: int) -> None:
    having = 1
    for at_once in rounds_of(gpus):
        assert 0 < len(at_once) <= having
        having += len(at_once)
    assert sorted(index for at_once in rounds_of(gpus) for index in at_once) == list(range(1, gpus))
    assert len(rounds_of(gpus)) == (gpus - 1).bit_length()


def test_figures_are_of_all_copies_together() -> None:
    chain = Spread("chain", [0.7, 0.8], [200.0] * 14, 5 * 10**9, 7)
    tree = Spread("tree", [0.35, 0.4], [180.0] * 14, 5 * 10**9, 7)
    found = {name: figure.median for name, figure in figures([chain, tree]).items()}
    assert found["spread_speedup"] == pytest.approx(2.0)
    assert found["spread_tree_gbps"] == pytest.approx((100.0 + 87.5) / 2)
    assert tree.row()["gbps"] == "180.0"


def test_more_gpus_than_there_are_is_refused_before_anything_starts() -> None:
    with pytest.raises(BenchError, match="--gpus 8: this machine shows 0"):
        run(gpus=8, device="cpu")
