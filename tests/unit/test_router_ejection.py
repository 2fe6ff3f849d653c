"""Time lines of replicas that compute at different paces: who rests, how long, and who never does."""

from __future__ import annotations

import msgspec

from keystage.router.ejection import MOST_REST_S, REST_S, SETTLE_S, Ejection
from keystage.router.fleet import Fleet
from keystage.wire import api


class Paces:
    """A stage whose replicas compute batches at their own pace."""

    def __init__(
        self,
        paces_s: dict[str, float],
        factor: float = 3.0,
        rows: dict[str, int] | None = None,
        tokens: dict[str, int] | None = None,
    ) -> None:
        self.tokens = tokens
        self.fleet = Fleet(1, "p")
        self.paces_s = paces_s
        self.rows = rows or {}
        self.sums = {name: [0.0, 0, 0] for name in paces_s}
        self.ejection = Ejection(self.fleet, factor)
        self.now_s = 0.0
        self.events: list[tuple[float, str, str]] = []
        for name in paces_s:
            hello = api.Hello(2, "p", (0,), name, "b", "cpu", 4, 100, 8, name, 1, "n", True)
            self.fleet.hello(name, hello, 0.0)
            self.fleet.credit(name, api.Credit(name, 4, 100))
            self.fleet.ready(name, 0.0)

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now_s += 1.0
            for name, worker in self.fleet.workers.items():
                sums = self.sums[name]
                if not worker.is_resting:
                    batches = int(1.0 / self.paces_s[name])
                    sums[0] += batches * self.paces_s[name]
                    sums[1] += batches
                    sums[2] += batches * self.rows.get(name, 4)
                beat = api.Heartbeat(name, "ready", 0, 0, [sums[0]], [int(sums[1])], [int(sums[2])])
                if self.tokens is not None:  # those of a row
                    each = self.tokens.get(name, 1)
                    beat = msgspec.structs.replace(beat, tokens=[int(sums[2]) * each])
                self.ejection.beat(name, beat, self.now_s)
            out, back = self.ejection.judge(self.now_s)
            self.events += [(self.now_s, "out", name) for name, _ in out]
            self.events += [(self.now_s, "back", name) for name in back]

    @property
    def resting(self) -> set[str]:
        return {name for name, worker in self.fleet.workers.items() if worker.is_resting}


def test_one_that_is_three_times_as_slow_rests_and_takes_nothing_new() -> None:
    paces = Paces({"a": 0.02, "b": 0.021, "c": 0.08})
    paces.run(12)
    assert paces.resting == {"c"}
    assert paces.events[0][0] > SETTLE_S
    assert paces.fleet.workers["c"].free_slots == 0
    assert paces.fleet.choose_path(1) == ("a",)
    assert paces.ejection.rested == 1


def test_it_is_tried_again_and_rests_longer_if_it_is_slow_still() -> None:
    paces = Paces({"a": 0.02, "b": 0.02, "c": 0.08})
    paces.run(120)
    times = [at_s for at_s, kind, _ in paces.events]
    kinds = [kind for _, kind, _ in paces.events]
    assert kinds[:4] == ["out", "back", "out", "back"]
    assert times[1] - times[0] == REST_S
    assert times[3] - times[2] == 2 * REST_S
    paces.run(2000)
    longest_s = max(
        b - a
        for (a, kind, _), (b, _, _) in zip(paces.events, paces.events[1:], strict=False)
        if kind == "out"
    )
    assert longest_s == MOST_REST_S


def test_one_that_has_become_fast_stays() -> None:
    paces = Paces({"a": 0.02, "b": 0.02, "c": 0.08})
    paces.run(12)
    paces.paces_s["c"] = 0.02
    paces.run(200)
    assert paces.resting == set()
    assert [kind for _, kind, _ in paces.events] == ["out", "back"]


def test_the_last_one_and_more_than_half_never_rest() -> None:
    alone = Paces({"a": 0.2})
    alone.run(60)
    assert alone.events == []
    two = Paces({"a": 0.02, "b": 0.2})
    two.run(20)
    assert two.resting == {"b"}
    two.paces_s["a"] = 2.0
    two.run(10)
    assert two.resting == {"b"}
    four = Paces({"a": 0.01, "b": 0.01, "c": 0.1, "d": 0.1, "e": 0.01})
    four.run(25)
    assert four.resting == {"c", "d"}


def test_larger_batches_and_smaller_ones_are_no_slowness() -> None:
    """20 ms a batch and 5 ms a row: 32 rows take 180 ms, 1 row 25 ms."""
    rows = {"a": 32, "b": 1, "c": 8}
    paces = Paces({name: 0.02 + 0.005 * count for name, count in rows.items()}, rows=rows)
    paces.run(60)
    assert paces.events == []


def test_one_that_computes_prompts_is_not_slow_beside_one_that_decodes() -> None:
    """Waves of one row with 64 tokens take 80 ms, those of 8 rows with a token each 12 ms."""
    paces = Paces({"a": 0.012, "b": 0.012, "c": 0.08}, rows={"a": 8, "b": 8, "c": 1}, tokens={"c": 64})
    paces.run(60)
    assert paces.events == []
    slow = Paces({"a": 0.012, "b": 0.012, "c": 0.08}, rows={"a": 8, "b": 8, "c": 8}, tokens={})
    slow.run(12)
    assert slow.resting == {"c"}


def test_what_differs_by_less_than_noise_and_what_was_seen_too_rarely_says_nothing() -> None:
    fast = Paces({"a": 0.001, "b": 0.001, "c": 0.004})
    fast.run(60)
    assert fast.events == []
    rare = Paces({"a": 0.9, "b": 0.9, "c": 0.9})
    rare.sums["c"][0] = 1.0
    rare.run(9)
    assert rare.events == []


def test_it_can_be_switched_off() -> None:
    paces = Paces({"a": 0.02, "b": 0.02, "c": 0.2}, factor=0.0)
    paces.run(60)
    assert paces.events == []


def test_a_worker_started_anew_under_its_address_begins_from_nothing() -> None:
    paces = Paces({"a": 0.02, "b": 0.02, "c": 0.02})
    paces.run(20)
    paces.sums["c"] = [0.0, 0, 0]
    paces.run(1)
    assert paces.events == []
    paces.run(20)
    assert paces.events == []


def test_a_worker_that_is_gone_is_forgotten() -> None:
    paces = Paces({"a": 0.02, "b": 0.02, "c": 0.08})
    paces.run(12)
    paces.fleet.remove("c")
    paces.run(60)
    assert [kind for _, kind, _ in paces.events] == ["out"]
