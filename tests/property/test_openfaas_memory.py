"""Whatever a gateway tells in whatever order, the memory of its functions stays consistent."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keystage.controller.platforms.openfaas_memory import KEPT, Memory, see, state, wanted
from keystage.controller.platforms.openfaas_view import gateway_snapshot
from keystage.openfaas.provider import Kind, limits
from keystage.openfaas.types import FunctionStatus

KINDS: list[Kind] = ["keystage", "openfaas-ce", "openfaas-pro", "faasd", "unknown"]
SIGHTS = st.lists(
    st.tuples(st.floats(0.0, 5.0), st.integers(0, 9), st.integers(0, 9), st.none() | st.integers(0, 9)),
    max_size=30,
)


@given(SIGHTS, st.sampled_from(KINDS))
def test_missing_replicas_are_counted_and_bounds_hold(
    sights: list[tuple[float, int, int, int | None]], kind: Kind
) -> None:
    memory, at_s = Memory(), 1000.0
    for gap_s, replicas, available, stated in sights:
        at_s += gap_s
        if stated is not None:
            memory = state(memory, "f", stated, at_s)
        status = FunctionStatus(name="f", replicas=replicas, availableReplicas=available)
        memory, _ = see(memory, [status], at_s)
        starts = memory.starts["f"]
        assert len(starts.began_s) == max(0, wanted(memory, status, at_s) - available)
        assert list(starts.began_s) == sorted(starts.began_s)
        assert all(took_s >= 0.0 for took_s in starts.took_s)
        assert len(starts.took_s) <= KEPT
        (view,) = gateway_snapshot(at_s, [status], memory, limits(kind), stats={}, unread={}).functions
        assert (view.ready, len(view.starting)) == (available, len(starts.began_s))
        assert all(
            s.expected_ready_s >= s_began for s, s_began in zip(view.starting, starts.began_s, strict=True)
        )
        assert limits(kind).bounded(view.min_replicas) == view.min_replicas
