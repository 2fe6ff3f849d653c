"""The shell around the pure core: mailbox in, mailbox and clients out, clock, process watch.

It implements `engine.Engine` for the HTTP face. Everything runs on one event loop; a handler never
awaits between asking the core and flushing what the core said.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Iterable
from typing import assert_never

from keystage.bundle.api import Pipeline
from keystage.router.admission import AdmissionBounds
from keystage.router.alarm import Alarm
from keystage.router.api import RouterStats
from keystage.router.batch_settings import BatchSettings
from keystage.router.clients import Clients
from keystage.router.config import cpu_waves
from keystage.router.ejection import Ejection
from keystage.router.endings import LAST_WORDS, gone, process_of
from keystage.router.engine import NOBODY, Caller, Generation, InvalidRequest, Limits
from keystage.router.fleet import Fleet, replica_stats
from keystage.router.looping import LoopingCore
from keystage.router.paths import waves_over
from keystage.router.process_watch import ProcessWatch
from keystage.router.program import ProgramCore
from keystage.router.sent import log_sent
from keystage.router.served import Served
from keystage.router.single import SinglePassCore
from keystage.router.slow_ones import rest
from keystage.router.traces import Traces
from keystage.router.turned_away import GivenUp, Strangers, TurnedAway
from keystage.router.welcome import speaks_otherwise, unfit
from keystage.wire import api
from keystage.wire.events import EventLog
from keystage.wire.mailbox import Mailbox
from keystage.wire.opening import node_identity
from keystage.wire.tracing import Tracer
from keystage.wire.unreadable import UNREADABLE

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
        batching: how a single-pass pipeline makes batches, None for the defaults.
        slow_factor: so many times slower than its like a worker is given nothing for a while, 0: never.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        mailbox: Mailbox,
        bounds: AdmissionBounds,
        events: EventLog,
        max_body_bytes: int,
        waves: int = 0,
        batching: BatchSettings | None = None,
        slow_factor: float = 0.0,
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
        self._ejection = Ejection(self.fleet, slow_factor)
        self._looping: LoopingCore | None = None
        self._single: SinglePassCore | None = None
        self._program: ProgramCore | None = None
        if pipeline.execution == "looping":
            self._looping = LoopingCore(self.fleet, bounds, first, self._waves_of)
        elif pipeline.execution == "program":
            self._program = ProgramCore(self.fleet, bounds, first, pipeline, batching or BatchSettings())
        else:
            self._single = SinglePassCore(self.fleet, bounds, first, batching, pipeline.stages)
        self._limits = Limits(
            looping=self._looping is not None,
            context_length=pipeline.context_length,
            vocab_size=pipeline.vocab_size,
            max_body_bytes=max_body_bytes,
        )
        self._clients = Clients(events, pipeline.name, batching, self._flush_soon, self._flush)
        self._overdue_drains = 0
        self._watch = ProcessWatch(self._on_exit)
        self._given_up = GivenUp()
        self._turned_away = TurnedAway()
        self._strangers = Strangers()
        self._alarm = Alarm(self._on_alarm)
        self._is_flush_due = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ticker: asyncio.Task[None] | None = None

    # ------------------------------------------------------------ Engine

    @property
    def limits(self) -> Limits:
        """See `Engine.limits`."""
        return self._limits

    def generate(self, request: Generation) -> AsyncIterator[list[int]]:
        """See `Engine.generate`."""
        return self._clients.generate(self._looping, request)

    async def run(
        self,
        payload: bytes,
        deadline_s: float | None = None,
        dtype: str = "uint8",
        shape: tuple[int, ...] | None = None,
        caller: Caller = NOBODY,
    ) -> bytes:
        """See `Engine.run`."""
        core = self._single
        if core is None:
            kind = self._pipeline.execution
            raise InvalidRequest(f"pipeline {self._pipeline.name} is {kind}: it takes no item")
        answer = await self._clients.answered(
            core, lambda: core.submit(payload, deadline_s, time.monotonic(), dtype, shape, caller), deadline_s
        )
        return answer.payload

    async def call(
        self, body: bytes, content_type: str, deadline_s: float | None = None, caller: Caller = NOBODY
    ) -> tuple[bytes, str]:
        """See `Engine.call`."""
        core = self._program
        if core is None:
            raise InvalidRequest(f"pipeline {self._pipeline.name} is no stream program")
        answer = await self._clients.answered(
            core, lambda: core.submit(body, content_type, deadline_s, time.monotonic(), caller), deadline_s
        )
        return answer.payload, answer.content_type

    # ------------------------------------------------------------ life

    def start(self) -> None:
        """Begins to read the mailbox on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._mailbox.fd, self._on_readable)
        self._watch.start()
        self._ticker = self._loop.create_task(self._tick())

    async def stop(self) -> None:
        """Stops reading and closes the mailbox."""
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
        if self._loop is not None:
            self._loop.remove_reader(self._mailbox.fd)
            self._watch.stop()
        self._alarm.clear()
        self._events.flush()
        self._mailbox.close(linger_s=0.2)

    @property
    def served(self) -> Served | None:
        """What clients got; None: it is not counted."""
        return self._clients.served

    def watch(self, tracer: Tracer | None, *, is_counting: bool = True) -> None:
        """Says, before the first request, what is noted of requests.

        Args:
            tracer: sends spans of those that are traced, None: none is.
            is_counting: whether answers are counted by how long they took.
        """
        graph = self._pipeline.graph
        if tracer is not None:
            modules = [module.name for module in graph.modules] if graph is not None else []
            self._clients.traces = Traces(tracer, self._pipeline.name, modules, self._replica_of)
        if not is_counting:
            self._clients.served = None

    def stats(self) -> RouterStats:
        """Counters for the controller and the report."""
        core, served = self._core, self._clients.served or Served()
        now_s = time.monotonic()
        return RouterStats(
            pipeline=self._pipeline.name,
            incarnation=self.incarnation,
            at_s=now_s,
            wall_s=time.time(),
            execution=self._pipeline.execution,
            requests=core.requests,
            completed=core.completed,
            refused=dict(self._clients.refused),
            replayed_tokens=core.replayed_tokens,
            moves=core.moves,
            stages=[meter.counters() for meter in core.meters],
            replicas=[replica_stats(worker, now_s) for worker in self.fleet.workers.values()],
            late_copies=self._looping.late_copies if self._looping is not None else 0,
            overdue_drains=self._overdue_drains,
            set_apart=core.suspects.set_apart,
            convicted=core.suspects.convicted,
            rested=self._ejection.rested,
            due=served.due,
            in_time=served.in_time,
            tenants=core.entrance.tenants(),
        )

    # ------------------------------------------------------------ inside

    @property
    def _core(self) -> LoopingCore | SinglePassCore | ProgramCore:
        core = self._looping or self._single or self._program
        assert core is not None
        return core

    def _replica_of(self, address: str) -> str:
        worker = self.fleet.workers.get(address)
        return worker.hello.replica if worker is not None else address

    def _waves_of(self, addresses: Iterable[str]) -> int:
        hellos = (self.fleet.workers[address].hello for address in addresses)
        return self._waves or waves_over(hellos, self._node, cpu_waves())

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now_s = time.monotonic()
            try:
                self._on_readable()
                rest(self._ejection, self._core, self._events, self._replica_of, now_s)
                for address, why in gone(self.fleet, self._mailbox, now_s):
                    self._lost(address, why)
                for address in self._strangers.leave(self.fleet.workers, now_s):
                    self._mailbox.forget(address)
                self._core.tick(now_s)
                self._flush()
                self._events.flush()
            except Exception:  # a bug: deadlines and deaths are to be noticed all the same
                log.exception("a tick of the router failed")

    def _on_readable(self) -> None:
        now_s = time.monotonic()
        for sender, body, _ in self._mailbox.drain():
            try:
                message = api.decode_from_worker(body)
            except UNREADABLE as error:
                log.warning("dropped a message of %d bytes from %s: %s", len(body), sender, error)
                continue
            self._handle(sender, message, now_s)
        self._flush()
        if self._mailbox.has_more() and self._loop is not None:
            self._loop.call_soon(self._on_readable)

    def _handle(self, sender: str, message: api.FromWorker, now_s: float) -> None:
        if not isinstance(message, api.Hello) and sender not in self.fleet.workers:
            if not isinstance(message, api.Bye) and not self._turned_away.is_silenced(sender, now_s):
                self._introduce(sender)
            return
        match message:
            case api.Tokens() | api.Parked() | api.Results() | api.Ran() | api.Failed() | api.Handed():
                self._handle_work(sender, message, now_s)
            case api.Heartbeat():
                self.fleet.beat(sender, message, now_s)
                self._ejection.beat(sender, message, now_s)
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
                self._overdue_drains += not message.reason and self.fleet.workers[sender].held_slots > 0
                self._lost(sender, f"{LAST_WORDS}{message.reason}" if message.reason else "bye")
            case _:
                assert_never(message)

    def _handle_work(
        self,
        sender: str,
        message: api.Tokens | api.Parked | api.Results | api.Ran | api.Failed | api.Handed,
        now_s: float,
    ) -> None:
        if isinstance(message, api.Failed):
            self._core.failed(message, now_s)
        elif isinstance(message, api.Tokens):
            if self._looping is not None:
                self._looping.tokens(message, now_s)
        elif isinstance(message, api.Handed):
            if self._looping is not None:
                self._looping.handed(sender, message, now_s)
        elif isinstance(message, api.Ran):
            if self._program is not None:
                self._program.ran(sender, message, now_s)
        elif self._single is None:
            log.warning("%s answered single-pass work that no pipeline of that kind gave", sender)
        elif isinstance(message, api.Results):
            self._single.results(sender, message, now_s)
        elif message.stage + 1 < self.fleet.stages:
            self._single.parked(sender, message, now_s)

    def _on_hello(self, sender: str, message: api.Hello, now_s: float) -> None:
        if (refused := speaks_otherwise(message)) is not None:
            self._turned_away.add(sender, refused, now_s)
            return
        if message.first not in (0, self._first) or message.call != self._given_up.times(sender):
            # From before the worker was given up, for another incarnation, or its link broke: all is void.
            self._lost(sender, "link broke")
            self._introduce(sender)
            return
        known = self.fleet.workers.get(sender)
        if known is not None and known.hello.pid != message.pid:
            self._lost(sender, "replaced")
        for address, other in list(self.fleet.workers.items()):
            if other.hello.replica == message.replica and address != sender:
                # Started anew: beyond this node its port, and so its address, is another one.
                self._lost(address, "replaced")
        refused = unfit(self._mailbox, self._pipeline, sender, message)
        if (refused := refused or self.fleet.hello(sender, message, now_s)) is not None:
            self._turned_away.add(sender, refused, now_s)
            return
        self._events.write("hello", replica=message.replica, stages=message.stages)
        self._core.suspects.returned_alive(process_of(message))
        if message.node == self._node and not self._watch.watch(sender, message.pid):
            self._lost(sender, "exited")

    def _introduce(self, sender: str) -> None:
        self._strangers.asked(sender, time.monotonic())
        call = self._given_up.times(sender)
        self._mailbox.send(sender, api.Introduce(api.VERSIONS.least, self._first, call, api.VERSIONS.most))

    def _on_exit(self, address: str, pid: int) -> None:
        # What the worker sent before it died is still in the mailbox and counts.
        self._on_readable()
        worker = self.fleet.workers.get(address)
        if worker is not None and worker.hello.pid == pid:
            self._lost(address, "exited")
        self._flush()

    def _lost(self, address: str, why: str) -> None:
        worker = self.fleet.remove(address)
        if worker is None:
            return
        ending = self._watch.ending(address, worker, why)
        self._given_up.add(address)
        log.info("worker %s is gone (%s): %s", worker.hello.replica, why, ending.words)
        self._events.write("lost", replica=worker.hello.replica, why=why, ending=ending.words)
        self._mailbox.forget(address)
        self._core.worker_lost(address, time.monotonic(), ending)

    def _on_alarm(self) -> None:
        timed = self._single or self._program
        if timed is not None:
            timed.on_timer(time.monotonic())
            self._flush()

    def _flush_soon(self) -> None:
        """Flushes once what comes within one turn of the event loop: items of one request make one batch."""
        if not self._is_flush_due and self._loop is not None:
            self._is_flush_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Sends what the core wants sent, tells clients what the core wants told."""
        self._is_flush_due = False
        sends, outcomes = self._core.take()
        timed = self._single or self._program
        if timed is not None and self._loop is not None:
            self._alarm.set(self._loop, timed.next_timer_s())
        for address, message in sends:
            if address not in self.fleet.workers:
                continue  # it was lost since: a connection made to it now would stay for good
            if not self._mailbox.send(address, message):
                log.error("the queue of %s is full: it counts as dead", address)
                if self._loop is not None:
                    self._loop.call_soon(self._lost, address, "unreachable")
            if self._events:
                log_sent(self._events, self._replica_of(address), message)
        for outcome in outcomes:
            self._clients.tell(outcome)
