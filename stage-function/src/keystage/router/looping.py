"""The core of a looping pipeline: queue, bind, move, replay, deliver. Pure; the shell is `node`.

Events come in as method calls with the time; what is to be sent and what clients are told comes
out of `take`. Sessions are bound first come, first served, once every stage has credit for them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from keystage.models.blocks import BLOCK_TOKENS
from keystage.router.admission import AdmissionBounds, Gate
from keystage.router.counters import StageMeter
from keystage.router.engine import Failure, Generation, InvalidRequest, Refusal, TooLate
from keystage.router.fleet import Fleet
from keystage.router.handings import Handings
from keystage.router.paths import Bound, Path, PathBook, plan_moves
from keystage.router.sessions import Deliver, Outcome, Refuse, Session, SessionState, advance
from keystage.router.trails import Trail, packed
from keystage.wire import api

WavesOf = Callable[[Iterable[str]], int]


class LoopingCore:
    """Sessions of one looping pipeline.

    Args:
        fleet: the workers.
        bounds: admission bounds.
        first_number: base of session and path numbers, unique to this incarnation.
        waves_of: how many waves may be in flight over these workers.
    """

    def __init__(self, fleet: Fleet, bounds: AdmissionBounds, first_number: int, waves_of: WavesOf) -> None:
        self.fleet = fleet
        self.gate = Gate(bounds)
        self.meters = [StageMeter(stage) for stage in range(fleet.stages)]
        self.requests = 0
        self.completed = 0
        self.replayed_tokens = 0
        self.moves = 0
        self.late_copies = 0
        self._next = first_number
        self._waves_of = waves_of
        self._paths = PathBook(first_number)
        self._sessions: dict[int, Session] = {}
        self._queue: deque[Session] = deque()
        self._sends: list[tuple[str, api.Message]] = []
        self._outcomes: list[Outcome] = []
        self._releases: dict[str, tuple[list[int], list[int]]] = {}
        self._moved: dict[str, list[api.SessionSpec]] = {}
        self._handings = Handings(fleet)

    def take(self) -> tuple[list[tuple[str, api.Message]], list[Outcome]]:
        """What is to be sent, in order, and what clients are to be told; forgets both."""
        self._send_releases()
        taken = self._sends, self._outcomes
        self._sends, self._outcomes = [], []
        return taken

    # ------------------------------------------------------------ clients

    def submit(self, request: Generation, now_s: float, trail: Trail | None = None) -> int:
        """Admits a request; returns its session number. What happens to it is noted in `trail`.

        Raises:
            Refusal: the queue is full, or no worker could ever hold the session.
        """
        need = len(request.prompt) + request.max_tokens
        self._check_fits(need)
        self.gate.enter(request.nbytes)
        bounds = self.gate.bounds
        deadline_s = request.deadline_s if request.deadline_s is not None else bounds.default_deadline_s
        tokens = [*request.prompt, *request.resumed]
        session = Session(self._next, request, tokens, now_s, now_s + deadline_s, trail=trail)
        self._next += 1
        self.requests += 1
        self._sessions[session.number] = session
        self._queue.append(session)
        self.meters[0].arrived(now_s)
        self._bind(now_s)
        return session.number

    def cancel(self, number: int, now_s: float) -> None:
        """The client went away, or has all it wants (a stop string); unknown ones are ignored."""
        session = self._sessions.get(number)
        if session is not None:
            self._end(session, SessionState.CANCELLED, now_s)
            self._bind(now_s)

    # ------------------------------------------------------------ workers

    def worker_ready(self, address: str, now_s: float) -> None:
        """A replica is ready: it takes its share of running sessions, then queued ones."""
        for stage in self.fleet.workers[address].hello.stages:
            self._even_out(stage, now_s)
        self._bind(now_s)

    def credit_changed(self, now_s: float) -> None:
        """A grant grew."""
        self._bind(now_s)

    def worker_draining(self, address: str, now_s: float) -> None:
        """A replica takes nothing new; its sessions move where there is credit."""
        for session, _ in self._handings.to(address):
            self._end_handing(session)
        for stage in self.fleet.workers[address].hello.stages:
            self._even_out(stage, now_s)
        self._bind(now_s)

    def worker_lost(self, address: str, now_s: float) -> None:
        """A worker died (and is out of the fleet): its sessions are rebuilt by replay."""
        unplaced = set()
        for session, handing in self._handings.to(address):
            unplaced.add(handing.addresses.index(address))
            self._end_handing(session)
        gone = {path.number: path for path in self._paths.remove_through(address)}
        lost = [s for s in self._sessions.values() if s.path in gone]
        for living in self.fleet.workers:
            paths = [path.number for path in gone.values() if living in path.addresses]
            self._sends.append((living, api.Unroute(paths, [address])))
        for session in lost:
            session.losses += 1
        for session in reversed(lost):
            self._requeue(session, gone[session.path or 0])
        for stage in unplaced:
            self._even_out(stage, now_s)
        for session in [s for s in lost if s.losses > self.gate.bounds.max_losses]:
            self._refuse(
                session,
                Failure(
                    f"the request lost {session.losses} workers, the bound is {self.gate.bounds.max_losses}"
                ),
                now_s,
            )
        self._bind(now_s)

    def failed(self, message: api.Failed, now_s: float) -> None:
        """Sessions cannot go on at a worker."""
        for number, epoch in zip(message.sessions, message.epochs, strict=True):
            session = self._sessions.get(number)
            if session is None or session.epoch != epoch or session.path is None:
                continue
            session.losses += 1
            if message.retryable and session.losses <= self.gate.bounds.max_losses:
                self._requeue(session, self._paths.by_number[session.path])
            else:
                self._refuse(session, Failure(message.reason), now_s)
        self._bind(now_s)

    def handed(self, sender: str, message: api.Handed, now_s: float) -> None:
        """The KV state of a session was copied, or could not be: now it moves."""
        found = self._handings.answered(sender, message)
        if found is None:
            if message.positions:  # it came too late: nobody knows of the copy any more
                self._sends.append((sender, api.Release([message.session], [message.epoch])))
            return
        session, handing = found
        # The newest token was sampled behind the last stage: all have the positions before it.
        kept = min(message.positions, len(session.tokens) - 1) if sender == handing.target else 0
        self._end_handing(session, is_kept=kept > 0)
        self._move(session, handing.addresses, kept)
        self._send_moves()
        self._bind(now_s)

    def tokens(self, message: api.Tokens, now_s: float) -> None:
        """New tokens of one wave: appends those of the present epoch and next position."""
        has_ended = False
        step = b""
        for number, epoch, position, token in zip(
            message.sessions, message.epochs, message.positions, message.tokens, strict=True
        ):
            session = self._sessions.get(number)
            if session is None or session.epoch != epoch or position != len(session.tokens):
                continue
            if session.path is None:
                # Back in the queue after a loss: the replay samples this token again.
                continue
            session.tokens.append(token)
            if session.trail is not None:
                step = step or packed(now_s, message.times)
                session.trail.steps.append(step)
            done = session.is_complete
            self._outcomes.append(Deliver(number, [token], done))
            if done:
                has_ended = True
                self._end(session, SessionState.FINISHED, now_s)
        if has_ended:
            self._bind(now_s)

    def tick(self, now_s: float) -> None:
        """Refuses what is too late; replays what was not copied in time."""
        for session, handing in self._handings.late(now_s):
            self.late_copies += 1
            self._end_handing(session)
            self._move(session, handing.addresses)
        self._send_moves()
        for session in [s for s in self._sessions.values() if s.deadline_s <= now_s]:
            waited_s = now_s - session.arrived_s
            where = "in the queue" if session.state is SessionState.QUEUED else "while running"
            self._refuse(
                session,
                TooLate(
                    f"deadline of {session.deadline_s - session.arrived_s:.3g} s passed {where} after "
                    f"{waited_s:.3g} s with {session.generated} of {session.request.max_tokens} tokens"
                ),
                now_s,
            )
        self._bind(now_s)

    # ------------------------------------------------------------ inside

    def _check_fits(self, need: int) -> None:
        for stage in range(self.fleet.stages):
            granted = [w.hello.kv_tokens for _, w in self.fleet.of_stage(stage)]
            if granted and need > max(granted):
                raise InvalidRequest(
                    f"prompt + max_tokens is {need} tokens, stage {stage} has KV room for {max(granted)}",
                    param="max_tokens",
                )

    def _refuse_unfit(self, session: Session, now_s: float) -> bool:
        """Whether the first in the queue had to be refused: no worker that came since can hold it."""
        try:
            self._check_fits(session.most_kv)
        except InvalidRequest as refusal:
            self._refuse(session, refusal, now_s)
            return True
        return False

    def _bind(self, now_s: float) -> None:
        started: dict[str, list[api.SessionSpec]] = {}
        while self._queue:
            session = self._queue[0]
            addresses = self.fleet.choose_path(session.reservation, self._paths.workers(), session.most_kv)
            if addresses is None:
                if not self._refuse_unfit(session, now_s):
                    break
                continue
            self._queue.popleft()
            path = self._path(addresses)
            session.held_kv = session.reservation
            self.fleet.hold(addresses, session.held_kv)
            session.state = advance(session.state, SessionState.RUNNING)
            session.epoch += 1
            session.path = path.number
            session.bound_s = now_s
            if session.trail is not None:
                session.trail.bound(now_s, addresses, self.fleet.workers)
            if session.epoch == 1:
                self.gate.leave(session.request.nbytes)
                self.meters[0].waited(now_s - session.arrived_s)
            else:
                self.replayed_tokens += len(session.tokens)
            started.setdefault(path.owner, []).append(session.spec())
        # Room is made before it is given away: a wave of the new session may be quick.
        self._send_releases()
        for owner, specs in started.items():
            self._sends.append((owner, api.Start(specs)))
        self._count()

    def _path(self, addresses: tuple[str, ...]) -> Path:
        path, is_new = self._paths.get(addresses)
        if is_new:
            replicas = [self.fleet.workers[a].hello.replica for a in addresses]
            waves = self._waves_of(addresses)
            kv_blocks = min(self.fleet.workers[a].hello.kv_tokens for a in addresses) // BLOCK_TOKENS
            route = api.Route(path.number, replicas, list(addresses), waves, kv_blocks)
            self._sends.append((path.owner, route))
        return path

    def _even_out(self, stage: int, now_s: float) -> None:
        running = sorted(
            (s for s in self._sessions.values() if s.path is not None), key=lambda s: (s.bound_s, s.number)
        )
        by_number = self._paths.by_number
        entries = [
            Bound(
                s.number,
                s.handing.addresses if s.handing else by_number[s.path].addresses,
                s.held_kv,
                s.most_kv,
                s.handing is not None,
            )
            for s in running
            if s.path
        ]
        for move in plan_moves(self.fleet, stage, entries):
            session = self._sessions[move.session]
            before = by_number[session.path or 0].addresses
            hand = self._handings.begin(session, before, move.addresses, stage, now_s)
            if hand is None:
                self._move(session, move.addresses)
            else:
                self._sends.append(hand)
        self._send_moves()

    def _move(self, session: Session, addresses: tuple[str, ...], kept: int = 0) -> None:
        """Changes a session's path, under a higher epoch.

        Args:
            session: a running one.
            addresses: the new path.
            kept: positions whose KV state its workers have, 0: it is replayed.
        """
        assert session.path is not None
        before = self._paths.by_number[session.path].addresses
        path = self._path(addresses)
        left = set(before) - set(addresses)
        self.fleet.give_back(left, session.held_kv)
        self.fleet.hold(set(addresses) - set(before), session.held_kv)
        # A replay may wait for blocks where it stays as well, and must not wait for its own.
        self._release(session, left if kept else before)
        session.epoch += 1
        session.state = advance(session.state, SessionState.RUNNING)
        session.path = path.number
        self.moves += 1
        if session.trail is not None:
            session.trail.moves += 1
        self.replayed_tokens += len(session.tokens) - kept
        self._moved.setdefault(path.owner, []).append(session.spec(kept))

    def _send_moves(self) -> None:
        self._send_releases()
        for owner, specs in self._moved.items():
            self._sends.append((owner, api.Move(specs)))
        self._moved = {}

    def _end_handing(self, session: Session, *, is_kept: bool = False) -> None:
        """A copy has come, or is not wanted any more."""
        target = self._handings.end(session)
        if target is not None and not is_kept:
            self._release(session, [target])

    def _requeue(self, session: Session, path: Path) -> None:
        """Back to the front of the queue; what the living workers of its path hold is freed."""
        self._end_handing(session)
        self.fleet.give_back(path.addresses, session.held_kv)
        self._release(session, path.addresses)
        session.path = None
        session.state = advance(session.state, SessionState.QUEUED)
        self._queue.appendleft(session)

    def _release(self, session: Session, addresses: Iterable[str]) -> None:
        for address in set(addresses):
            if address in self.fleet.workers:
                sessions, epochs = self._releases.setdefault(address, ([], []))
                sessions.append(session.number)
                epochs.append(session.epoch)

    def _send_releases(self) -> None:
        for address, (sessions, epochs) in self._releases.items():
            self._sends.append((address, api.Release(sessions, epochs)))
        self._releases = {}

    def _refuse(self, session: Session, refusal: Refusal, now_s: float) -> None:
        state = SessionState.REFUSED if isinstance(refusal, TooLate) else SessionState.FAILED
        self._outcomes.append(Refuse(session.number, refusal))
        self._end(session, state, now_s)

    def _end(self, session: Session, state: SessionState, now_s: float) -> None:
        self._end_handing(session)
        if session.path is not None:
            path = self._paths.by_number[session.path]
            self.fleet.give_back(path.addresses, session.held_kv)
            self._release(session, path.addresses)
        else:
            self._queue.remove(session)
            if session.epoch == 0:
                self.gate.leave(session.request.nbytes)
        if state is SessionState.FINISHED:
            self.completed += 1
            self.gate.completed(now_s)
            self.meters[0].served(now_s - session.bound_s, now_s - session.arrived_s)
        session.state = advance(session.state, state)
        session.path = None
        del self._sessions[session.number]
        self._count()

    def _count(self) -> None:
        self.meters[0].queue = len(self._queue)
        self.meters[0].in_flight = len(self._sessions) - len(self._queue)
