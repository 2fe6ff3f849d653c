"""A diffusion program on one emulated device: batches per module, or per request. For `bench neustream`.

Before it: a cell (model, rate, CV, objective, seed). After it: how many requests were in time. Ours runs the
product's own code on an emulated device: a `RequestQueue` and a `PartialSlo` a module, an `EftfQueue` for the
device, `SharedDevice` for time passing. The rivals batch whole requests: `clockwork` those of equal steps
(`keystage.batching.rivals`, on `bench.batching_cluster`), `padded` any, each batch as long as its longest.
"""

from __future__ import annotations

import bisect
import dataclasses
import math

import numpy as np
from numpy.typing import NDArray

from keystage.batching.api import Request
from keystage.batching.partial_slo import PartialSlo
from keystage.batching.queue import RequestQueue
from keystage.batching.rivals.clockwork import ClockworkScheduler
from keystage.bench.batching_arrivals import Arrivals
from keystage.bench.batching_cluster import serve
from keystage.bench.batching_models import Model
from keystage.bench.neustream_models import Diffusion
from keystage.loadgen.arrivals import stream, synthetic
from keystage.streams.eftf import EftfQueue, Turn
from keystage.streams.interpolate import TableProfile
from keystage.streams.loop_queue import LoopQueue
from keystage.streams.shared_device import SharedDevice

WARM_RATIO = 0.05
"""Of a run's requests so many come before those that count."""
_STEP_STREAM = 77
_DEVICE_SPUS = 16


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """What comes.

    Attributes:
        rate_rps: mean arrival rate.
        cv: coefficient of variation of the gaps, gamma.
        scale: objective as a multiple of a request's time alone.
        requests: how many come.
        seed: of arrivals and steps.
        is_fixed: every request has the mean number of steps.
    """

    rate_rps: float
    cv: float
    scale: float
    requests: int
    seed: int
    is_fixed: bool = False

    def drawn(self, model: Diffusion) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Arrival times and steps [requests]."""
        times_s = synthetic(self.rate_rps, self.cv, self.requests / self.rate_rps, self.seed)
        low, high = model.steps
        if self.is_fixed:
            return times_s, np.full(len(times_s), (low + high) // 2)
        return times_s, stream(self.seed, _STEP_STREAM).randint(low, high + 1, len(times_s)).astype(np.int64)


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What became of the requests that count.

    Attributes:
        offered: how many came.
        good: how many were in time.
        seconds: length of the window in which they came.
        mean_batch: requests in a batch of the step module (or of whole requests), mean over batches.
        decisions: batches formed.
    """

    offered: int
    good: int
    seconds: float
    mean_batch: float
    decisions: int

    @property
    def goodput_rps(self) -> float:
        """Good requests a second."""
        return self.good / self.seconds


@dataclasses.dataclass(frozen=True, slots=True)
class Effort:
    """What is tuned of ours.

    Attributes:
        step_limit: largest batch of a step; its partial SLO is that batch's time.
        admit_batch: batch at whose speed a newcomer must be able to end in time, or it is not begun.
    """

    step_limit: int
    admit_batch: int


class Visit(Request):
    """A request on its way through the program.

    Attributes:
        end_s: when it must have left the program.
        left: steps still to be done.
    """

    __slots__ = ("end_s", "left")

    def __init__(self, number: int, arrived_s: float, end_s: float, left: int) -> None:
        super().__init__(number, 0, arrived_s, end_s)
        self.end_s = end_s
        self.left = left


@dataclasses.dataclass(slots=True)
class _Stage:
    """One module: its profile, its policy, what waits."""

    profile: TableProfile
    policy: PartialSlo
    rest_s: float
    queue: RequestQueue


