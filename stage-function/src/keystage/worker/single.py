"""Single-pass work of a worker: run batches, park the outputs, answer after the last stage.

Called by the engine loop only. Inputs come inline (`Work`) or lie in a producer's ring (`Fetch`), from
where they are brought first if the producer is on another node;
outputs stay in this worker's ring until their consumer acknowledges them, or the router does because
the consumer or the request is gone.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import deque
from functools import partial
from typing import TypeAlias

from keystage.wire import api
from keystage.wire.events import EventLog
from keystage.wire.ring import RingError
from keystage.wire.sources import TensorSources
from keystage.worker.executor import Activation, Executor, StageError
from keystage.worker.outbox import TensorOutbox
from keystage.worker.settings import EngineSettings, Status

log = logging.getLogger(__name__)


_Waiting: TypeAlias = tuple[str, api.Work | api.Fetch, float]
"""Router, batch, and when it was received."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Batch:
    """A batch that was run: whose, up to which stage, waited and computed for how long."""

    router: str
    stage: int
    started_s: float
    compute_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class _Output:
    """One output that has no place in the ring yet."""

    batch: _Batch
    session: int
    epoch: int
    activation: Activation


class SinglePassWork:
    """Batches to run here, in order of arrival. Args are those of `engine.Engine`."""

    def __init__(
        self,
        settings: EngineSettings,
        executor: Executor,
        outbox: TensorOutbox,
        sources: TensorSources,
        events: EventLog,
        status: Status,
    ) -> None:
        self._settings = settings
        self._executor = executor
        self._outbox = outbox
        self._sources = sources
        self._events = events
        self._status = status
        self._batches: deque[_Waiting] = deque()
        # Batches with inputs on their way from another node.
        self._coming: list[_Waiting] = []
        # Slot -> router. By slot: a worker of several stages parks several outputs of one item.
        self._parked: dict[int, str] = {}
        self._unparked: deque[_Output] = deque()
        # Set when an output found no room: only an acknowledgement or a release can make some.
        self._is_full = False

    def __len__(self) -> int:
        waiting = sum(len(batch.sessions) for _, batch, _ in (*self._batches, *self._coming))
        return waiting + len(self._unparked)

    def held_by(self, router: str) -> int:
        """Items of one router."""
        entries = (*self._batches, *self._coming)
        waiting = sum(len(batch.sessions) for sender, batch, _ in entries if sender == router)
        return waiting + sum(output.batch.router == router for output in self._unparked)

    def receive(self, router: str, batch: api.Work | api.Fetch) -> None:
        """A batch arrives."""
        entry = (router, batch, time.perf_counter())
        if isinstance(batch, api.Fetch) and self._sources.begin(
            batch.refs, batch.producers, partial(self._arrived, entry)
        ):
            self._coming.append(entry)
        else:
            self._batches.append(entry)

    def _arrived(self, entry: _Waiting) -> None:
        """The inputs of a batch are here; its router may have restarted meanwhile."""
        if entry in self._coming:
            self._coming.remove(entry)
            self._batches.append(entry)

    def acknowledged(self, slots: list[int]) -> None:
        """These outputs were taken, or nobody wants them."""
        self._is_full = False
        for slot in slots:
            self._parked.pop(slot, None)

    def forget_router(self, router: str) -> None:
        """A router restarted: what it wanted run, and what it had parked here, is void."""
        for sender, batch, _ in (*self._batches, *self._coming):
            if sender == router:
                self._acknowledge(batch)
        self._coming = [entry for entry in self._coming if entry[0] != router]
        self._batches = deque(entry for entry in self._batches if entry[0] != router)
        self._unparked = deque(output for output in self._unparked if output.batch.router != router)
        slots = [slot for slot, owner in self._parked.items() if owner == router]
        self.acknowledged(slots)
        self._outbox.acknowledge(slots)

    def has_work(self) -> bool:
        """Whether `run_one` would run something."""
        return bool(self._unparked or self._batches) and not self._is_full

    def run_one(self) -> None:
        """Parks what found no room before; else runs the oldest batch."""
        if self._unparked:
            self._is_full = not self._park()
            return
        if not self._batches:
            return
        router, batch, received_s = self._batches.popleft()
        started_s = time.perf_counter()
        try:
            outputs = self._executor.batch(batch.stage, batch.last, self._inputs(batch))
            if batch.more:
                self._check_fits(outputs)
        except (StageError, RingError) as error:
            retryable = isinstance(error, RingError) or error.retryable
            log.warning("batch of %d failed: %s", len(batch.sessions), error)
            self._outbox.send(
                router,
                api.Failed(self._settings.replica, batch.sessions, batch.epochs, str(error), retryable),
            )
            self._acknowledge(batch)
            return
        compute_s = time.perf_counter() - started_s
        self._acknowledge(batch)
        for stage in range(batch.stage, batch.last + 1):
            self._status.use[stage].add(compute_s / (batch.last - batch.stage + 1), len(batch.sessions))
        self._events.write(
            "batch", stage=batch.stage, last=batch.last, rows=len(batch.sessions), sessions=batch.sessions,
            compute_s=round(compute_s, 6),
        )  # fmt: skip
        if batch.more:
            done = _Batch(router, batch.last, started_s - received_s, compute_s)
            self._unparked.extend(
                _Output(done, session, epoch, output)
                for session, epoch, output in zip(batch.sessions, batch.epochs, outputs, strict=True)
            )
            self._park()
            return
        self._outbox.send(
            router,
            api.Results(
                self._settings.replica,
                batch.last,
                batch.sessions,
                batch.epochs,
                outputs[0].dtype,
                [output.shape for output in outputs],
                [bytes(output.data) for output in outputs],
                started_s - received_s,
                compute_s,
            ),
        )

    def _inputs(self, batch: api.Work | api.Fetch) -> list[Activation]:
        if isinstance(batch, api.Work):
            return [
                Activation(batch.dtype, shape, memoryview(payload))
                for shape, payload in zip(batch.shapes, batch.payloads, strict=True)
            ]
        return [
            Activation(ref.dtype, ref.shape, self._sources.view(ref, producer))
            for ref, producer in zip(batch.refs, batch.producers, strict=True)
        ]

    def _check_fits(self, outputs: list[Activation]) -> None:
        for output in outputs:
            if not self._outbox.fits(output):
                raise StageError(
                    f"an output of {output.data.nbytes} bytes at {self._settings.replica} exceeds its ring "
                    "(KEYSTAGE_RING_BYTES)"
                )

    def _acknowledge(self, batch: api.Work | api.Fetch) -> None:
        if isinstance(batch, api.Fetch):
            for producer, ref in zip(batch.producers, batch.refs, strict=True):
                self._sources.release(ref, producer)
                self._outbox.taken(producer, ref.slot)

    def _park(self) -> bool:
        """Parks outputs, oldest first, while the ring has room; False when the first found none.

        Room for a whole batch at once may never come, so a batch may be announced in parts.
        """
        has_moved = False
        while self._unparked:
            batch = self._unparked[0].batch
            parked: list[tuple[_Output, api.TensorRef]] = []
            while self._unparked and self._unparked[0].batch is batch:
                output = self._unparked[0]
                ref = self._outbox.park(output.activation)
                if ref is None:
                    break
                self._unparked.popleft()
                parked.append((output, ref))
                self._parked[ref.slot] = batch.router
            if not parked:
                break
            has_moved = True
            self._outbox.send(
                batch.router,
                api.Parked(
                    self._settings.replica,
                    batch.stage,
                    [output.session for output, _ in parked],
                    [output.epoch for output, _ in parked],
                    [ref for _, ref in parked],
                    batch.started_s,
                    batch.compute_s,
                ),
            )
        return has_moved
