"""Which requests of a loop go on together, which join, and which are given up."""

from __future__ import annotations

from collections import Counter

from keystage.batching.profile import LatencyProfile
from keystage.router.turn_rounds import Rounds
from keystage.router.turns import Call, Parcel, Turn
from keystage.streams.flow import RequestFlow, Work
from keystage.streams.graph import Graph, ModuleSpec, Routes, StreamSpec
from keystage.wire.api import StreamMessage

IN, AGAIN, OUT = (StreamSpec(name, "tensors") for name in ("in", "again", "out"))
ROUTES = Routes(Graph(IN, OUT, (ModuleSpec("loop", (IN, AGAIN), (AGAIN, OUT)),)))


def turn(number: int, left_s: float, visits: int, *, begun: bool, late: bool = False) -> Turn:
    flow: RequestFlow[Parcel] = RequestFlow(ROUTES)
    flow.executed.update(Counter(loop=int(begun)))
    call = Call(number, StreamMessage("in"), 0.0, 99.0, left_s, flow)
    made = Turn(
        number, call, 0, Work("loop", (("in", Parcel(StreamMessage("in", visits=visits))),)), left_s, 0.0
    )
    made.is_late = late
    return made


def chosen(*turns: Turn, most: int = 8, ratio: float = 1.0) -> tuple[set[int], set[int]]:
    """With l(b) = b + 9 seconds."""
    batch, given_up = Rounds(LatencyProfile(1.0, 9.0, most), ratio, 0.0, 0.0).next_batch(turns)
    return {t.number for t in batch}, {t.number for t in given_up}


def test_all_of_the_loop_go_on_and_newcomers_fill_up_what_is_quick_enough() -> None:
    begun = [turn(i, 120.0, 10, begun=True) for i in range(2)]  # 12 s a round: batches of 3
    newcomers = [turn(10 + i, 130.0, 10, begun=False) for i in range(3)]
    assert chosen(*begun, *newcomers) == ({0, 1, 10}, set())
    assert chosen(*begun, *newcomers, ratio=1.05) == ({0, 1}, set())  # other modules take their time


def test_a_newcomer_s_own_share_bounds_the_batch() -> None:
    begun = [turn(i, 500.0, 10, begun=True) for i in range(4)]
    assert chosen(*begun, turn(9, 130.0, 10, begun=False)) == ({0, 1, 2, 3}, set())
    assert chosen(*begun, turn(9, 140.0, 10, begun=False)) == ({0, 1, 2, 3, 9}, set())


def test_who_could_only_begin_as_one_of_fewer_than_when_it_came_is_given_up() -> None:
    newcomer = turn(1, 130.0, 10, begun=False)
    newcomer.pace_s = 13.5
    assert chosen(newcomer) == (set(), {1})
    newcomer.pace_s = 12.5
    assert chosen(newcomer) == ({1}, set())


def test_who_could_not_even_begin_alone_at_the_pace_of_the_loop_is_given_up() -> None:
    # Neither begun nor given up it would wait beside an idle worker, and the late ones behind it.
    assert chosen(turn(1, 105.0, 10, begun=False), ratio=1.1) == (set(), {1})


def test_hopeless_ones_are_given_up_wherever_they_are() -> None:
    assert chosen(turn(1, 99.0, 10, begun=True), turn(2, 99.0, 10, begun=False)) == (set(), {1, 2})


def test_the_tightest_is_carried_while_the_others_can_spare_its_rounds() -> None:
    others = [turn(i, 400.0, 10, begun=True) for i in range(3)]
    # A round of 11 s is one of two: those with least to spare.
    assert chosen(*others, turn(9, 22.0, 2, begun=True)) == ({2, 9}, set())
    batch, given_up = chosen(*others, turn(9, 110.0, 10, begun=True))
    assert (9 in batch, given_up) == (True, set())
    poor = [turn(i, 125.0, 10, begun=True) for i in range(3)]
    assert chosen(*poor, turn(9, 104.0, 10, begun=True)) == ({0, 1, 2}, {9})


def test_late_ones_run_when_nobody_is_in_time() -> None:
    late = turn(1, -5.0, 10, begun=True, late=True)
    assert chosen(late) == ({1}, set())
    assert chosen(late, turn(2, 200.0, 10, begun=False)) == ({2}, set())


def test_no_more_than_a_batch() -> None:
    batch, given_up = chosen(*(turn(i, 900.0, 10, begun=True) for i in range(12)), most=4)
    assert (len(batch), given_up) == (4, set())
