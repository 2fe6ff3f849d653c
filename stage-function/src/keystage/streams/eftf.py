"""Earliest finish time first: whose batch a shared device runs next. Pure.

Modules that share a device have SPUs of it (`streams.allocate`). Splitting the device in space costs
isolation and cannot follow the load, so the device is given whole to one batch after another, in the order
in which the batches would have finished under the spatial split (NeuStream, section 5): batch of module i,
w seconds on the whole device of K SPUs, a_i of which are i's:

    F = max(arrival, F of the module's batch before) + w K / a_i

A batch that comes while one with a later F runs starts at once beside it (on a GPU: a stream of high
priority). Before it: batches that `keystage.batching` has formed. After it: an executor, or
`streams.shared_device`, which is the model of concurrency under which no batch ends later than F:
batches that run at once share the device's rate in proportion to their modules' SPUs, one batch of a
module at a time, and the SPUs of a device are not oversold.

Why that holds. A batch that starts by max(arrival, F before) runs at no less than a_i / K and so ends by F.
One that starts later has waited while only batches of earlier F ran (else it would have started), at the
full rate of the device: what they and it had left when such running began was no more than under the
spatial split, which gets all of it done by F.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

_T = TypeVar("_T")


def spatial_finish_s(arrived_s: float, before_s: float, whole_s: float, spus: int, device_spus: int) -> float:
    """When a batch would end, had the device been split in space (NeuStream, section 5).

    Args:
        arrived_s: when it could start.
        before_s: when the module's batch before it would have ended, minus infinity for the first.
        whole_s: seconds that it takes on the whole device.
        spus: the module's share.
        device_spus: of the device.
    """
    return max(arrived_s, before_s) + whole_s * device_spus / spus


class SharingError(ValueError):
    """SPUs or times that cannot be; names the module, the bound and the value."""


@dataclasses.dataclass(frozen=True, slots=True)
class Turn(Generic[_T]):
    """A batch, with its place in the order.

    Attributes:
        module: index of the module on this device.
        batch: what was pushed.
        whole_s: seconds that it takes on the whole device.
        finish_s: when it would have finished under the spatial split; it ends no later.
        number: order of coming, breaks ties.
        is_urgent: it starts beside a batch that would have finished later.
    """

    module: int
    batch: _T
    whole_s: float
    finish_s: float
    number: int
    is_urgent: bool = False


class EftfQueue(Generic[_T]):
    """Batches of the modules of one device, given out in the order of their spatial finish times.

    Whoever owns the device pushes batches as they are formed, pops until None whenever a batch was pushed
    or has ended, starts what it gets, and says when it has ended. An executor that cannot run two batches
    at once pops only while nothing runs; then the bound of the module docstring does not hold for what
    comes meanwhile.

    Args:
        spus: a_i of each module, at least 1.
        device_spus: K.

    Raises:
        SharingError: there are more SPUs given than the device has, or a module has none.
    """

    def __init__(self, spus: Sequence[int], device_spus: int) -> None:
        for module, given in enumerate(spus):
            if given < 1:
                raise SharingError(f"module {module} needs at least 1 SPU on the device, it has {given}")
        if sum(spus) > device_spus:
            raise SharingError(f"the device has {device_spus} SPUs, its modules were given {sum(spus)}")
        self._spus = tuple(spus)
        self._device_spus = device_spus
        self._queues: list[deque[Turn[_T]]] = [deque() for _ in spus]
        self._finish_s = [float("-inf") for _ in spus]
        self._running: dict[int, Turn[_T]] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        """Batches that wait."""
        return sum(map(len, self._queues))

    def __iter__(self) -> Iterator[_T]:
        """Batches that wait, in the order in which they would be given out."""
        waiting = sorted((turn for queue in self._queues for turn in queue), key=_order)
        return (turn.batch for turn in waiting)

    def waiting(self, module: int) -> int:
        """Batches of a module that wait."""
        return len(self._queues[module])

    def is_running(self, module: int) -> bool:
        """Whether a batch of the module runs."""
        return module in self._running

    @property
    def running(self) -> tuple[Turn[_T], ...]:
        """What runs now."""
        return tuple(self._running.values())

    def push(self, module: int, batch: _T, now_s: float, whole_s: float) -> float:
        """A batch is formed and could start.

        Args:
            module: whose.
            batch: handed out as it is.
            now_s: the time; never earlier than that of an earlier push.
            whole_s: seconds that it takes on the whole device, by the profile.

        Returns:
            Its spatial finish time.

        Raises:
            SharingError: the batch takes no time, or a negative one.
        """
        if not whole_s > 0:
            raise SharingError(f"a batch of module {module} must take more than 0 s, it takes {whole_s} s")
        before_s = self._finish_s[module]
        finish_s = spatial_finish_s(now_s, before_s, whole_s, self._spus[module], self._device_spus)
        self._finish_s[module] = finish_s
        self._queues[module].append(Turn(module, batch, whole_s, finish_s, next(self._numbers)))
        return finish_s

    def pop(self) -> Turn[_T] | None:
        """The batch to be started now, or None: then nothing waits, or what runs goes first."""
        best: Turn[_T] | None = None
        for module, queue in enumerate(self._queues):
            if queue and module not in self._running and (best is None or _order(queue[0]) < _order(best)):
                best = queue[0]
        if best is None:
            return None
        if self._running:
            if all(_order(best) > _order(turn) for turn in self._running.values()):
                return None
            best = dataclasses.replace(best, is_urgent=True)
        self._queues[best.module].popleft()
        self._running[best.module] = best
        return best

    def discard(self, is_unwanted: Callable[[_T], bool]) -> list[_T]:
        """Takes batches out that wait and are not to be run; what comes later keeps its finish time.

        Returns:
            What was taken out.
        """
        gone = [turn.batch for queue in self._queues for turn in queue if is_unwanted(turn.batch)]
        if gone:
            kept = [[turn for turn in queue if not is_unwanted(turn.batch)] for queue in self._queues]
            self._queues = [deque(turns) for turns in kept]
        return gone

    def ended(self, turn: Turn[_T]) -> None:
        """A batch has ended.

        Raises:
            SharingError: it does not run.
        """
        running = self._running.get(turn.module)
        if running is None or running.number != turn.number:
            raise SharingError(f"batch {turn.number} of module {turn.module} does not run")
        del self._running[turn.module]


def _order(turn: Turn[_T]) -> tuple[float, int]:
    return turn.finish_s, turn.number
