"""Looping work of a worker: form waves (as owner of paths), run them, send them on.

Called by the engine loop only. `waves.WaveFormer` decides what steps and who holds KV blocks,
`intake.Intake` what of a wave runs here, the executor computes; this module moves the result to the
next hop of the ring.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial

import msgspec

from keystage.bundle.api import Pipeline
from keystage.models.blocks import BLOCK_TOKENS
from keystage.wire import api
from keystage.wire.events import EventLog
from keystage.wire.ring import RingError
from keystage.wire.sources import TensorSources
from keystage.worker.claims import Claims
from keystage.worker.executor import (
    Activation,
    AnyActivation,
    DeviceActivation,
    Executor,
    StageError,
    StepOutput,
)
from keystage.worker.handing import Handing, input_of
from keystage.worker.intake import Intake
from keystage.worker.outbox import TensorOutbox
from keystage.worker.rows import next_step, select_ids, select_rows, select_tokens
from keystage.worker.sessions import SessionTable
from keystage.worker.settings import EngineSettings, Status
from keystage.worker.step_times import arrived, began, ended, opened
from keystage.worker.waves import Wave, WaveFormer

log = logging.getLogger(__name__)

GONE_PATHS = 4096
"""Unrouted paths remembered: their last waves arrive within seconds, paths go with workers only."""


@dataclasses.dataclass(slots=True, eq=False)
class _Hop:
    """A wave that arrived, when, and whether its tensor has."""

    step: api.Step
    payload: bytes | None
    came_s: float
    is_here: bool = True


class LoopingWork:
    """Waves to run here, in order of arrival; own waves when nothing else waits.

    Args are those of `engine.Engine`; `outbox` and `sources` are shared with it.

    Attributes:
        clock: seconds; only paths on which somebody waits for KV blocks look at it.
    """

    def __init__(
        self,
        settings: EngineSettings,
        pipeline: Pipeline,
        executor: Executor,
        outbox: TensorOutbox,
        sources: TensorSources,
        events: EventLog,
        status: Status,
    ) -> None:
        self._settings = settings
        self._last_stage = len(pipeline.stages) - 1
        self._executor = executor
        self._outbox = outbox
        self._sources = sources
        self._events = events
        self._status = status
        self.clock: Callable[[], float] = time.monotonic
        self._table = SessionTable()
        self._claims = Claims()
        self._former = WaveFormer(settings.wave_tokens, settings.max_batch)
        self._intake = Intake(settings.replica, executor, self._table, self._claims, self._former.input_of)
        self._handing = Handing(
            executor, self._table, self._claims, outbox, sources, is_copying=settings.is_copying
        )
        self._routes: dict[int, tuple[str, api.Route]] = {}
        self._turn: deque[int] = deque()
        # Waves to run, with what came of their tensors, and when they arrived.
        self._steps: deque[tuple[api.Step, bytes | None, float]] = deque()
        # Waves of a path from the first whose tensor is on its way from another node.
        self._coming: dict[int, deque[_Hop]] = {}
        self._gone: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        """Sessions that hold state here, or are owned here and wait for it."""
        return len({*self._table.sessions, *self._former.sessions})

    @property
    def reserved(self) -> int:
        """KV positions in blocks that are taken."""
        free, total = self._executor.kv_blocks
        return (total - free) * BLOCK_TOKENS

    @property
    def preemptions(self) -> int:
        """Preemptions on the paths owned here."""
        return self._former.preemptions

    def held_by(self, router: str) -> tuple[int, int]:
        """(sessions, KV positions in their blocks) of one router."""
        held = {session for session, _ in self._table.of_router(router)}
        positions = sum(self._table.positions(session) for session in held)
        for path, (owner, _) in self._routes.items():
            if owner == router:
                held.update(self._former.waiting(path))
        return len(held), positions

    # ------------------------------------------------------------ messages

    def add_path(self, router: str, route: api.Route) -> None:
        """This worker owns a new path."""
        if route.path not in self._routes:
            self._routes[route.path] = (router, route)
            self._former.add_path(route.path, route.waves, route.kv_blocks)
            self._turn.append(route.path)

    def remove_paths(self, paths: list[int]) -> None:
        """Paths are gone; their sessions come again under a higher epoch, their waves end here.

        A wave sent on to a dead worker would keep its ring slot for ever.
        """
        for path in paths:
            self._gone[path] = None
            self._claims.forget_path(path)
            if len(self._gone) > GONE_PATHS:
                self._gone.popitem(last=False)
            if self._routes.pop(path, None) is not None:
                self._former.remove_path(path)
                self._turn.remove(path)
        steps, self._steps = self._steps, deque()
        for step, payload, came_s in steps:
            if step.path in self._gone:
                self._acknowledge(step)
            else:
                self._steps.append((step, payload, came_s))

    def start(self, router: str, specs: list[api.SessionSpec]) -> None:
        """Takes sessions for paths owned here; refuses what never fits, and unknown paths (retryably)."""
        for spec in specs:
            is_known = spec.path in self._routes
            if is_known:
                reason = self._former.start(spec)
            else:
                reason = f"path {spec.path} is not known at {self._settings.replica}"
            if reason is not None:
                failed = api.Failed(
                    self._settings.replica, [spec.session], [spec.epoch], reason, not is_known
                )
                self._outbox.send(router, failed)

    def hand_over(self, sender: str, message: api.Hand | api.KvState) -> None:
        """A session is to go on elsewhere with its KV state, or comes with it.

        It runs where it is until its router moves it.
        """
        if isinstance(message, api.KvState):
            self._handing.take(message)
            return
        self._former.leave(message.session, message.epoch)
        self._handing.hand(sender, message)

    def release(self, sessions: list[int], epochs: list[int]) -> None:
        """Frees sessions up to the given epochs."""
        for session, epoch in zip(sessions, epochs, strict=True):
            self._former.drop(session, epoch)
            if self._table.release(session, epoch):
                self._executor.close(session)

    def forget_router(self, router: str, first: int) -> None:
        """A router restarted: all it owned here is void, and sessions numbered below `first` stay so."""
        self._table.void_below(router, first)
        for session, epoch in self._table.of_router(router):
            self.release([session], [epoch])
        self._claims.forget_router(router)
        self.remove_paths([path for path, (owner, _) in self._routes.items() if owner == router])

    def receive(self, step: api.Step, payload: bytes | None) -> None:
        """A wave arrives: to be run here, or back at its owner; one of a gone path is dropped."""
        if step.path in self._gone:
            self._acknowledge(step)
        elif step.stage == 0:
            self._former.returned(step, self.clock())
        else:
            hop = _Hop(step, payload, time.perf_counter())
            if step.times is not None:
                arrived(step.times, hop.came_s)
            if step.ref is not None and payload is None:
                hop.is_here = not self._sources.begin([step.ref], [step.sender], partial(self._arrived, hop))
            if hop.is_here and step.path not in self._coming:
                self._steps.append((step, payload, hop.came_s))
            else:
                self._coming.setdefault(step.path, deque()).append(hop)

    def _arrived(self, hop: _Hop) -> None:
        """The tensor of a wave from another node is here: it may run, and those of its path behind it.

        Their order must be kept: a prompt's chunks travel in several waves at once.
        """
        hop.is_here = True
        path = hop.step.path
        waves = self._coming[path]
        while waves and waves[0].is_here:
            first = waves.popleft()
            if path in self._gone:
                self._acknowledge(first.step)
            else:
                self._steps.append((first.step, first.payload, first.came_s))
        if not waves:
            del self._coming[path]

    # ------------------------------------------------------------ run

    def has_work(self) -> bool:
        """Whether `run_one` would run something."""
        return bool(self._steps) or self._former.can_form(self.clock())

    def idle_s(self) -> float:
        """Seconds until there may be work though no message comes; infinite: never."""
        now_s = self.clock()
        return self._former.wake_s(now_s) - now_s

    def run_one(self) -> None:
        """Runs the oldest wave that arrived, else forms one of an own path in turn."""
        if self._steps:
            step, payload, came_s = self._steps.popleft()
            self._status.use[step.stage].wave_wait_s += time.perf_counter() - came_s
            self._run_received(step, payload)
            return
        for _ in range(len(self._turn)):
            path = self._turn[0]
            self._turn.rotate(-1)
            wave = self._former.form(path, self.clock())
            if wave is not None:
                self._run_own(wave)
                return

    def _run_own(self, wave: Wave) -> None:
        router, route = self._routes[wave.path]
        step = api.Step(
            wave.path, wave.wave, 0, router, route.replicas, route.addresses, self._outbox.address,
            wave.rows, [], None, wave.drops, wave.drop_epochs,
            claim=wave.claim, claim_blocks=wave.claim_blocks,
            times=opened(time.perf_counter()) if wave.is_timed else None,
        )  # fmt: skip
        self._run(step, wave.ids, None)

    def _run_received(self, step: api.Step, payload: bytes | None) -> None:
        activation = None
        if step.ref is not None:
            try:
                activation = self._taken_from(step.ref, step.sender, payload)
            except RingError as error:
                reason = (
                    f"stage {step.stage} at {self._settings.replica}: {step.ref.nbytes} bytes, the "
                    f"activation of {len(step.rows.sessions)} rows, cannot be had: {error}"
                )
                self._fail(step.router, step.rows, reason, retryable=True)
        self._run(step, [], activation)
        self._acknowledge(step)

    def _taken_from(self, ref: api.TensorRef, sender: str, payload: bytes | None) -> AnyActivation:
        """The tensor that a message names, where it lies.

        Raises:
            RingError: it cannot be had.
        """
        if payload is None:
            return input_of(ref, sender, self._outbox.lane, self._sources)
        # Writable, as a ring and a fetched tensor are: torch warns of anything else.
        data = memoryview(bytearray(payload))
        if data.nbytes != ref.nbytes:
            raise RingError(f"{data.nbytes} bytes came for a tensor of {ref.nbytes}")
        self._sources.checker.check(ref, data, sender)
        return Activation(ref.dtype, ref.shape, data)

    def _acknowledge(self, step: api.Step) -> None:
        if step.ref is not None and step.ref.pid:
            if self._outbox.lane is not None:
                self._outbox.lane.settle()  # a copy out of the slot may still be on its way
            self._sources.release(step.ref, step.sender)
            self._outbox.taken(step.sender, step.ref.slot)

    def _run(self, step: api.Step, ids: list[int], activation: AnyActivation | None) -> None:
        first, last = step.stage, step.stage
        while last < self._last_stage and step.addresses[last + 1] == self._outbox.address:
            last += 1
        output = StepOutput(None, [])
        step, ids, activation = self._take_in(step, ids, activation)
        rows = step.rows
        is_run, started_s = bool(rows.sessions), time.perf_counter()
        if step.times is not None:
            began(step.times, started_s)
        if is_run:
            try:
                output = self._executor.step(first, last, ids, activation, rows)
            except StageError as error:
                self._fail(step.router, rows, str(error), error.retryable)
                rows = select_rows(rows, [])
        seconds = time.perf_counter() - started_s
        if step.times is not None and not isinstance(output.activation, DeviceActivation):
            ended(step.times, started_s + seconds, last - first + 1)
        self._send_on(step, last, rows, output)
        if isinstance(output.activation, DeviceActivation):
            seconds = time.perf_counter() - started_s  # only the copy has waited for what was queued
        if is_run:
            self._account(step, first, last, rows, seconds)

    def _take_in(
        self, step: api.Step, ids: list[int], activation: AnyActivation | None
    ) -> tuple[api.Step, list[int], AnyActivation | None]:
        """Frees what the wave drops; leaves the rows that run here, with their blocks reserved."""
        rows = step.rows
        taken = self._intake.take(
            step,
            is_first_visit=self._outbox.address not in step.addresses[: step.stage],
            has_input=activation is not None or step.stage == 0,
        )
        for failure in taken.failures:
            self._fail(step.router, select_rows(rows, [failure.row]), failure.reason, failure.retryable)
        keep = taken.keep
        if len(keep) < len(rows.sessions):
            if activation is not None:
                whole = Activation(activation.dtype, activation.shape, self._outbox.bytes_of(activation))
                activation = select_tokens(whole, rows.counts, keep)
            ids = select_ids(ids, rows.counts, keep) if ids else ids
        step = msgspec.structs.replace(
            step,
            rows=rows if len(keep) == len(rows.sessions) else select_rows(rows, keep),
            starved=[*step.starved, *(rows.sessions[i] for i in taken.starved)],
            free_blocks=min(step.free_blocks, taken.free_blocks),
            room_blocks=min(step.room_blocks, taken.room_blocks),
        )
        return step, ids, activation

    def _send_on(self, step: api.Step, last: int, rows: api.StepRows, output: StepOutput) -> None:
        if last < self._last_stage:
            build = partial(next_step, step, last + 1, rows, self._outbox.address)
            if output.activation is not None and rows.sessions:
                self._outbox.push(step.addresses[last + 1], output.activation, build)
            else:
                self._outbox.send(step.addresses[last + 1], build(None))
            return
        tokens = output.tokens if rows.sessions else []
        sampled = [i for i, token in enumerate(tokens) if token >= 0]
        if sampled:
            self._outbox.send(
                step.router,
                api.Tokens(
                    self._settings.replica,
                    step.path,
                    [rows.sessions[i] for i in sampled],
                    [rows.epochs[i] for i in sampled],
                    [rows.positions[i] + rows.counts[i] for i in sampled],
                    [tokens[i] for i in sampled],
                    step.times,
                ),
            )
        back = next_step(step, 0, rows, self._outbox.address, None, tokens)
        if step.addresses[0] == self._outbox.address:
            self._former.returned(back, self.clock())
        else:
            self._outbox.send(step.addresses[0], back)

    def _account(self, step: api.Step, first: int, last: int, rows: api.StepRows, seconds: float) -> None:
        for stage in range(first, last + 1):
            share_s = seconds / (last - first + 1)
            self._status.use[stage].add(share_s, len(rows.sessions), sum(rows.counts))
        if self._events:
            prefill = sum(
                count > 1 or position == 0
                for count, position in zip(rows.counts, rows.positions, strict=True)
            )
            self._events.write(
                "wave", path=step.path, wave=step.wave, stages=[first, last], rows=len(rows.sessions),
                prefill_rows=prefill, decode_rows=len(rows.sessions) - prefill, tokens=sum(rows.counts),
                sessions=rows.sessions, compute_s=round(seconds, 6),
            )  # fmt: skip

    def _fail(self, router: str, rows: api.StepRows, reason: str, retryable: bool) -> None:
        log.warning("%d sessions %s failed: %s", len(rows.sessions), rows.sessions[:8], reason)
        self._outbox.send(
            router, api.Failed(self._settings.replica, rows.sessions, rows.epochs, reason, retryable)
        )