class Program:
    """Text encoder (where there is one), denoising loop, decoder, on one device."""

    def __init__(self, model: Diffusion, effort: Effort) -> None:
        step_s = model.step.latency_s(effort.step_limit)
        decode_s = model.decoder.latency_s(1)
        self._step_s = model.step.latency_s(1)
        self._admit_s = model.step.latency_s(effort.admit_batch)
        self._loop = LoopQueue()
        self._stages = [
            _Stage(model.step, PartialSlo(step_s), decode_s, self._loop),
            _Stage(model.decoder, PartialSlo(), 0.0, RequestQueue()),
        ]
        if model.text is not None:
            self._stages.append(_Stage(model.text, PartialSlo(), decode_s, RequestQueue()))
        # The loop has half of the device, what is around it shares the rest: its few batches are short and
        # each stands between a request and its end, or its first step.
        around = len(self._stages) - 1
        self._spus = [_DEVICE_SPUS // 2, *[_DEVICE_SPUS // 2 // around] * around]
        self._eftf: EftfQueue[list[Visit]] = EftfQueue(self._spus, _DEVICE_SPUS)
        self._device = SharedDevice()
        self._turns: dict[int, Turn[list[Visit]]] = {}
        self.ended: list[tuple[Visit, float]] = []
        self.step_batches = self.step_items = self.decisions = 0

    def enter(self, visit: Visit, now_s: float) -> None:
        """A request comes."""
        if len(self._stages) > 2:
            visit.deadline_s = visit.end_s - self._stages[2].rest_s - visit.left * self._admit_s
            self._stages[2].queue.push(visit)
        else:
            self._begin(visit, now_s)
        self._form(now_s)

    def next_end_s(self) -> float:
        """When the next batch ends."""
        return self._device.next_end_s()

    def end_next(self) -> None:
        """It ends: its requests move on."""
        now_s = self._device.next_end_s()
        turn = self._turns.pop(self._device.end_next())
        self._eftf.ended(turn)
        for visit in turn.batch:
            if turn.module == 1:
                self.ended.append((visit, now_s))
            elif turn.module == 2:
                self._begin(visit, now_s)
            else:
                self._went_through(visit, now_s)
        self._form(now_s)

    def _begin(self, visit: Visit, now_s: float) -> None:
        """A request comes to its loop: begun only if all its steps can be made at the speed reckoned with."""
        visit.arrived_s = now_s
        visit.deadline_s = visit.end_s - self._stages[0].rest_s - (visit.left - 1) * self._admit_s
        self._loop.push(visit)

    def _went_through(self, visit: Visit, now_s: float) -> None:
        """A step is done: the next, as long as the rest can be made at all, or the decoder."""
        visit.left -= 1
        visit.arrived_s = now_s
        if visit.left:
            visit.deadline_s = visit.end_s - self._stages[0].rest_s - (visit.left - 1) * self._step_s
            self._loop.push_back(visit)
        else:
            visit.deadline_s = visit.end_s
            self._stages[1].queue.push(visit)

    def _form(self, now_s: float) -> None:
        for module, stage in enumerate(self._stages):
            if not len(stage.queue) or self._eftf.is_running(module) or self._eftf.waiting(module):
                continue
            candidate = stage.policy.candidate(stage.queue, stage.profile, now_s, now_s)
            stage.queue.take_given_up()
            if candidate is None:
                continue
            batch = stage.queue.pop_front(candidate.size)
            self.decisions += 1
            if module == 0:
                self.step_batches += 1
                self.step_items += len(batch)
            visits = [one for one in batch if isinstance(one, Visit)]
            self._eftf.push(module, visits, now_s, stage.profile.latency_s(len(batch)))
        while (turn := self._eftf.pop()) is not None:
            self._turns[turn.number] = turn
            self._device.start(turn.number, self._spus[turn.module], turn.whole_s, now_s, turn.finish_s)


def modules(model: Diffusion, load: Load, effort: Effort) -> Outcome:
    """Ours: batches of steps."""
    times_s, steps = load.drawn(model)
    program = Program(model, effort)
    visits = [
        Visit(number, float(at_s), float(at_s) + load.scale * model.alone_s(int(left)), int(left))
        for number, (at_s, left) in enumerate(zip(times_s, steps, strict=True))
    ]
    for visit in visits:
        while program.next_end_s() <= visit.arrived_s:
            program.end_next()
        program.enter(visit, visit.arrived_s)
    while program.next_end_s() < math.inf:
        program.end_next()
    warm = int(WARM_RATIO * len(visits))
    good = sum(1 for visit, at_s in program.ended if visit.number >= warm and at_s <= visit.end_s + 1e-9)
    return Outcome(
        len(visits) - warm,
        good,
        float(times_s[-1] - times_s[warm]),
        program.step_items / max(1, program.step_batches),
        program.decisions,
    )


def clockwork(model: Diffusion, load: Load, most: int, margin_ratio: float) -> Outcome:
    """Request-level batching: whole requests, only those of equal steps together.

    Args:
        model: the program.
        load: what comes.
        most: largest batch (tuned).
        margin_ratio: of each objective that is kept in hand (tuned).
    """
    times_s, steps = load.drawn(model)
    kinds = sorted({int(count) for count in steps})
    models = [
        Model(
            f"{count} steps",
            _capped(model.whole(count), most),
            load.scale * model.alone_s(count) * (1 - margin_ratio),
        )
        for count in kinds
    ]
    numbers = np.asarray([bisect.bisect_left(kinds, int(count)) for count in steps], dtype=np.int32)
    warm = int(WARM_RATIO * len(times_s))
    seconds = float(times_s[-1])
    served = serve(
        lambda: ClockworkScheduler([one.profile for one in models]),
        models,
        Arrivals(times_s, numbers),
        1,
        seconds=math.nextafter(seconds, math.inf),
        warm_s=float(times_s[warm]),
    )
    batches = sum(sum(sizes.values()) for sizes in served.batches)
    items = sum(size * count for sizes in served.batches for size, count in sizes.items())
    window_s = seconds - float(times_s[warm])
    return Outcome(
        int(served.offered.sum()), int(served.good.sum()), window_s, items / max(1, batches), batches
    )


def padded(model: Diffusion, load: Load, most: int, margin_ratio: float) -> Outcome:
    """Request-level batching of any requests: all stay till the longest of the batch is done.

    Args:
        model: the program.
        load: what comes.
        most: largest batch (tuned).
        margin_ratio: of each objective that is kept in hand (tuned).
    """
    times_s, steps = load.drawn(model)
    profiles = {count: _capped(model.whole(count), most) for count in {int(count) for count in steps}}
    warm = int(WARM_RATIO * len(times_s))
    waiting: list[tuple[float, int, int]] = []
    good = batches = items = coming = 0
    free_s = 0.0
    while coming < len(times_s) or waiting:
        now_s = max(free_s, float(times_s[coming])) if not waiting else free_s
        while coming < len(times_s) and times_s[coming] <= now_s:
            count = int(steps[coming])
            objective_s = load.scale * model.alone_s(count) * (1 - margin_ratio)
            bisect.insort(waiting, (float(times_s[coming]) + objective_s, coming, count))
            coming += 1
        batch = _padded_batch(waiting, profiles, now_s)
        if not batch:
            continue
        free_s = now_s + profiles[max(count for _, _, count in batch)].latency_s(len(batch))
        good += sum(1 for due_s, number, _ in batch if number >= warm and free_s <= due_s + 1e-9)
        batches += 1
        items += len(batch)
    seconds = float(times_s[-1] - times_s[warm])
    return Outcome(len(times_s) - warm, good, seconds, items / max(1, batches), batches)


def _padded_batch(
    waiting: list[tuple[float, int, int]], profiles: dict[int, TableProfile], now_s: float
) -> list[tuple[float, int, int]]:
    """From the earliest deadline on while all are in time; takes these, and what is hopeless, out."""
    while waiting and waiting[0][0] < now_s + profiles[waiting[0][2]].latency_s(1) - 1e-12:
        del waiting[0]
    size, longest = 0, 0
    while size < len(waiting):
        with_next = max(longest, waiting[size][2])
        profile = profiles[with_next]
        if size + 1 > profile.most or now_s + profile.latency_s(size + 1) > waiting[0][0] + 1e-12:
            break
        size, longest = size + 1, with_next
    batch = waiting[:size]
    del waiting[:size]
    return batch


def _capped(profile: TableProfile, most: int) -> TableProfile:
    if most >= profile.most:
        return profile
    return dataclasses.replace(
        profile, most=most, batches=profile.batches[:most], seconds=profile.seconds[:most]
    )
