"""A stream program's router core and workers in one process: real rings, real modules, a scripted network.

Messages lie in queues until the test delivers them, in any order that keeps each way's own; workers can be
ended, drained and added between any two. Time is a number that the test moves.
"""

from __future__ import annotations

import dataclasses
import random
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from keystage.batching.choice import BatchingChoice
from keystage.bundle.store import load
from keystage.router.admission import AdmissionBounds
from keystage.router.batch_settings import BatchSettings
from keystage.router.engine import Refusal
from keystage.router.fleet import Fleet
from keystage.router.program import ProgramCore
from keystage.router.sessions import Answer, Refuse
from keystage.wire import api
from keystage.wire.events import EventLog
from keystage.wire.ring import Ring
from keystage.wire.sources import TensorSources
from keystage.worker.outbox import TensorOutbox
from keystage.worker.program import ProgramWork
from keystage.worker.settings import EngineSettings, StageUse, Status
from keystage.worker.torch_program import TorchProgram

ROUTER = "router"


@dataclasses.dataclass(slots=True)
class Post:
    """What a worker's outbox takes for its mailbox."""

    address: str
    sent: deque[tuple[str, api.Message]] = dataclasses.field(default_factory=deque)

    def send(self, to: str, message: api.Message, payload: memoryview | None = None) -> bool:
        assert payload is None
        self.sent.append((to, message))
        return True

    def forget(self, peer: str) -> None:
        """Keeps no connections."""

    def is_near(self, peer: str) -> bool:
        return True


class WorkerSide:
    """One worker without its process."""

    def __init__(
        self, name: str, bundle: Path, stages: Sequence[int], handler: str, ring_bytes: int, max_batch: int
    ) -> None:
        self.name = name
        self.stages = tuple(stages)
        self.post = Post(name)
        self.ring = Ring(ring_bytes)
        self.inbox: deque[api.Message] = deque()
        self.max_batch = max_batch
        self.settings = EngineSettings(
            name, self.stages, (ROUTER,), "bundle", "cpu", 2 * max_batch, 0, max_batch, 0, 60.0, "node", 1
        )
        status = Status(use={stage: StageUse() for stage in stages})
        pipeline = load(bundle)
        self.executor = TorchProgram(bundle, pipeline, stages, "cpu", 1, None, handler)
        self.outbox = TensorOutbox(cast("Any", self.post), self.ring)
        self.sources = TensorSources()
        self.work = ProgramWork(
            self.settings, self.executor, self.outbox, self.sources, EventLog(None, name), status
        )
        self.is_draining = False

    def deliver(self) -> None:
        message = self.inbox.popleft()
        match message:
            case api.Run():
                self.work.receive(ROUTER, message)
            case api.Evict():
                self.work.evict(message)
            case api.Ack():
                self.work.acknowledged(message.slots)
                self.outbox.acknowledge(message.slots)
            case api.Unroute():
                for address in message.dead:
                    self.outbox.forget(address)
                    self.sources.forget(address)
            case _:
                raise AssertionError(message)

    def close(self) -> None:
        self.ring.close()


