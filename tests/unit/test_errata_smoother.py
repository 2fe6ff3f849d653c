"""QUART Eq. 4 and Eq. 7 as printed: a parameter that cancels, and a smoothing that raises."""

from __future__ import annotations

import math

import numpy as np
import pytest

from keystage.controller.domain.snapshot import BatchProfile, FunctionView, PipelineView, Slo, StageView
from keystage.controller.maths.attention import FEATURES, FORMAT, Attention, Weights
from keystage.controller.maths.estimator import Estimates
from keystage.controller.policy.plan import Plan
from keystage.controller.policy.settings import PolicySettings
from keystage.controller.policy.smoother import smooth, weight

CVS = np.array([4.0, 2.5, 1.5, 1.1])


def printed_attention(theta: float, similarity: np.ndarray) -> np.ndarray:
    """Eq. 4 for stage i over its neighbours: every term holds theta CV_i, i being the stage itself."""
    own_cv = CVS[1]
    terms = np.exp(similarity + theta * own_cv)
    weights: np.ndarray = terms / terms.sum()
    return weights


def test_equation_4_does_not_depend_on_theta() -> None:
    similarity = np.array([0.3, -0.2])
    for theta in (-2.0, 0.5, 7.0):
        assert printed_attention(theta, similarity) == pytest.approx(printed_attention(0.0, similarity))


def test_equation_4_with_one_neighbour_is_one() -> None:
    assert printed_attention(3.0, np.array([0.9])) == pytest.approx(np.array([1.0]))


def attention(theta: float) -> Attention:
    """Our predictor with small weights drawn once, and the theta asked for."""
    rng = np.random.default_rng(11)
    f, width, hidden = len(FEATURES), 3, 4

    def drawn(*shape: int) -> list[object]:
        values: list[object] = rng.normal(0, 0.5, shape).tolist()
        return values

    return Attention(
        Weights(
            format=FORMAT,
            version="drawn",
            features=FEATURES,
            project=drawn(1, f, width),  # type: ignore[arg-type]
            own=drawn(1, width),  # type: ignore[arg-type]
            other=drawn(1, width),  # type: ignore[arg-type]
            theta=[theta],
            role=drawn(3, 1),  # type: ignore[arg-type]
            mix=drawn(width + f, hidden),  # type: ignore[arg-type]
            mix_bias=drawn(hidden),  # type: ignore[arg-type]
            out=drawn(hidden),  # type: ignore[arg-type]
            out_bias=0.1,
        )
    )


def test_our_theta_counts_because_it_goes_with_the_neighbours_cv() -> None:
    x = np.random.default_rng(5).normal(0, 1, (1, len(CVS), len(FEATURES)))
    without = attention(0.0).correction(x, CVS[None])
    with_theta = attention(1.0).correction(x, CVS[None])
    assert np.abs(with_theta - without)[0, 1:].min() > 1e-6
    same = np.full((1, len(CVS)), 2.0)  # equal CVs everywhere: here theta cancels, and should
    assert attention(1.0).correction(x, same) == pytest.approx(attention(0.0).correction(x, same))


def printed_smoothing(replicas: list[float], beta: float) -> list[float]:
    """Eq. 7: y' = beta y + (1 - beta) mean of the neighbours' y."""
    smoothed = []
    for i, y in enumerate(replicas):
        around = [replicas[j] for j in (i - 1, i + 1) if 0 <= j < len(replicas)]
        smoothed.append(beta * y + (1 - beta) * sum(around) / len(around))
    return smoothed


def test_equation_7_hands_out_replicas_nobody_asked_for() -> None:
    printed = printed_smoothing([2, 8, 2, 2], 0.5)
    assert printed == [5.0, 5.0, 3.5, 2.0]
    assert sum(printed) == 15.5 > 14


def pipeline(replicas: list[int], services_s: list[float], rate: float) -> tuple[PipelineView, list[Plan]]:
    """A chain whose traffic has CV 1 (beta = 1/2), every stage with the replicas given."""
    scales = [FunctionView(function=f"p-stage-{k}", desired=n, ready=n) for k, n in enumerate(replicas)]
    view = PipelineView(
        pipeline="p",
        execution="single-pass",
        slo=Slo(deadline_s=10 * sum(services_s)),
        stages=tuple(
            StageView(stage=k, scale=scale, batch=BatchProfile(s, 0.0, 1))
            for k, (scale, s) in enumerate(zip(scales, services_s, strict=True))
        ),
    )
    plans = [
        Plan(
            scale=scale,
            wanted=scale.ready,
            corrected=math.floor(rate * s) + 1,  # what the load needs
            reason="",
            is_stage=True,
            pipeline="p",
            stage=k,
            rank=len(replicas),  # none is a key stage, so all may be lowered
            share_s=10 * s,
            known=Estimates(
                arrival_rps=rate,
                arrival_slow_rps=rate,
                arrival_scv=1.0,
                service_s=s,
                service_scv=1.0,
                capacity_rps=1 / s,
            ),
        )
        for k, (scale, s) in enumerate(zip(scales, services_s, strict=True))
    ]
    return view, plans


def test_ours_never_raises_and_leaves_what_the_load_needs() -> None:
    rate, services_s = 100.0, [0.01, 0.05, 0.01, 0.01]
    view, plans = pipeline([2, 8, 2, 2], services_s, rate)
    wanted = [p.wanted for p in smooth(PolicySettings(smoothing="qna"), view, plans)]
    assert all(ours <= before for ours, before in zip(wanted, [2, 8, 2, 2], strict=True))
    assert all(n / s > rate for n, s in zip(wanted, services_s, strict=True))
    assert weight(1.0) == 0.5


def test_unequal_stages_are_smoothed_by_head_room_not_by_number() -> None:
    """Eq. 7 would move the slow stage's replicas to stages five times as fast, and leave it overloaded."""
    rate, services_s = 100.0, [0.01, 0.05, 0.01, 0.01]
    printed = printed_smoothing([2, 8, 2, 2], 0.5)
    assert printed[1] / services_s[1] == pytest.approx(rate)  # utilisation 1: its queue grows for ever
    assert printed[0] / services_s[0] == pytest.approx(5 * rate)
    view, plans = pipeline([9, 8, 9, 9], services_s, rate)
    wanted = [p.wanted for p in smooth(PolicySettings(smoothing="qna"), view, plans)]
    assert wanted[1] == 8
    assert wanted[0] < 9
    assert sum(wanted) < 9 + 8 + 9 + 9
