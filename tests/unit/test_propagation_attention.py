"""The learned predictor: numpy says what torch learned, and cannot go far from the formula."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from keystage.controller.maths import attention, qna
from keystage.controller.maths.attention import Attention, Weights
from keystage.controller.maths.attention_weights import SHIPPED
from keystage.controller.maths.qna import Station
from keystage.training import fit as training
from keystage.training.dataset import draw_chain

SHIPPED_WEIGHTS = msgspec.json.decode(SHIPPED, type=Weights)


def chains(count: int) -> tuple[np.ndarray, qna.Chains]:
    random = np.random.default_rng(11)
    drawn = [draw_chain(random, held_out=False) for _ in range(count)]
    return np.exp(random.uniform(-4, 4, count)), qna.chains(drawn)


def test_numpy_and_torch_are_the_same_formula():
    torch = pytest.importorskip("torch")
    weights = {
        name: torch.tensor(getattr(SHIPPED_WEIGHTS, name), dtype=torch.float64)
        for name in ("project", "own", "other", "theta", "role", "mix", "mix_bias", "out", "out_bias")
    }
    entry, many = chains(20)
    flow = qna.flow(entry, many)
    x, cv = attention.features(many, flow), np.sqrt(flow.scv)
    ours = Attention(SHIPPED_WEIGHTS).correction(x, cv)
    theirs = training.correction(weights, torch.tensor(x), torch.tensor(cv)).numpy()
    assert ours[:, 1:] == pytest.approx(theirs[:, 1:], rel=1e-9, abs=1e-12)
    assert (ours[:, 0] == 0).all()
    assert np.abs(ours).max() > 0.01


def test_shipped_weights_were_better_than_the_formula_on_held_out_chains():
    metrics = SHIPPED_WEIGHTS.metrics
    assert metrics is not None
    assert metrics.attention < metrics.qna <= metrics.guess / 2
    assert metrics.held_out >= 40


def test_theta_is_learned():
    assert any(abs(value) > 1e-3 for value in SHIPPED_WEIGHTS.theta)


def test_the_correction_is_bounded_far_outside_the_training():
    wild = [Station(5.0, 1e6, 1e6, 1e6, 1.0), Station(0.0, 1.0, 0.0, 1.0, 0.0), Station(1.0, 3.0)]
    for entry in (0.0, 1.0, 1e4):
        formula = np.array(qna.propagate(entry, wild))
        learned = np.array(attention.propagate(entry, wild))
        assert learned[0] == pytest.approx(formula[0])
        assert (np.abs(np.log(learned / formula)) <= 2 * attention.BOUND + 1e-9).all()


def test_one_chain_and_many_agree():
    entry, many = chains(5)
    whole = attention.shipped().scv(entry, many)
    station = [Station(*row) for row in zip(*(getattr(many, f)[2] for f in Station.__slots__), strict=True)]
    assert attention.propagate(float(entry[2]), station) == pytest.approx(list(whole[2]), rel=1e-9)
    assert attention.propagate(1.0, []) == []


@pytest.mark.parametrize(
    "change", [{"format": 99}, {"features": ("log_cv",)}], ids=["another layout", "other features"]
)
def test_foreign_weights_are_refused(change):
    with pytest.raises(ValueError, match="train again"):
        Attention(msgspec.structs.replace(SHIPPED_WEIGHTS, **change))