class Cluster:
    """Router core and workers of one bundle.

    Attributes:
        answers: body and content type by number of the request.
        refusals: why, by number.
        batches: module and requests of every batch that was sent.
    """

    def __init__(
        self,
        bundle: Path,
        *,
        handler: str = "",
        ring_bytes: int = 1 << 20,
        max_batch: int = 8,
        settings: BatchSettings | None = None,
        bounds: AdmissionBounds | None = None,
    ) -> None:
        pipeline = load(bundle)
        assert pipeline.graph is not None
        self.bundle, self.pipeline, self.handler = bundle, pipeline, handler
        self.ring_bytes, self.max_batch = ring_bytes, max_batch
        self.now_s = 100.0
        self.fleet = Fleet(len(pipeline.stages), pipeline.name)
        self.core = ProgramCore(
            self.fleet, bounds or AdmissionBounds(max_losses=50), 1000, pipeline,
            settings or BatchSettings(BatchingChoice()),
        )  # fmt: skip
        self.workers: dict[str, WorkerSide] = {}
        self.answers: dict[int, tuple[bytes, str]] = {}
        self.refusals: dict[int, Refusal] = {}
        self.batches: list[tuple[int, list[int]]] = []
        self._count = 0

    def add(self, *stages: int) -> str:
        name = f"w{self._count}"
        self._count += 1
        worker = WorkerSide(name, self.bundle, stages, self.handler, self.ring_bytes, self.max_batch)
        self.workers[name] = worker
        hello = api.Hello(
            api.WIRE_VERSION, self.pipeline.name, worker.stages, name, "bundle", "cpu", 2 * self.max_batch, 0,
            self.max_batch, name, 1, "node", False,
        )  # fmt: skip
        assert self.fleet.hello(name, hello, self.now_s) is None
        self.fleet.credit(name, api.Credit(name, 2 * self.max_batch, 0))
        self.fleet.ready(name, self.now_s)
        self.core.worker_ready(name, self.now_s)
        self._flush()
        return name

    def submit(self, body: bytes, content_type: str = "application/json", **more: Any) -> int:
        number = self.core.submit(body, content_type, more.get("deadline_s"), self.now_s)
        self._flush()
        return number

    def cancel(self, number: int) -> None:
        self.core.cancel(number, self.now_s)
        self._flush()

    def end(self, name: str) -> None:
        """Ends a worker at once; what it sent before arrives all the same."""
        worker = self.workers.pop(name)
        while worker.post.sent:
            self._carry(worker)
        worker.close()
        self.fleet.remove(name)
        self.core.worker_lost(name, self.now_s)
        self._flush()

    def drain(self, name: str) -> None:
        """No new requests for a worker."""
        self.workers[name].is_draining = True
        self.fleet.draining(name)
        self.core.worker_draining(name, self.now_s)
        self._flush()

    def is_empty(self, name: str) -> bool:
        """Whether a worker that drains would leave now."""
        worker = self.workers[name]
        worker.outbox.pay()
        return not len(worker.work) and not worker.work.kept and not worker.ring.ledger.slots

    def step(self, draw: random.Random | None = None) -> bool:
        """Lets one thing happen; False when nothing is left to do."""
        todo = [
            *(("deliver", w) for w in self.workers.values() if w.inbox),
            *(("send", w) for w in self.workers.values() if w.post.sent),
            *(("run", w) for w in self.workers.values() if w.work.has_work()),
        ]
        if not todo:
            return self._pay()
        what, worker = draw.choice(todo) if draw is not None else todo[0]
        if what == "deliver":
            worker.deliver()
        elif what == "send":
            self._carry(worker)
        else:
            worker.work.run_one()
        return True

    def settle(self, draw: random.Random | None = None, most: int = 200_000) -> None:
        """Until nothing is left to do."""
        for _ in range(most):
            if not self.step(draw):
                return
        raise AssertionError(f"not at rest after {most} events: {self.core.held}")

    def tick(self, seconds: float) -> None:
        self.now_s += seconds
        self.core.tick(self.now_s)
        self._flush()

    def check_rest(self) -> None:
        """Nothing is left anywhere."""
        assert self.core.held == (0, 0, 0)
        assert self.core.gate.items == 0
        assert self.core._resting.nbytes == 0
        assert not +self.core._batches.homes
        for name, worker in self.workers.items():
            assert worker.work.kept == 0, name
            assert len(worker.work) == 0, name
            assert worker.ring.ledger.slots == 0, name
            assert not worker.work._parked, name
            assert self.fleet.workers[name].held_slots == 0, name
        for meter in self.core.meters:
            assert (meter.queue, meter.in_flight) == (0, 0)

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()

    def _pay(self) -> bool:
        owing = [worker for worker in self.workers.values() if worker.outbox.owes]
        for worker in owing:
            worker.outbox.pay()
        return bool(owing)

    def _carry(self, worker: WorkerSide) -> None:
        to, message = worker.post.sent.popleft()
        if to == ROUTER:
            assert isinstance(message, api.Ran)
            body = api.encode(message)
            decoded = api.decode_from_worker(body)
            assert isinstance(decoded, api.Ran)
            self.core.ran(worker.name, decoded, self.now_s)
            self._flush()
        elif to in self.workers:
            self.workers[to].inbox.append(message)

    def _flush(self) -> None:
        sends, outcomes = self.core.take()
        for address, message in sends:
            if isinstance(message, api.Run):
                self.batches.append((message.stage, message.sessions))
            decoded = api.decode_to_worker(api.encode(message))
            if address in self.workers:
                self.workers[address].inbox.append(cast("api.Message", decoded))
        for outcome in outcomes:
            match outcome:
                case Answer(session, payload, content_type):
                    assert session not in self.answers
                    self.answers[session] = payload, content_type
                case Refuse(session, refusal):
                    self.refusals[session] = refusal
