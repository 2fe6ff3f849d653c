"""Replicas that are slow beside their like: which rest for a while, and when they are tried again. Pure.

A worker that hangs is noticed by its silence; one that computes at a third of the pace of the others (a
throttled device, a neighbour on its cores, memory that swaps) answers all it is asked, and whatever passes it
is late. Before it: `node` hands over heartbeats, whose counters grow with the worker's own compute. After it:
the cores give a resting worker nothing new and move away what it has, as from a draining one.

Times are compared per batch, per row and per token, and the smallest of the ratios counts: a replica with
larger batches takes longer for each of them, one with smaller batches for each row, one that computes prompts
for each of both, and none is slow for that.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable
from statistics import median

from keystage.router.fleet import Fleet, Worker
from keystage.wire.api import Heartbeat

WINDOW_S = 10.0
"""What is compared: long enough for some dozen waves, short against how long a user waits."""
LEAST_BATCHES = 20
"""In that time, of the slow one and of those it is compared with; fewer say nothing."""
LEAST_S = 0.005
"""Longer for a batch than the others, in the mean: less is not worth the loss of a replica, and the
noise of the system's scheduler is as large."""
SETTLE_S = 5.0
"""After a start, in which caches are cold."""
REST_S = 30.0
"""The first time; twice as long each time after, up to `MOST_REST_S`."""
MOST_REST_S = 300.0


@dataclasses.dataclass(slots=True)
class _Pace:
    """One worker's counters over the window, by hosted stage."""

    beats: deque[tuple[float, Heartbeat]] = dataclasses.field(default_factory=deque)
    rests: int = 0
    until_s: float = 0.0

    def add(self, beat: Heartbeat, now_s: float) -> None:
        if self.beats and any(map(_fell, self.beats[-1][1].batches, beat.batches)):
            self.beats.clear()  # another process under the same address
        self.beats.append((now_s, beat))
        while self.beats[0][0] < now_s - WINDOW_S:
            self.beats.popleft()

    def per(self, place: int) -> tuple[float, float, float] | None:
        """Seconds of compute per batch, row and token within the window; None: too little was seen."""
        if len(self.beats) < 2:
            return None
        first, last = self.beats[0][1], self.beats[-1][1]
        busy_s = last.busy_s[place] - first.busy_s[place]
        batches, rows, tokens = (
            after[place] - before[place]
            for before, after in (
                (first.batches, last.batches), (first.rows, last.rows), (_tokens(first), _tokens(last)),
            )
        )  # fmt: skip
        if batches < LEAST_BATCHES or not rows or not tokens:
            return None
        return busy_s / batches, busy_s / rows, busy_s / tokens


class Ejection:
    """The paces of all workers, and who rests.

    Args:
        fleet: the workers; `is_resting` of them is set here.
        factor: so many times slower than the median of the others is too slow; 0: nobody is.

    Attributes:
        rested: how often a worker was sent to rest.
    """

    def __init__(self, fleet: Fleet, factor: float) -> None:
        self._fleet = fleet
        self._factor = factor
        self._paces: dict[str, _Pace] = {}
        self.rested = 0

    def beat(self, address: str, beat: Heartbeat, now_s: float) -> None:
        """A worker told its counters."""
        worker = self._fleet.workers.get(address)
        if not self._factor or worker is None or not worker.is_ready or now_s < worker.ready_s + SETTLE_S:
            return
        hosted = len(worker.hello.stages)
        if min(len(beat.busy_s), len(beat.batches), len(beat.rows)) >= hosted:
            self._paces.setdefault(address, _Pace()).add(beat, now_s)

    def judge(self, now_s: float) -> tuple[list[tuple[str, str]], list[str]]:
        """Who is to rest from now on, and why, and who is tried again.

        `is_resting` is set accordingly; the cores are the caller's business.
        """
        for address in [address for address in self._paces if address not in self._fleet.workers]:
            del self._paces[address]
        back: list[str] = []
        for address, pace in self._paces.items():
            worker = self._fleet.workers[address]
            if worker.is_resting and now_s >= pace.until_s:
                worker.is_resting = False
                pace.beats.clear()
                back.append(address)
        out: list[tuple[str, str]] = []
        for address in list(self._paces):
            worker = self._fleet.workers[address]
            if worker.takes_new and (why := self._too_slow(address, worker)) is not None:
                self._rest(address, worker, now_s)
                out.append((address, why))
        return out, back

    # ------------------------------------------------------------ inside

    def _rest(self, address: str, worker: Worker, now_s: float) -> None:
        pace = self._paces[address]
        pace.until_s = now_s + min(MOST_REST_S, REST_S * 2**pace.rests)
        pace.rests += 1
        pace.beats.clear()
        worker.is_resting = True
        self.rested += 1

    def _too_slow(self, address: str, worker: Worker) -> str | None:
        for stage in worker.hello.stages:
            like = [(a, w) for a, w in self._fleet.of_stage(stage) if w.is_ready]
            resting = sum(w.is_resting for _, w in like)
            if any(self._is_last(k) for k in worker.hello.stages) or 2 * (resting + 1) > len(like):
                continue
            mine = self._per(address, worker, stage)
            others = [
                found
                for a, w in like
                if a != address and not w.is_resting and (found := self._per(a, w, stage)) is not None
            ]
            if mine is None or not others:
                continue
            theirs = [median(per[kind] for per in others) for kind in range(3)]
            if min(theirs) <= 0 or mine[0] - theirs[0] < LEAST_S:
                continue
            ratio = min(own / their for own, their in zip(mine, theirs, strict=True))
            if ratio >= self._factor:
                return (
                    f"stage {stage} takes {_ms(mine)} ms a batch, row and token, {len(others)} others "
                    f"{_ms(theirs)}: {ratio:.3g} times or more (the bound is {self._factor:g})"
                )
        return None

    def _is_last(self, stage: int) -> bool:
        """Whether a stage has one worker that takes work, or none."""
        return sum(w.takes_new for _, w in self._fleet.of_stage(stage)) < 2

    def _per(self, address: str, worker: Worker, stage: int) -> tuple[float, float, float] | None:
        """Seconds of compute per batch, row and token of a stage; None: too little was seen."""
        pace = self._paces.get(address)
        return pace.per(worker.hello.stages.index(stage)) if pace is not None else None


def _tokens(beat: Heartbeat) -> list[int]:
    """Those of a worker that does not count them: one a row."""
    return beat.tokens or beat.rows


def _ms(values: Iterable[float]) -> str:
    return ", ".join(f"{1e3 * value:.4g}" for value in values)


def _fell(before: int, now: int) -> bool:
    return now < before
