"""The ring's ledger against a plain dict of ranges."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keystage.wire.ring import ALIGN_BYTES, RingLedger

OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(0, 700)), st.tuples(st.just("give back"), st.integers(0, 40))
    ),
    max_size=80,
)


@given(st.integers(ALIGN_BYTES, 2000), OPERATIONS)
def test_ranges_never_overlap_and_no_byte_is_lost(capacity: int, operations: list[tuple[str, int]]) -> None:
    ledger = RingLedger(capacity)
    model: dict[int, tuple[int, int]] = {}
    for kind, value in operations:
        if kind == "take":
            need = max(1, -(-value // ALIGN_BYTES)) * ALIGN_BYTES
            taken = ledger.take(value)
            gaps, end = [], 0
            for start, length in [*sorted(model.values()), (ledger.capacity_bytes, 0)]:
                gaps.append((start - end, end))
                end = start + length
            fits = [offset for length, offset in gaps if length >= need]
            # First fit: coalesced, so room is found whenever a gap of the model has it.
            assert (taken[1] if taken else None) == (min(fits) if fits else None)
            if taken is not None:
                assert taken[0] not in model
                model[taken[0]] = (taken[1], need)
        else:
            assert ledger.give_back(value) == (model.pop(value, None) is not None)
        assert ledger.slots == len(model)
        assert ledger.free_bytes == ledger.capacity_bytes - sum(length for _, length in model.values())
    for slot in list(model):
        ledger.give_back(slot)
    assert ledger.take(ledger.capacity_bytes) is not None
