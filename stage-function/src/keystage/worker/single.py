"""Single-pass work of a worker: run batches, park the outputs, answer after the last stage.

Called by the engine loop only. Inputs come inline (`Work`) or lie in a producer's ring (`Fetch`);
outputs stay in this worker's ring until their consumer acknowledges them, or the router releases
them because the request is gone.
"""

from __future__ import annotations

import logging
import time
from collections import deque

from keystage.wire import api
from keystage.wire.events import EventLog
from keystage.wire.ring import PeerRings, RingError
from keystage.worker.executor import Activation, Executor, StageError
from keystage.worker.outbox import TensorOutbox
from keystage.worker.settings import EngineSettings, Status

log = logging.getLogger(__name__)


class SinglePassWork:
    """Batches to run here, in order of arrival. Args are those of `engine.Engine`."""

    def __init__(
        self,
        settings: EngineSettings,
        executor: Executor,
        outbox: TensorOutbox,
        rings: PeerRings,
        events: EventLog,
        status: Status,
    ) -> None:
        self._settings = settings
        self._executor = executor
        self._outbox = outbox
        self._rings = rings
        self._events = events
        self._status = status
        self._batches: deque[tuple[str, api.Work | api.Fetch, float]] = deque()
        self._parked: dict[tuple[int, int], int] = {}
        self._parked_by_slot: dict[int, tuple[int, int]] = {}
        self._unparked: deque[tuple[str, api.Work | api.Fetch, list[Activation], float, float]] = deque()

    def __len__(self) -> int:
        waiting = sum(len(batch.sessions) for _, batch, _ in self._batches)
        return waiting + sum(len(entry[1].sessions) for entry in self._unparked)

    def held_by(self, router: str) -> int:
        """Items of one router."""
        return sum(len(batch.sessions) for sender, batch, _ in self._batches if sender == router)

    def receive(self, router: str, batch: api.Work | api.Fetch) -> None:
        """A batch arrives."""
        self._batches.append((router, batch, time.perf_counter()))

    def acknowledged(self, slots: list[int]) -> None:
        """Consumers have taken these outputs."""
        for slot in slots:
            key = self._parked_by_slot.pop(slot, None)
            if key is not None:
                del self._parked[key]

    def release(self, sessions: list[int], epochs: list[int]) -> None:
        """The requests are gone: frees their parked outputs."""
        slots = [self._parked[key] for key in zip(sessions, epochs, strict=True) if key in self._parked]
        self.acknowledged(slots)
        self._outbox.acknowledge(slots)

    def forget_router(self, router: str) -> None:
        """A router restarted: what it had parked here is void."""
        self._batches = deque(entry for entry in self._batches if entry[0] != router)
        self._outbox.acknowledge(list(self._parked.values()))
        self._parked.clear()
        self._parked_by_slot.clear()

    def has_work(self) -> bool:
        """Whether `run_one` would run something."""
        return bool(self._batches or self._unparked)

    def run_one(self) -> None:
        """Parks what found no room before; else runs the oldest batch."""
        if self._unparked:
            entry = self._unparked.popleft()
            if not self._park(*entry):
                self._unparked.appendleft(entry)
                # Only an Ack makes room: give the loop a moment instead of spinning.
                time.sleep(0.0005)
            return
        if not self._batches:
            return
        router, batch, received_s = self._batches.popleft()
        started_s = time.perf_counter()
        try:
            outputs = self._executor.batch(batch.stage, self._inputs(batch))
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
        use = self._status.use[batch.stage]
        use.busy_s += compute_s
        use.batches += 1
        use.rows += len(batch.sessions)
        self._events.write(
            "batch", stage=batch.stage, rows=len(batch.sessions), sessions=batch.sessions,
            compute_s=round(compute_s, 6),
        )  # fmt: skip
        if batch.more:
            if not self._park(router, batch, outputs, started_s - received_s, compute_s):
                self._unparked.append((router, batch, outputs, started_s - received_s, compute_s))
            return
        self._outbox.send(
            router,
            api.Results(
                self._settings.replica,
                batch.stage,
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
        return [Activation(ref.dtype, ref.shape, self._rings.view(ref)) for ref in batch.refs]

    def _acknowledge(self, batch: api.Work | api.Fetch) -> None:
        if isinstance(batch, api.Fetch):
            for producer, ref in zip(batch.producers, batch.refs, strict=True):
                self._outbox.taken(producer, ref.slot)

    def _park(
        self,
        router: str,
        batch: api.Work | api.Fetch,
        outputs: list[Activation],
        started_s: float,
        compute_s: float,
    ) -> bool:
        refs: list[api.TensorRef] = []
        for output in outputs:
            ref = self._outbox.park(output)
            if ref is None:
                self._outbox.acknowledge([taken.slot for taken in refs])
                return False
            refs.append(ref)
        for key, ref in zip(zip(batch.sessions, batch.epochs, strict=True), refs, strict=True):
            self._parked[key] = ref.slot
            self._parked_by_slot[ref.slot] = key
        self._outbox.send(
            router,
            api.Parked(
                self._settings.replica, batch.stage, batch.sessions, batch.epochs, refs, started_s, compute_s
            ),
        )
        return True
