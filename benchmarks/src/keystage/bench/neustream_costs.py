"""What scheduling costs in `bench neustream`, in real time on one core (NeuStream, section 6.5, Table 2).

Cost of a decision is that of the product's own code alone: queue, `PartialSlo`, `EftfQueue`; set against the
emulated device's busy time for the batches decided on. Nothing is said of what needs a GPU: the time of a
transfer, and of a switch between modules inside the device.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from keystage.batching.api import Request
from keystage.batching.partial_slo import PartialSlo
from keystage.bench.neustream_models import DIT_S2, OPT_13B
from keystage.streams.allocate import allocate
from keystage.streams.eftf import EftfQueue
from keystage.streams.loop_queue import LoopQueue
from keystage.streams.placement import Device, Module

GIB = 2**30


@dataclasses.dataclass(frozen=True, slots=True)
class Costs:
    """Seconds, one sample a round.

    Attributes:
        step_ratio: deciding one denoising step of DiT-S/2 with 20 requests, over that step's 15.8 ms.
        decode_ratio: deciding one decode step of OPT-13B with 32 sessions, over that step's time.
        turn_s: push, pop and end of one batch in the order of a device.
        lookup_s: latency and largest batch from a table of 20 points.
        allocate_s: Algorithm 2 for 7 modules on 8 devices of 8 SPUs.
    """

    step_ratio: list[float]
    decode_ratio: list[float]
    turn_s: list[float]
    lookup_s: list[float]
    allocate_s: list[float]


def measure(rounds: int) -> Costs:
    """Measures each in so many rounds."""
    found = Costs([], [], [], [], [])
    for _ in range(rounds):
        found.step_ratio.append(_decision_s(20, DIT_S2.step.latency_s(20)) / DIT_S2.step.latency_s(20))
        step_s = OPT_13B.decode_time_s(32 * 277)
        found.decode_ratio.append(_decision_s(32, step_s) / step_s)
        found.turn_s.append(_timed(_turns, 2000))
        found.lookup_s.append(_timed(_lookups, 5000))
        found.allocate_s.append(_timed(_allocations, 1))
    return found


def _timed(work: Callable[[int], None], count: int) -> float:
    begun_s = time.perf_counter()
    work(count)
    return (time.perf_counter() - begun_s) / count


def _decision_s(batch: int, step_s: float) -> float:
    """Seconds per step: all its requests come back, the next batch is gathered and put in order."""
    queue = LoopQueue()
    policy = PartialSlo(step_s)
    order: EftfQueue[list[Request]] = EftfQueue([8, 8], 16)
    requests = [Request(number, 0, 0.0, 1e6 + number) for number in range(batch)]
    profile = DIT_S2.step if batch <= DIT_S2.step.most else OPT_13B.decode(277)
    rounds = 500
    begun_s = time.perf_counter()
    now_s = 0.0
    for _ in range(rounds):
        for request in requests:
            request.arrived_s = now_s
            queue.push_back(request)
        candidate = policy.candidate(queue, profile, now_s, now_s)
        assert candidate is not None
        taken = queue.pop_front(batch)
        order.push(0, taken, now_s, step_s)
        turn = order.pop()
        assert turn is not None
        now_s += step_s
        order.ended(turn)
    return (time.perf_counter() - begun_s) / rounds


def _turns(count: int) -> None:
    order: EftfQueue[int] = EftfQueue([2, 2, 4], 8)
    for number in range(count):
        order.push(number % 3, number, float(number), 0.5)
        turn = order.pop()
        assert turn is not None
        order.ended(turn)


def _lookups(count: int) -> None:
    for number in range(count):
        DIT_S2.step.latency_s(1 + number % 20)
        DIT_S2.step.largest_batch(0.009 + 1e-6 * (number % 7000))


def _allocations(count: int) -> None:
    devices = [Device(f"gpu{i}", "gpu", 8, 24 * GIB) for i in range(8)]
    modules = [
        Module(f"module {i}", 0.05 + 0.01 * i, 1.0 + 10 * (i % 3), 2 * GIB, {("gpu", 1): DIT_S2.step})
        for i in range(7)
    ]
    for _ in range(count):
        allocate(modules, devices)
