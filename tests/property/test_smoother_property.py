"""The smoother never raises anything, keeps its bounds, and answers whatever it is given."""

from __future__ import annotations

import math

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from keystage.controller.domain.snapshot import BatchProfile, FunctionView, PipelineView, Slo, StageView
from keystage.controller.maths.estimator import Estimates
from keystage.controller.maths.qna import Station, propagate
from keystage.controller.policy.plan import Plan
from keystage.controller.policy.settings import PolicySettings
from keystage.controller.policy.smoother import KEY_RATIO, predicted_scv, smooth, weight

RATES = st.one_of(st.none(), st.sampled_from([0.0, math.nan, math.inf, -1.0, 1e300]), st.floats(0.01, 1e4))
NUMBERS = st.one_of(st.sampled_from([math.nan, math.inf, -1.0, 0.0, 1e300]), st.floats(0, 100))
SANE = st.floats(0.05, 50)
BATCHES = st.one_of(st.none(), st.builds(BatchProfile, st.floats(0, 1), st.floats(0, 1), st.integers(1, 32)))


@st.composite
def pipelines(draw, numbers=NUMBERS, rates=RATES):
    count = draw(st.integers(0, 8))
    order = draw(st.permutations(range(count)))
    stages, plans = [], []
    for k in range(count):
        wanted = draw(st.integers(0, 40))
        scale = FunctionView(
            function=f"s{k}", desired=wanted, ready=wanted, min_replicas=draw(st.integers(0, 3))
        )
        known = Estimates(
            arrival_rps=draw(rates),
            arrival_slow_rps=draw(rates),
            arrival_scv=draw(numbers),
            service_s=draw(rates),
            service_scv=draw(numbers),
            capacity_rps=draw(rates),
            queue=draw(st.floats(0, 1e6)),
            rows_rps=draw(rates),
            samples=draw(st.sampled_from([0.0, 100.0])),
        )
        stages.append(StageView(stage=k, scale=scale, batch=draw(BATCHES)))
        plans.append(
            Plan(
                scale=scale,
                wanted=wanted,
                corrected=draw(st.integers(0, wanted)),
                reason="",
                is_stage=True,
                stage=k,
                rank=order[k],
                known=known,
                share_s=draw(rates),
                trim=draw(st.one_of(st.just(math.nan), st.floats(-2, 2))),
            )
        )
    view = PipelineView(pipeline="p", execution="single-pass", slo=Slo(), stages=tuple(stages))
    return view, plans


@settings(max_examples=100, deadline=None)
@given(
    st.one_of(pipelines(), pipelines(numbers=SANE, rates=SANE)), st.sampled_from(["qna", "attention", "off"])
)
def test_it_only_reclaims_whatever_it_is_given(drawn, smoothing):
    view, plans = drawn
    chosen = PolicySettings(smoothing=smoothing)
    after = smooth(chosen, view, plans)
    assert len(after) == len(plans)
    keys = math.ceil(KEY_RATIO * len(plans))
    for before, now in zip(plans, after, strict=True):
        assert now.wanted <= before.wanted
        assert now.wanted == before.wanted or now.wanted >= max(1, before.lowest)
        assert before.rank >= keys or now.wanted == before.wanted
        assert now.wanted == before.wanted or now.wanted > before.corrected
        assert now.cv is None or (math.isfinite(now.cv) and now.cv >= 0)
        assert msgspec.structs.replace(now, wanted=before.wanted, cv=None, reason="") == before or (
            now.wanted < before.wanted
        )


@settings(max_examples=60, deadline=None)
@given(pipelines(numbers=SANE, rates=SANE))
def test_capacity_stays_above_the_least_of_the_chain(drawn):
    """No stage falls below the least head-room there was: reclaiming never makes a new bottleneck."""
    view, plans = drawn
    plans = [msgspec.structs.replace(p, wanted=max(1, p.wanted), trim=0.0) for p in plans]
    stages = tuple(msgspec.structs.replace(s, batch=None) for s in view.stages)
    view = msgspec.structs.replace(view, stages=stages)
    after = smooth(PolicySettings(), view, plans)
    rooms = [p.wanted * (p.known.capacity_rps or 0) for p in plans]
    for now in after:
        assert now.wanted * (now.known.capacity_rps or 0) >= min(rooms) * (1 - 1e-6)


@settings(max_examples=60, deadline=None)
@given(
    pipelines(numbers=SANE, rates=SANE),
    st.floats(0.01, 50),
    st.floats(1.0, 10),
    st.sampled_from(["qna", "attention"]),
)
def test_weight_is_monotone_and_predictions_are_finite(drawn, scv, factor, smoothing):
    view, plans = drawn
    assert 0 <= weight(scv) <= weight(scv * factor) <= 1
    for value in predicted_scv(PolicySettings(smoothing=smoothing), view, plans):
        assert value is not None
        assert math.isfinite(value)
        assert value > 0


@settings(max_examples=100, deadline=None)
@given(
    st.floats(0, 1e4),
    st.lists(
        st.builds(
            Station,
            st.floats(0, 3),
            st.integers(1, 1000).map(float),
            st.floats(0, 1e4),
            st.integers(1, 256).map(float),
            st.floats(0, 1),
        ),
        max_size=10,
    ),
)
def test_propagation_is_total(scv, stations):
    found = propagate(scv, stations)
    assert len(found) == len(stations)
    assert all(math.isfinite(v) and v > 0 for v in found)
