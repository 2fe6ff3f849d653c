"""Which path a new session is given: the freest workers, but no new path for a slot's difference."""

from __future__ import annotations

from keystage.router.fleet import Fleet
from keystage.wire import api


def _fleet(**workers: tuple[int, int]) -> Fleet:
    """Two stages; worker name -> (stage, held slots) of 8."""
    fleet = Fleet(2, "p")
    for name, (stage, held) in workers.items():
        hello = api.Hello(
            api.WIRE_VERSION, "p", (stage,), name, "b", "cpu", 8, 1000, 8, name, 1, "node", True
        )  # fmt: skip
        fleet.hello(name, hello, 0.0)
        fleet.credit(name, api.Credit(name, 8, 1000))
        fleet.ready(name, 0.0)
        fleet.workers[name].held_slots = held
    return fleet


def test_a_known_path_wins_over_a_slot_more() -> None:
    fleet = _fleet(a1=(0, 1), a2=(0, 2), b1=(1, 2), b2=(1, 1))
    assert fleet.choose_path(1) == ("a1", "b2")
    assert fleet.choose_path(1, [("a1", "b1"), ("a2", "b2")]) == ("a1", "b1")


def test_two_slots_more_win_over_a_known_path() -> None:
    fleet = _fleet(a1=(0, 1), a2=(0, 2), b1=(1, 3), b2=(1, 1))
    assert fleet.choose_path(1, [("a1", "b1"), ("a2", "b2")]) == ("a1", "b2")


def test_sessions_come_and_go_over_as_many_paths_as_replicas() -> None:
    fleet = _fleet(a1=(0, 0), a2=(0, 0), b1=(1, 0), b2=(1, 0))
    paths: list[tuple[str, ...]] = []
    held: list[tuple[str, ...]] = []
    for step in range(60):
        chosen = fleet.choose_path(1, paths)
        assert chosen is not None
        if chosen not in paths:
            paths.append(chosen)
        fleet.hold(chosen, 1)
        held.append(chosen)
        if len(held) > 9:  # an early one and a late one end, in turn
            fleet.give_back(held.pop(0 if step % 2 else 7), 1)
    assert len(paths) == 2
