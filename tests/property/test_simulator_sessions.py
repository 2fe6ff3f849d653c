"""Whatever is asked of a looping pipeline: slots are never exceeded and no session is lost."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from support.simulated_worlds import line, world

from keystage.controller.domain.decision import SetReplicas
from keystage.simulator.api import FailureSpec, LoadSpec, StageSpec
from keystage.simulator.measures import check
from keystage.simulator.platform import SimulatedPlatform

STAGES, SESSIONS = 3, 40
NAMES = [f"p-stage-{k}" for k in range(STAGES)]

scalings = st.builds(SetReplicas, st.sampled_from(NAMES), st.integers(0, 4))
failures = st.builds(FailureSpec, at_s=st.floats(0, 6), function=st.sampled_from(NAMES))


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.lists(scalings, max_size=4), min_size=1, max_size=20),
    st.lists(failures, max_size=5),
    st.integers(1, 4),
    st.sampled_from([0.0, 0.3]),
    st.floats(1, 50),
    st.integers(0, 9),
)
def test_slots_hold_and_no_session_is_lost(
    decisions: list[list[SetReplicas]],
    faults: list[FailureSpec],
    slots: int,
    start_s: float,
    rate_rps: float,
    seed: int,
) -> None:
    stages = [StageSpec(alpha_s=0.004, beta_s=0.02, most=3, scv=0.5, replicas=2)] * STAGES
    spec = line(*stages, rate_rps=rate_rps, count=SESSIONS, execution="looping", slots=slots, steps=12.0)
    w = world(spec, load=LoadSpec(fixed_s=start_s), failures=tuple(faults), hop_s=0.001)
    platform = SimulatedPlatform(w, seed)
    for tick, asked in enumerate(decisions):
        platform.apply(asked)
        platform.advance((tick + 1) * 0.3)
        for stage in platform.observe().pipelines[0].stages:
            assert all(0 <= (worker.held_slots or 0) <= slots for worker in stage.workers)
        check(platform.outcome())
    platform.apply([SetReplicas(name, 1) for name in NAMES])
    platform.advance(1e6)
    check(platform.outcome())
    assert platform.is_served
    entry = platform.observe().pipelines[0].stages[0].routers[0].counters
    assert (entry.arrivals, entry.services, entry.queue, entry.in_flight) == (SESSIONS, SESSIONS, 0, 0)
    held = [worker.held_slots for stage in platform.observe().pipelines[0].stages for worker in stage.workers]
    assert not any(held)
