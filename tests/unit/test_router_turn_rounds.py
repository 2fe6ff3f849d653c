"""Which requests of a loop go on together, which join, and which are given up."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

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


def test_who_waited_may_begin_as_one_of_fewer_than_when_it_came() -> None:
    # 13 s a round would have been a batch of 4; what is left does for one of 3.
    begun = [turn(i, 140.0, 10, begun=True) for i in range(2)]
    assert chosen(*begun, turn(9, 122.0, 10, begun=False)) == ({0, 1, 9}, set())
    # It does not hold those down who are in the loop: it waits, and is not given up before it must be.
    assert chosen(*begun, turn(9, 118.0, 10, begun=False)) == ({0, 1}, set())
    assert chosen(turn(9, 101.0, 10, begun=False)) == ({9}, set())


class GivesUpEarly(Rounds):
    """The rule of before: who could only be begun as one of fewer than when it came is given up."""

    __slots__ = ()

    def _fill(self, batch: list[Turn], newcomers: Sequence[Turn]) -> list[Turn]:
        slow = [t for t in newcomers if self.share_s(t) < max(SHARES[t.number], self.seconds(1))]
        return slow + Rounds._fill(self, batch, [t for t in newcomers if t not in slow])


SHARES: dict[int, float] = {}
"""A round of the largest batch that a request's share allowed when it came."""


def in_time(rounds: type[Rounds], load_ratio: float, scale: float, seed: int) -> float:
    """Part of 200 requests that one worker ends in time; gaps of CV 2, 20 to 50 rounds, unequal deadlines."""
    profile = LatencyProfile(0.005, 0.02, 64)
    rate_rps = load_ratio * 64 / profile.latency_s(64) / 35
    drawn = random.Random(seed)
    arrivals, at_s = [], 0.0
    for number in range(200):
        at_s += drawn.gammavariate(0.25, 4 / rate_rps)
        visits = drawn.randint(20, 50)
        share_s = profile.latency_s(1) * scale * drawn.uniform(0.5, 1.5)
        SHARES[number] = profile.latency_s(max(1, profile.largest_batch(share_s)))
        arrivals.append((at_s, turn(number, at_s + share_s * visits, visits, begun=False)))
    now_s, good, waiting = 0.0, 0, list[Turn]()
    while arrivals or waiting:
        while arrivals and arrivals[0][0] <= now_s:
            waiting.append(arrivals.pop(0)[1])
        if not waiting:
            now_s = arrivals[0][0]
            continue
        batch, given_up = rounds(profile, 1.0, now_s, 0.0).next_batch(waiting)
        assert batch or given_up
        now_s += profile.latency_s(len(batch)) if batch else 0.0
        waiting = [t for t in waiting if t not in batch and t not in given_up]
        for one in batch:
            if one.visits == 1:
                good += now_s <= one.call.due_s
            else:
                waiting.append(turn(one.number, one.call.due_s, one.visits - 1, begun=True))
    return good / 200


@pytest.mark.parametrize(
    ("load_ratio", "scale"), [(0.3, 3.1), (0.7, 2.0), (0.7, 5.0), (1.2, 3.1), (3.0, 5.0)]
)
def test_waiting_ends_more_in_time_than_giving_up_early_at_every_load(
    load_ratio: float, scale: float
) -> None:
    ours, early = (
        [in_time(rounds, load_ratio, scale, seed) for seed in range(3)] for rounds in (Rounds, GivesUpEarly)
    )
    assert sum(ours) > 1.04 * sum(early)
    assert all(ours_ > early_ for ours_, early_ in zip(ours, early, strict=True))


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
