"""The engine loop: receive, run one wave or batch, hand on; one thread, one device.

Before it: `app` loads the executor. After it: other workers' engines (Step), the router (Tokens,
Parked, Results). It owns the mailbox, the ring and the session table; it reads no environment,
and HTTP lives in another thread that only reads `status` and queues `single` calls.

Looping work is in `looping.LoopingWork`, single-pass work in `single.SinglePassWork`, that of stream
programs in `program.ProgramWork`; this module keeps what they share: routers and their credit, life and
drain, heart beat, the loop itself.
"""

from __future__ import annotations

import logging
import queue
import time
from typing import assert_never

from keystage.bundle.api import Pipeline
from keystage.wire import api
from keystage.wire.events import EventLog
from keystage.wire.mailbox import Mailbox
from keystage.wire.ring import Ring
from keystage.wire.sources import TensorSources
from keystage.wire.unreadable import UNREADABLE
from keystage.wire.upkeep import Upkeep
from keystage.wire.versions import common, differ, spoken
from keystage.worker.device_lane import DeviceLane
from keystage.worker.executor import Executor, StageError
from keystage.worker.looping import LoopingWork
from keystage.worker.outbox import TensorOutbox
from keystage.worker.program import ProgramWork
from keystage.worker.settings import EngineSettings, StageUse, Status
from keystage.worker.single import SinglePassWork
from keystage.worker.states import WorkerState, advance

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
LINK_BROKE = -1
"""In place of `Introduce.call` in a `Hello`: the router takes this worker for lost, and begins anew."""
ACK_DELAY_S = 0.02
"""An idle worker keeps acknowledgements back this long: a full ring waits no longer than that."""
BROKEN_S = 7.0
"""A peer to whom the link broke is dead for its router by then (5 s without a heartbeat), or it lives."""
MOST_REASON = 1000
"""Characters of the last words: a traceback is in the log."""
IDLE_WAIT_S = 0.2
"""Longest sleep of an idle loop: a bound on how late a drain or an HTTP call is noticed."""


