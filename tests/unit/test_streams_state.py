"""What modules keep of requests, and that it goes."""

from __future__ import annotations

import pytest

from keystage.streams.state import StateError, StateStore


class _Slot:
    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


def test_get_put_delete_by_request_and_key() -> None:
    store = StateStore()
    store.put(1, "a", 10)
    store.put(1, "b", 20)
    store.put(2, "a", 30)
    assert (store.get(1, "a"), store.get(2, "a"), store.get(2, "b"), store.get(3, "a", 0)) == (
        10,
        30,
        None,
        0,
    )
    assert (store.delete(1, "a"), store.delete(1, "a"), store.delete(9, "a")) == (True, False, False)
    assert (len(store), store.requests) == (2, [1, 2])
    assert (store.evict(1), store.evict(1)) == (1, 0)
    assert store.requests == [2]


def test_a_request_of_which_nothing_is_left_is_not_listed() -> None:
    store = StateStore()
    store.put(1, "a", 10)
    assert store.delete(1, "a")
    assert (store.requests, len(store)) == ([], 0)


def test_values_that_hold_something_are_closed_once() -> None:
    store, slots = StateStore(), [_Slot() for _ in range(4)]
    store.put(1, "replaced", slots[0])
    store.put(1, "replaced", slots[1])
    store.put(1, "deleted", slots[2])
    store.delete(1, "deleted")
    store.put(1, "kept", slots[3])
    store.put(1, "kept", slots[3])
    assert [slot.closed for slot in slots] == [1, 0, 1, 0]
    store.evict(1)
    assert [slot.closed for slot in slots] == [1, 1, 1, 1]


def test_a_module_that_did_not_say_so_keeps_no_state() -> None:
    store = StateStore("Denoiser", is_allowed=False)
    with pytest.raises(StateError, match="Denoiser puts state 'x': it must say is_stateful = True"):
        store.put(1, "x", 0)
    assert store.get(1, "x") is None
