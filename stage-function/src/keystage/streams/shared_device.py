"""The model of a device on which batches run at once: what an emulated executor and tests go by. Pure.

Beside `streams.eftf`, which decides what runs. Batches that run at once share the device's rate in
proportion to their weights (SPUs of their modules); one that runs alone has all of it. With
`strict=True` the batch with the earliest finish time takes the whole rate and the others stand still: how
a GPU with stream priorities behaves when each kernel fills it. Real devices lie between the two.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from keystage.streams.eftf import EftfQueue, Turn


@dataclasses.dataclass(slots=True)
class _Job:
    weight: int
    left_s: float
    urgency: tuple[float, int]


class SharedDevice:
    """Work in progress on one device.

    Args:
        strict: the most urgent batch takes the whole rate, else rates are in proportion to weights.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict
        self._jobs: dict[int, _Job] = {}
        self._now_s = 0.0
        self.busy_s = 0.0

    def __len__(self) -> int:
        """Batches that run."""
        return len(self._jobs)

    def start(self, number: int, weight: int, whole_s: float, now_s: float, finish_s: float = 0.0) -> None:
        """A batch starts.

        Args:
            number: its number, unique among what runs.
            weight: SPUs of its module.
            whole_s: seconds that it takes alone.
            now_s: the time; never before that of the last call.
            finish_s: spatial finish time, the urgency under `strict`.
        """
        self.advance(now_s)
        self._jobs[number] = _Job(weight, whole_s, (finish_s, number))

    def advance(self, now_s: float) -> None:
        """Time passes until then; not beyond `next_end_s`."""
        passed_s = now_s - self._now_s
        if self._jobs and passed_s > 0:
            self.busy_s += passed_s
            if len(self._jobs) == 1:
                (only,) = self._jobs.values()
                only.left_s -= passed_s
            else:
                for job, rate in self._rates():
                    job.left_s -= passed_s * rate
        self._now_s = max(self._now_s, now_s)

    def next_end_s(self) -> float:
        """When the next batch ends as things stand, `math.inf` when none runs."""
        if len(self._jobs) == 1:
            (only,) = self._jobs.values()
            return self._now_s + max(0.0, only.left_s)
        ends_s = [self._now_s + max(0.0, job.left_s) / rate for job, rate in self._rates() if rate > 0]
        return min(ends_s, default=math.inf)

    def end_next(self) -> int:
        """Moves to `next_end_s`, takes that batch off and returns its number.

        Raises:
            ValueError: nothing runs.
        """
        if not self._jobs:
            raise ValueError("no batch runs on this device")
        at_s = self.next_end_s()
        if len(self._jobs) == 1:
            (number,) = self._jobs
        else:
            rates = zip(self._jobs, self._rates(), strict=True)
            _, number = min((job.left_s / rate, number) for number, (job, rate) in rates if rate > 0)
        self.advance(at_s)
        del self._jobs[number]
        return number

    def _rates(self) -> list[tuple[_Job, float]]:
        if self._strict:
            first = min((job.urgency for job in self._jobs.values()), default=None)
            return [(job, 1.0 if job.urgency == first else 0.0) for job in self._jobs.values()]
        total = sum(job.weight for job in self._jobs.values())
        return [(job, job.weight / total) for job in self._jobs.values()]


@dataclasses.dataclass(frozen=True, slots=True)
class Course:
    """How one batch went.

    Attributes:
        module: whose.
        start_s: when it started.
        end_s: when it ended.
        spatial_s: when it would have ended under the spatial split.
        is_urgent: it started beside a later one.
    """

    module: int
    start_s: float
    end_s: float
    spatial_s: float
    is_urgent: bool


def play(
    batches: Sequence[tuple[int, float, float]],
    spus: Sequence[int],
    device_spus: int,
    *,
    strict: bool = False,
) -> list[Course]:
    """Runs batches through an `EftfQueue` on a shared device.

    Args:
        batches: (module, arrival in seconds, seconds on the whole device), in order of arrival.
        spus: a_i of each module.
        device_spus: K.
        strict: see `SharedDevice`.

    Returns:
        One course a batch, in the order given.
    """
    queue: EftfQueue[int] = EftfQueue(spus, device_spus)
    device = SharedDevice(strict=strict)
    turns: dict[int, tuple[Turn[int], float]] = {}
    courses: dict[int, Course] = {}
    coming = 0
    while coming < len(batches) or len(device):
        arrival_s = batches[coming][1] if coming < len(batches) else math.inf
        if arrival_s < device.next_end_s():
            module, now_s, whole_s = batches[coming]
            queue.push(module, coming, now_s, whole_s)
            coming += 1
        else:
            now_s = device.next_end_s()
            turn, start_s = turns.pop(device.end_next())
            queue.ended(turn)
            courses[turn.batch] = Course(turn.module, start_s, now_s, turn.finish_s, turn.is_urgent)
        while (started := queue.pop()) is not None:
            device.start(started.number, spus[started.module], started.whole_s, now_s, started.finish_s)
            turns[started.number] = (started, now_s)
    return [courses[number] for number in range(len(batches))]