class Engine:
    """One worker's loop.

    Args:
        settings: who and how much.
        pipeline: the pipeline served.
        executor: what computes.
        mailbox: bound inbox.
        ring: this worker's ring.
        events: event log.
        status: shared with the HTTP thread.
        sources: where tensors come from; None: from rings of this node only.
        lane: of the device that the executor leaves tensors on, None: it leaves them on the host.
    """

    def __init__(
        self,
        settings: EngineSettings,
        pipeline: Pipeline,
        executor: Executor,
        mailbox: Mailbox,
        ring: Ring,
        events: EventLog,
        status: Status,
        sources: TensorSources | None = None,
        lane: DeviceLane | None = None,
    ) -> None:
        self._settings = settings
        self._pipeline = pipeline
        self._executor = executor
        self._mailbox = mailbox
        self._ring = ring
        self._events = events
        self._status = status
        for stage in settings.stages:
            status.use.setdefault(stage, StageUse())
        self._outbox = TensorOutbox(mailbox, ring, lane)
        self._granted: dict[str, tuple[int, int]] = {}
        self._heard: dict[str, tuple[int, int]] = {}
        self._broken: dict[str, float] = {}
        self._drain_until_s: float | None = None
        self._paid_s = 0.0
        self._sources = sources = sources or TensorSources()
        if sources.fd is not None:
            mailbox.watch(sources.fd)
        self._refused = 0
        self._looping = LoopingWork(settings, pipeline, executor, self._outbox, sources, events, status)
        self._single = SinglePassWork(settings, executor, self._outbox, sources, events, status)
        self._program = ProgramWork(settings, executor, self._outbox, sources, events, status)
        self._is_looping = pipeline.execution == "looping"
        self._count_blocks()

    def run(self) -> None:
        """Introduces itself to the routers and works until drained.

        The state must be `ready`; it is `stopped` on return.
        """
        for router in self._settings.routers:
            self._introduce(router)
        next_beat_s = 0.0
        upkeep = Upkeep()
        while self._status.state is not WorkerState.STOPPED:
            self._receive(0.0 if self._has_work() else min(IDLE_WAIT_S, self._looping.idle_s()))
            self._sources.poll()
            if self._outbox.flush():
                self._work()
            now_s = time.monotonic()
            self._status.beat_s = now_s
            if self._outbox.owes and now_s - self._paid_s >= ACK_DELAY_S:
                # A worker that others keep busy must not starve a producer of its slots.
                self._outbox.pay()
                self._paid_s = now_s
            if now_s >= next_beat_s:
                self._beat()
                upkeep.now_and_then()
                next_beat_s = now_s + HEARTBEAT_S
            self._serve_calls()
            self._set_threads()
            self._drain(now_s)
        self._events.flush()

    def say_last(self, reason: str) -> None:
        """The loop has failed and the process will end: routers need not wait for its silence."""
        self._status.state, self._status.reason = WorkerState.FAILED, reason
        for router in self._settings.routers:
            self._mailbox.send(router, api.Bye(self._settings.replica, reason[:MOST_REASON]))

    # ------------------------------------------------------------ receive

    def _receive(self, timeout_s: float) -> None:
        if timeout_s:
            if self._outbox.owes and not self._mailbox.wait(ACK_DELAY_S):
                self._outbox.pay()
            if not self._mailbox.wait(timeout_s):
                return
        for sender, body, payload in self._mailbox.drain():
            try:
                message = api.decode_to_worker(body)
            except UNREADABLE as error:
                log.warning("dropped a message of %d bytes from %s: %s", len(body), sender, error)
                continue
            self._handle(sender, message, payload)

    def _handle(self, sender: str, message: api.ToWorker, payload: bytes | None) -> None:
        match message:
            case api.Step():
                self._looping.receive(message, payload)
            case api.Ack():
                self._on_ack(sender, message)
            case api.Start() | api.Move():
                self._looping.start(sender, message.specs)
            case api.Work() | api.Fetch() | api.Run() | api.Evict():
                self._handle_late_bound(sender, message)
            case api.Release() | api.Cancel():
                self._looping.release(message.sessions, message.epochs)
            case api.Hand() | api.KvState():
                self._looping.hand_over(sender, message)
            case api.Route():
                self._looping.add_path(sender, message)
            case api.Unroute():
                self._looping.remove_paths(message.paths)
                for address in message.dead:
                    self._broken.pop(address, None)
                    self._outbox.forget(address)
                    self._sources.forget(address)
            case api.Introduce():
                self._on_introduce(sender, message)
            case api.Drain():
                self._start_drain(message.deadline_s)
            case _:
                assert_never(message)

    def _handle_late_bound(self, sender: str, message: api.Work | api.Fetch | api.Run | api.Evict) -> None:
        match message:
            case api.Run():
                self._program.receive(sender, message)
            case api.Evict():
                self._program.evict(message)
            case api.Work() | api.Fetch():
                self._single.receive(sender, message)

    def _on_ack(self, sender: str, message: api.Ack) -> None:
        self._single.acknowledged(message.slots)
        self._program.acknowledged(message.slots)
        self._outbox.acknowledge(message.slots)
        if message.mapped and self._outbox.lane is not None:
            self._outbox.lane.heard(sender, message.mapped)

    def _on_introduce(self, router: str, message: api.Introduce) -> None:
        theirs = spoken(message.wire, message.newest)
        if common(api.VERSIONS, theirs) is None:
            log.error("%s", differ(f"router {router}", theirs, "this worker", api.VERSIONS))
            return
        self._heard[router] = message.first, message.call
        self._looping.forget_router(router, message.first)
        self._single.forget_router(router)
        self._program.forget_router(router)
        if len(self._settings.routers) == 1:
            # Peers that died meanwhile, or took this worker for dead, acknowledge nothing.
            self._outbox.forget_all()
        self._introduce(router)

    def _introduce(self, router: str) -> None:
        s = self._settings
        hello = api.Hello(
            api.VERSIONS.least, self._pipeline.name, s.stages, s.replica, s.bundle, s.device,
            s.slots, s.kv_tokens, s.max_batch, self._mailbox.address, s.pid, s.node, self._is_looping,
            *self._heard.get(router, (0, 0)), api.VERSIONS.most,
        )  # fmt: skip
        self._mailbox.send(router, hello)
        # Credit goes first, so that a router that hears `Ready` can bind at once.
        self._granted.pop(router, None)
        self._grant()
        is_ready = self._status.state is WorkerState.READY
        self._mailbox.send(router, api.Ready(s.replica) if is_ready else api.Draining(s.replica))

    # ------------------------------------------------------------ work

    def _has_work(self) -> bool:
        if self._outbox.is_blocked:
            return False
        return self._looping.has_work() or self._single.has_work() or self._program.has_work()

    def _work(self) -> None:
        if self._is_looping:
            self._looping.run_one()
        elif self._single.has_work():
            self._single.run_one()
        else:
            self._program.run_one()

    def _serve_calls(self) -> None:
        try:
            body, answer = self._status.calls.get_nowait()
        except queue.Empty:
            return
        if not answer.set_running_or_notify_cancel():
            return  # the caller has given up waiting
        try:
            answer.set_result(self._executor.single(body))
        except StageError as error:
            answer.set_exception(error)

    def _set_threads(self) -> None:
        wanted = self._status.threads_wanted
        if wanted and wanted != self._status.threads:
            self._executor.set_threads(wanted)
            self._status.threads = wanted
            self._events.write("threads", replica=self._settings.replica, threads=wanted)

    # ------------------------------------------------------------ life

    def _beat(self) -> None:
        s, status = self._settings, self._status
        status.held = self._held() + self._program.kept
        status.reserved = self._looping.reserved
        status.corrupt = self._sources.checker.corrupt
        self._count_blocks()
        uses = [status.use[stage] for stage in s.stages]
        beat = api.Heartbeat(
            s.replica, status.state.value, status.held, status.reserved,
            [use.busy_s for use in uses], [use.batches for use in uses], [use.rows for use in uses],
            status.kv_blocks, status.kv_blocks - status.kv_blocks_used, status.preemptions,
            [use.tokens for use in uses],
        )  # fmt: skip
        self._mend_links(time.monotonic())
        for router in s.routers:
            self._mailbox.send(router, beat)
        self._grant()
        if self._mailbox.refused != self._refused:
            self._refused = self._mailbox.refused
            self._events.write("refused_peers", replica=s.replica, peers=self._refused)
        self._events.flush()

    def _mend_links(self, now_s: float) -> None:
        """Begins anew with routers where messages may be lost: to one of them, or to a worker that lives."""
        for peer in self._mailbox.broken():
            self._broken[peer] = now_s + (0.0 if peer in self._settings.routers else BROKEN_S)
        due = [peer for peer, due_s in self._broken.items() if due_s <= now_s]
        for peer in due:
            del self._broken[peer]
        for router in self._settings.routers:
            if router in due or not set(due) <= set(self._settings.routers):
                log.warning("the link to %s broke: what was on its way may be lost", ", ".join(due))
                # A call that no router makes: what it knows of this worker is void.
                self._heard[router] = self._heard.get(router, (0, 0))[0], LINK_BROKE
                self._introduce(router)

    def _held(self) -> int:
        """Sessions, items and turns that take a slot."""
        return len(self._looping) + len(self._single) + len(self._program)

    def _count_blocks(self) -> None:
        free, total = self._executor.kv_blocks if self._is_looping else (0, 0)
        self._status.kv_blocks, self._status.kv_blocks_used = total, total - free
        self._status.preemptions = self._looping.preemptions

    def _grant(self) -> None:
        """Tells each router how much it may hold: what it holds plus an equal share of the rest."""
        s = self._settings
        share = len(s.routers)
        for router in s.routers:
            if self._status.state is not WorkerState.READY:
                grant = (0, 0)
            elif share == 1:
                grant = (s.slots, s.kv_tokens)
            else:
                held, reserved = self._looping.held_by(router)
                held += self._single.held_by(router) + self._program.held_by(router)
                grant = (
                    held + max(0, s.slots - self._held()) // share,
                    reserved + max(0, s.kv_tokens - self._looping.reserved) // share,
                )
            if self._granted.get(router) != grant:
                self._granted[router] = grant
                self._mailbox.send(router, api.Credit(s.replica, *grant))

    def _start_drain(self, deadline_s: float) -> None:
        if self._status.state is not WorkerState.READY:
            return
        self._status.state = advance(self._status.state, WorkerState.DRAINING)
        self._drain_until_s = time.monotonic() + min(deadline_s, self._settings.drain_s)
        self._events.write("draining", replica=self._settings.replica)
        for router in self._settings.routers:
            self._mailbox.send(router, api.Draining(self._settings.replica))
        self._grant()

    def _drain(self, now_s: float) -> None:
        if self._status.drain:
            self._start_drain(self._settings.drain_s)
        if self._drain_until_s is None:
            return
        is_empty = not self._held() and not self._program.kept and not self._outbox.slots
        if is_empty or now_s >= self._drain_until_s:
            if not is_empty:
                log.warning("drain time is over with %d sessions held", self._held() + self._program.kept)
            self._outbox.pay()
            for router in self._settings.routers:
                self._mailbox.send(router, api.Bye(self._settings.replica))
            self._status.state = advance(self._status.state, WorkerState.STOPPED)
