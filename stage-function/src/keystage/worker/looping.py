"""Looping work of a worker: form waves (as owner of paths), run them, send them on.

Called by the engine loop only. `waves.WaveFormer` decides what steps, `sessions.SessionTable` what
is stale, the executor computes; this module moves the result to the next hop of the ring.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import OrderedDict, deque
from functools import partial

from keystage.bundle.api import Pipeline
from keystage.wire import api
from keystage.wire.events import EventLog
from keystage.wire.ring import RingError
from keystage.wire.sources import TensorSources
from keystage.worker.executor import Activation, Executor, StageError, StepOutput
from keystage.worker.outbox import TensorOutbox
from keystage.worker.sessions import SessionTable, select_rows
from keystage.worker.settings import EngineSettings, Status
from keystage.worker.waves import Wave, WaveFormer

log = logging.getLogger(__name__)

GONE_PATHS = 4096
"""Unrouted paths remembered: their last waves arrive within seconds, paths go with workers only."""


@dataclasses.dataclass(slots=True, eq=False)
class _Hop:
    """A wave that arrived, and whether its tensor has."""

    step: api.Step
    payload: bytes | None
    is_here: bool = True


class LoopingWork:
    """Waves to run here, in order of arrival; own waves when nothing else waits.

    Args are those of `engine.Engine`; `outbox` and `sources` are shared with it.
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
        self._table = SessionTable(settings.kv_tokens)
        self._former = WaveFormer(settings.wave_tokens, settings.max_batch)
        self._routes: dict[int, tuple[str, api.Route]] = {}
        self._turn: deque[int] = deque()
        self._steps: deque[tuple[api.Step, bytes | None]] = deque()
        # Waves of a path from the first whose tensor is on its way from another node.
        self._coming: dict[int, deque[_Hop]] = {}
        self._gone: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._table)

    @property
    def reserved(self) -> int:
        """Reserved KV positions."""
        return self._table.reserved

    def held_by(self, router: str) -> tuple[int, int]:
        """(sessions, reserved positions) of one router."""
        held = [self._table.reservation(session) for session, _ in self._table.of_router(router)]
        return len(held), sum(held)

    # ------------------------------------------------------------ messages

    def add_path(self, router: str, route: api.Route) -> None:
        """This worker owns a new path."""
        if route.path not in self._routes:
            self._routes[route.path] = (router, route)
            self._former.add_path(route.path, route.waves)
            self._turn.append(route.path)

    def remove_paths(self, paths: list[int]) -> None:
        """Paths are gone; their sessions come again under a higher epoch, their waves end here.

        A wave sent on to a dead worker would keep its ring slot for ever.
        """
        for path in paths:
            self._gone[path] = None
            if len(self._gone) > GONE_PATHS:
                self._gone.popitem(last=False)
            if self._routes.pop(path, None) is not None:
                self._former.remove_path(path)
                self._turn.remove(path)
        steps, self._steps = self._steps, deque()
        for step, payload in steps:
            if step.path in self._gone:
                self._acknowledge(step)
            else:
                self._steps.append((step, payload))

    def start(self, router: str, specs: list[api.SessionSpec]) -> None:
        """Takes sessions for paths owned here; refuses those of unknown paths, retryably."""
        for spec in specs:
            if spec.path in self._routes:
                self._former.start(spec)
            else:
                reason = f"path {spec.path} is not known at {self._settings.replica}"
                self._outbox.send(
                    router, api.Failed(self._settings.replica, [spec.session], [spec.epoch], reason, True)
                )

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
        self.remove_paths([path for path, (owner, _) in self._routes.items() if owner == router])

    def receive(self, step: api.Step, payload: bytes | None) -> None:
        """A wave arrives: to be run here, or back at its owner; one of a gone path is dropped."""
        if step.path in self._gone:
            self._acknowledge(step)
        elif step.stage == 0:
            self._former.returned(step.path, step.rows, step.tokens)
        else:
            hop = _Hop(step, payload)
            if step.ref is not None and payload is None:
                hop.is_here = not self._sources.begin([step.ref], [step.sender], partial(self._arrived, hop))
            if hop.is_here and step.path not in self._coming:
                self._steps.append((step, payload))
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
                self._steps.append((first.step, first.payload))
        if not waves:
            del self._coming[path]

    # ------------------------------------------------------------ run

    def has_work(self) -> bool:
        """Whether `run_one` would run something."""
        return bool(self._steps) or self._former.can_form()

    def run_one(self) -> None:
        """Runs the oldest wave that arrived, else forms one of an own path in turn."""
        if self._steps:
            step, payload = self._steps.popleft()
            self._run_received(step, payload)
            return
        for _ in range(len(self._turn)):
            path = self._turn[0]
            self._turn.rotate(-1)
            wave = self._former.form(path)
            if wave is not None:
                self._run_own(wave)
                return

    def _run_own(self, wave: Wave) -> None:
        router, route = self._routes[wave.path]
        step = api.Step(
            wave.path, wave.wave, 0, router, route.replicas, route.addresses, self._outbox.address,
            wave.rows, [], None,
        )  # fmt: skip
        self._run(step, wave.ids, None)

    def _run_received(self, step: api.Step, payload: bytes | None) -> None:
        activation = None
        if step.ref is not None:
            try:
                # Writable, as a ring and a fetched tensor are: torch warns of anything else.
                data = memoryview(bytearray(payload or b""))
                if payload is None:
                    data = self._sources.view(step.ref, step.sender)
                elif data.nbytes != step.ref.nbytes:
                    raise RingError(f"{data.nbytes} bytes came for a tensor of {step.ref.nbytes}")
                activation = Activation(step.ref.dtype, step.ref.shape, data)
            except RingError as error:
                self._fail(step.router, step.rows, str(error), retryable=True)
        self._run(step, [], activation)
        self._acknowledge(step)

    def _acknowledge(self, step: api.Step) -> None:
        if step.ref is not None and step.ref.pid:
            self._sources.release(step.ref, step.sender)
            self._outbox.taken(step.sender, step.ref.slot)

    def _run(self, step: api.Step, ids: list[int], activation: Activation | None) -> None:
        first, last = step.stage, step.stage
        while last < self._last_stage and step.addresses[last + 1] == self._outbox.address:
            last += 1
        rows, output = step.rows, StepOutput(None, [])
        if rows.sessions and (activation is not None or first == 0):
            rows, ids, activation = self._admit(step, ids, activation)
        else:
            rows = select_rows(rows, [])
        if rows.sessions:
            started_s = time.perf_counter()
            try:
                output = self._executor.step(first, last, ids, activation, rows)
            except StageError as error:
                self._fail(step.router, rows, str(error), error.retryable)
                rows = select_rows(rows, [])
            self._account(step, first, last, rows, time.perf_counter() - started_s)
        self._send_on(step, last, rows, output)

    def _admit(
        self, step: api.Step, ids: list[int], activation: Activation | None
    ) -> tuple[api.StepRows, list[int], Activation | None]:
        """Drops stale rows from the wave and opens the sessions that begin here."""
        rows = step.rows
        admission = self._table.admit(rows, step.router, step.stage)
        keep = admission.keep
        for session, tokens in admission.opened:
            try:
                self._executor.open(session, tokens)
            except StageError as error:
                i = rows.sessions.index(session)
                self._fail(step.router, select_rows(rows, [i]), str(error), error.retryable)
                keep = [kept for kept in keep if kept != i]
        if admission.refused:
            reason = (
                f"{self._settings.replica} has {self._table.kv_tokens - self._table.reserved} of "
                f"{self._table.kv_tokens} KV positions free, too few for the session"
            )
            self._fail(step.router, select_rows(rows, admission.refused), reason, retryable=True)
        if len(keep) == len(rows.sessions):
            return rows, ids, activation
        kept = select_rows(rows, keep)
        if activation is not None:
            activation = _select_tokens(activation, rows.counts, keep)
        elif ids:
            ids = _select_ids(ids, rows.counts, keep)
        return kept, ids, activation

    def _send_on(self, step: api.Step, last: int, rows: api.StepRows, output: StepOutput) -> None:
        if last < self._last_stage:
            build = partial(_next_step, step, last + 1, rows, self._outbox.address)
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
                ),
            )
        back = _next_step(step, 0, rows, self._outbox.address, None, tokens)
        if step.addresses[0] == self._outbox.address:
            self._former.returned(step.path, rows, tokens)
        else:
            self._outbox.send(step.addresses[0], back)

    def _account(self, step: api.Step, first: int, last: int, rows: api.StepRows, seconds: float) -> None:
        for stage in range(first, last + 1):
            self._status.use[stage].add(seconds / (last - first + 1), len(rows.sessions))
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
        log.warning("%d sessions failed: %s", len(rows.sessions), reason)
        self._outbox.send(
            router, api.Failed(self._settings.replica, rows.sessions, rows.epochs, reason, retryable)
        )


def _next_step(
    step: api.Step,
    stage: int,
    rows: api.StepRows,
    sender: str,
    ref: api.TensorRef | None,
    tokens: list[int] | None = None,
) -> api.Step:
    return api.Step(
        step.path,
        step.wave,
        stage,
        step.router,
        step.replicas,
        step.addresses,
        sender,
        rows,
        tokens or [],
        ref,
    )


def _select_tokens(activation: Activation, counts: list[int], keep: list[int]) -> Activation:
    """The rows' share of a [tokens, ...] block; axis 0 is the token axis."""
    total = activation.shape[0]
    width = activation.data.nbytes // total if total else 0
    offsets = [0]
    for count in counts:
        offsets.append(offsets[-1] + count)
    parts = [bytes(activation.data[offsets[i] * width : offsets[i + 1] * width]) for i in keep]
    shape = (sum(counts[i] for i in keep), *activation.shape[1:])
    return Activation(activation.dtype, shape, memoryview(b"".join(parts)))


def _select_ids(ids: list[int], counts: list[int], keep: list[int]) -> list[int]:
    offsets = [0]
    for count in counts:
        offsets.append(offsets[-1] + count)
    return [token for i in keep for token in ids[offsets[i] : offsets[i + 1]]]
