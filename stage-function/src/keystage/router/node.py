"""The shell around the pure core: mailbox in, mailbox and clients out, clock, process watch.

It implements `engine.Engine` for the HTTP face. Everything runs on one event loop; a handler never
awaits between asking the core and flushing what the core said.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from collections.abc import AsyncIterator, Iterable
from typing import assert_never

import msgspec

from keystage.bundle.api import Pipeline
from keystage.router.admission import AdmissionBounds
from keystage.router.api import RouterStats
from keystage.router.batching import Eager
from keystage.router.config import cpu_waves
from keystage.router.engine import Generation, InvalidRequest, Limits, Refusal
from keystage.router.fleet import Fleet, replica_stats
from keystage.router.looping import LoopingCore
from keystage.router.sessions import Answer, Deliver, Refuse
from keystage.router.single import SinglePassCore
from keystage.router.streams import TokenStream
from keystage.wire import api
from keystage.wire.events import EventLog
from keystage.wire.mailbox import Mailbox
from keystage.wire.opening import node_identity

log = logging.getLogger(__name__)

TICK_S = 0.05
"""How late a deadline may be noticed; also the pace of the liveness check."""


class RouterNode:
    """One router.

    Args:
        pipeline: the pipeline served.
        mailbox: bound inbox.
        bounds: admission bounds.
        events: event log.
        max_body_bytes: for `limits`.
        waves: waves per path, 0 derives it.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        mailbox: Mailbox,
        bounds: AdmissionBounds,
        events: EventLog,
        max_body_bytes: int,
        waves: int = 0,
    ) -> None:
        self._pipeline = pipeline
        self._mailbox = mailbox
        self._events = events
        self._waves = waves
        self._node = node_identity()
        self.incarnation = uuid.uuid4().hex
        # Numbers of different incarnations never meet: microseconds since 2020 leave room for 2^63.
        # Routers of one pipeline may start within a millisecond: the factor keeps 8 million apart.
        first = int((time.time() - 1_577_836_800) * 1_000_000) * 8192
        self._first = first
        self.fleet = Fleet(len(pipeline.stages), pipeline.name)
        self._looping: LoopingCore | None = None
        self._single: SinglePassCore | None = None
        if pipeline.execution == "looping":
            self._looping = LoopingCore(self.fleet, bounds, first, self._waves_of)
        else:
            sizes = [stage.activation_bytes for stage in pipeline.stages]
            self._single = SinglePassCore(self.fleet, bounds, first, Eager(), sizes)
        self._limits = Limits(
            looping=self._looping is not None,
            context_length=pipeline.context_length,
            vocab_size=pipeline.vocab_size,
            max_body_bytes=max_body_bytes,
        )
        self._streams: dict[int, TokenStream] = {}
        self._answers: dict[int, asyncio.Future[bytes]] = {}
        self._pidfds: dict[str, int] = {}
        self._refused: dict[str, int] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ticker: asyncio.Task[None] | None = None

    # ------------------------------------------------------------ Engine

    @property
    def limits(self) -> Limits:
        """See `Engine.limits`."""
        return self._limits

    async def generate(self, request: Generation) -> AsyncIterator[list[int]]:
        """See `Engine.generate`."""
        core = self._looping
        if core is None:
            raise InvalidRequest(f"pipeline {self._pipeline.name} is single-pass and generates no tokens")
        try:
            number = core.submit(request, time.monotonic())
        except Refusal as refusal:
            self._count_refusal(refusal)
            raise
        stream = self._streams[number] = TokenStream()
        self._events.write("queued", session=number, prompt=len(request.prompt))
        self._flush()
        try:
            while tokens := await stream.take():
                yield tokens
        finally:
            del self._streams[number]
            if not stream.is_done:
                core.cancel(number, time.monotonic())
                self._events.write("cancelled", session=number)
                self._flush()

    async def run(self, payload: bytes, deadline_s: float | None = None) -> bytes:
        """See `Engine.run`."""
        core = self._single
        if core is None:
            raise InvalidRequest(f"pipeline {self._pipeline.name} generates tokens; it takes no raw item")
        try:
            number = core.submit(payload, deadline_s, time.monotonic())
        except Refusal as refusal:
            self._count_refusal(refusal)
            raise
        self._events.write("queued", session=number)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        self._flush()
        try:
            return await answer
        except asyncio.CancelledError:
            core.cancel(number, time.monotonic())
            self._flush()
            raise
        finally:
            self._answers.pop(number, None)

    # ------------------------------------------------------------ life

    def start(self) -> None:
        """Begins to read the mailbox on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._mailbox.fd, self._on_readable)
        self._ticker = self._loop.create_task(self._tick())

    async def stop(self) -> None:
        """Stops reading and closes the mailbox."""
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
        if self._loop is not None:
            self._loop.remove_reader(self._mailbox.fd)
            for address in list(self._pidfds):
                self._unwatch(address)
        self._events.flush()
        self._mailbox.close(linger_s=0.2)

    def stats(self) -> RouterStats:
        """Counters for the controller and the report."""
        core = self._core
        replicas = [replica_stats(worker) for worker in self.fleet.workers.values()]
        return RouterStats(
            pipeline=self._pipeline.name,
            incarnation=self.incarnation,
            at_s=time.monotonic(),
            wall_s=time.time(),
            execution=self._pipeline.execution,
            requests=core.requests,
            completed=core.completed,
            refused=dict(self._refused),
            replayed_tokens=core.replayed_tokens,
            moves=core.moves,
            stages=[meter.counters() for meter in core.meters],
            replicas=replicas,
        )

    # ------------------------------------------------------------ inside

    @property
    def _core(self) -> LoopingCore | SinglePassCore:
        core = self._looping or self._single
        assert core is not None
        return core

    def _waves_of(self, addresses: Iterable[str]) -> int:
        """One wave per distinct device; workers that share this machine's cores share them too."""
        distinct = set(addresses)
        if self._waves:
            return self._waves
        workers = [self.fleet.workers[address].hello for address in distinct]
        if all(hello.device == "cpu" and hello.node == self._node for hello in workers):
            return min(len(distinct), cpu_waves())
        return len(distinct)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now_s = time.monotonic()
            self._on_readable()
            for address in self.fleet.silent(now_s):
                log.warning("no heartbeat from %s", address)
                self._lost(address, "silent")
            self._core.tick(now_s)
            self._flush()
            self._events.flush()

    def _on_readable(self) -> None:
        now_s = time.monotonic()
        for sender, body, _ in self._mailbox.drain():
            try:
                message = api.decode_from_worker(body)
            except msgspec.DecodeError as error:
                log.warning("dropped a message of %d bytes from %s: %s", len(body), sender, error)
                continue
            self._handle(sender, message, now_s)
        self._flush()
        if self._mailbox.has_more() and self._loop is not None:
            self._loop.call_soon(self._on_readable)

    def _handle(self, sender: str, message: api.FromWorker, now_s: float) -> None:
        if not isinstance(message, api.Hello) and sender not in self.fleet.workers:
            if not isinstance(message, api.Bye):
                self._mailbox.send(sender, api.Introduce(api.WIRE_VERSION, self._first))
            return
        match message:
            case api.Tokens() | api.Parked() | api.Results() | api.Failed():
                self._handle_work(sender, message, now_s)
            case api.Heartbeat():
                self.fleet.beat(sender, message, now_s)
            case api.Credit():
                self.fleet.credit(sender, message)
                self._core.credit_changed(now_s)
            case api.Hello():
                self._on_hello(sender, message, now_s)
            case api.Ready():
                if self.fleet.ready(sender, now_s) is not None:
                    self._events.write("ready", replica=message.replica)
                    self._core.worker_ready(sender, now_s)
            case api.Draining():
                if self.fleet.draining(sender) is not None:
                    self._events.write("draining", replica=message.replica)
                    self._core.worker_draining(sender, now_s)
            case api.Bye():
                self._lost(sender, "bye")
            case _:
                assert_never(message)

    def _handle_work(
        self, sender: str, message: api.Tokens | api.Parked | api.Results | api.Failed, now_s: float
    ) -> None:
        if isinstance(message, api.Failed):
            self._core.failed(message, now_s)
        elif isinstance(message, api.Tokens):
            if self._looping is not None:
                self._looping.tokens(message, now_s)
        elif self._single is None:
            log.warning("%s answered single-pass work that a looping pipeline never gave", sender)
        elif isinstance(message, api.Results):
            self._single.results(sender, message, now_s)
        elif message.stage + 1 < self.fleet.stages:
            self._single.parked(sender, message, now_s)

    def _on_hello(self, sender: str, message: api.Hello, now_s: float) -> None:
        if message.wire != api.WIRE_VERSION:
            log.error(
                "%s speaks wire version %d, this router %d", message.replica, message.wire, api.WIRE_VERSION
            )
            return
        known = self.fleet.workers.get(sender)
        if known is not None and known.hello.pid != message.pid:
            self._lost(sender, "replaced")
        for address, other in list(self.fleet.workers.items()):
            if other.hello.replica == message.replica and address != sender:
                # Started anew: beyond this node its port, and so its address, is another one.
                self._lost(address, "replaced")
        refused = self._unfit(sender, message) or self.fleet.hello(sender, message, now_s)
        if refused is not None:
            log.error("refused a worker: %s", refused)
            return
        self._events.write("hello", replica=message.replica, stages=message.stages)
        if message.node == self._node:
            self._watch(sender, message.pid)

    def _unfit(self, sender: str, message: api.Hello) -> str | None:
        """Why a worker is none for this router: not to be reached, or of another bundle."""
        reason = self._mailbox.unreachable(sender)
        if reason is not None:
            return f"{message.replica} at {sender}: {reason}"
        first = message.stages[0] if message.stages else -1
        if not 0 <= first < len(self._pipeline.stages):
            return None  # the fleet refuses it for its stages
        expected = self._pipeline.stages[first].identity
        if message.bundle == expected:
            return None
        return f"{message.replica}: parameters {message.bundle[:12]} of stage {first}, not {expected[:12]}"

    def _watch(self, address: str, pid: int) -> None:
        """Notices the death of a worker on this node at once."""
        if address in self._pidfds or self._loop is None:
            return
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._lost(address, "exited")
            return
        self._pidfds[address] = fd
        self._loop.add_reader(fd, self._on_exit, address, pid)

    def _on_exit(self, address: str, pid: int) -> None:
        # What the worker sent before it died is still in the mailbox and counts.
        self._on_readable()
        worker = self.fleet.workers.get(address)
        if worker is not None and worker.hello.pid == pid:
            self._lost(address, "exited")
        self._flush()

    def _unwatch(self, address: str) -> None:
        fd = self._pidfds.pop(address, None)
        if fd is not None and self._loop is not None:
            self._loop.remove_reader(fd)
            os.close(fd)

    def _lost(self, address: str, why: str) -> None:
        self._unwatch(address)
        worker = self.fleet.remove(address)
        if worker is None:
            return
        log.info("worker %s is gone (%s)", worker.hello.replica, why)
        self._events.write("lost", replica=worker.hello.replica, why=why)
        self._mailbox.forget(address)
        self._core.worker_lost(address, time.monotonic())

    def _flush(self) -> None:
        """Sends what the core wants sent, tells clients what the core wants told."""
        sends, outcomes = self._core.take()
        for address, message in sends:
            if not self._mailbox.send(address, message):
                log.error("the queue of %s is full: it counts as dead", address)
                if self._loop is not None:
                    self._loop.call_soon(self._lost, address, "unreachable")
            if self._events:
                self._log_send(address, message)
        for outcome in outcomes:
            match outcome:
                case Deliver(session, tokens, done):
                    stream = self._streams.get(session)
                    if stream is not None:
                        stream.push(tokens, done)
                case Answer(session, payload):
                    answer = self._answers.get(session)
                    if answer is not None and not answer.done():
                        answer.set_result(payload)
                case Refuse(session, refusal):
                    self._refuse(session, refusal)
                case _:
                    assert_never(outcome)

    def _refuse(self, session: int, refusal: Refusal) -> None:
        self._count_refusal(refusal)
        self._events.write("refused", session=session, code=refusal.code)
        stream = self._streams.get(session)
        if stream is not None:
            stream.refuse(refusal)
        answer = self._answers.get(session)
        if answer is not None and not answer.done():
            answer.set_exception(refusal)

    def _count_refusal(self, refusal: Refusal) -> None:
        self._refused[refusal.code] = self._refused.get(refusal.code, 0) + 1

    def _log_send(self, address: str, message: api.Message) -> None:
        worker = self.fleet.workers.get(address)
        name = worker.hello.replica if worker is not None else address
        match message:
            case api.Start(specs) | api.Move(specs):
                self._events.write(
                    "start" if isinstance(message, api.Start) else "move",
                    replica=name,
                    sessions=[spec.session for spec in specs],
                    epochs=[spec.epoch for spec in specs],
                    paths=[spec.path for spec in specs],
                    tokens=[len(spec.tokens) for spec in specs],
                )
            case api.Route():
                self._events.write("route", path=message.path, replicas=message.replicas, waves=message.waves)
            case api.Work() | api.Fetch():
                self._events.write("dispatch", replica=name, stage=message.stage, sessions=message.sessions)
            case _:
                pass
