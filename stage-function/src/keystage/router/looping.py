"""The core of a looping pipeline: queue, bind, move, replay, deliver. Pure; the shell is `node`.

Events come in as method calls with the time; what is to be sent and what clients are told comes
out of `take`. Sessions are bound first come, first served, once every stage has credit for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from keystage.models.blocks import BLOCK_TOKENS
from keystage.router.admission import AdmissionBounds, Gate, short_of_time, why_unfit
from keystage.router.counters import StageMeter
from keystage.router.engine import Failure, Generation, Refusal, TooLate
from keystage.router.entrance import Entrance
from keystage.router.fleet import Fleet
from keystage.router.handings import Handings
from keystage.router.looping_sends import LoopingSends
from keystage.router.paths import Bound, Path, PathBook, plan_moves
from keystage.router.quarantine import AHEAD_TOKENS, Quarantine
from keystage.router.sessions import Deliver, Outcome, Refuse, Session, SessionState, advance
from keystage.router.suspects import UNTOLD, Ending, Suspects
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
        self.entrance = Entrance(self.gate, "tokens")
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
        self._out = LoopingSends(fleet)
        self._outcomes: list[Outcome] = []
        self._handings = Handings(fleet)
        self.suspects = Suspects(bounds.max_losses)
        self._quarantine = Quarantine(fleet, self.suspects)

    def take(self) -> tuple[list[tuple[str, api.Message]], list[Outcome]]:
        """What is to be sent, in order, and what clients are to be told; forgets both."""
        outcomes, self._outcomes = self._outcomes, []
        return self._out.take(), outcomes

    # ------------------------------------------------------------ clients

    def submit(self, request: Generation, now_s: float, trail: Trail | None = None) -> int:
        """Admits a request; returns its session number. What happens to it is noted in `trail`.

        Raises:
            Refusal: the queue is full, or no worker could ever hold the session.
        """
        need = len(request.prompt) + request.max_tokens
        if (unfit := why_unfit(self.fleet, need)) is not None:
            raise unfit
        bounds = self.gate.bounds
        deadline_s = request.deadline_s if request.deadline_s is not None else bounds.default_deadline_s
        tokens = [*request.prompt, *request.resumed]
        session = Session(self._next, request, tokens, now_s, now_s + deadline_s, trail=trail)
        if request.resumed:  # another router admitted it
            self.entrance.again(session.waiter, request.nbytes)
        else:
            wanted = session.waiter, request.nbytes, session.left_tokens, deadline_s, now_s
            while gone := self.entrance.enter(*wanted):
                self._refuse(self._sessions[gone[0]], gone[1], now_s)
        self._next += 1
        self.requests += 1
        self._sessions[session.number] = session
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
        self.entrance.adapt(self.fleet)
        if self._quarantine.waiting:
            self._bind(now_s)
        for stage in self.fleet.workers[address].hello.stages:
            self._even_out(stage, now_s)
        self._bind(now_s)

    def credit_changed(self, now_s: float) -> None:
        """A grant grew."""
        self.entrance.adapt(self.fleet)
        self._bind(now_s)

    def worker_draining(self, address: str, now_s: float) -> None:
        """A replica takes nothing new; its sessions move where there is credit."""
        for session, _ in self._handings.to(address):
            self._end_handing(session)
        for stage in self.fleet.workers[address].hello.stages:
            self._even_out(stage, now_s)
        self._bind(now_s)

    def worker_lost(self, address: str, now_s: float, ending: Ending = UNTOLD) -> None:
        """A worker died (and is out of the fleet): its sessions are rebuilt by replay."""
        unplaced = set()
        for session, handing in self._handings.to(address):
            unplaced.add(handing.addresses.index(address))
            self._end_handing(session)
        gone = {path.number: path for path in self._paths.remove_through(address)}
        lost = [s for s in self._sessions.values() if s.path in gone]
        for living in self.fleet.workers:
            paths = [path.number for path in gone.values() if living in path.addresses]
            self._out.add(living, api.Unroute(paths, [address]))
        points = {s.number: float(len(s.tokens) + AHEAD_TOKENS) for s in lost}
        stages = {k for path in gone.values() for k, a in enumerate(path.addresses) if a == address}
        convicted = self.suspects.blame(points, stages, ending)
        for session in reversed(lost):
            self._requeue(session, gone[session.path or 0], now_s)
        for number, reason in convicted.items():
            self._refuse(self._sessions[number], Failure(reason), now_s)
        for stage in unplaced:
            self._even_out(stage, now_s)
        self._bind(now_s)

    def failed(self, message: api.Failed, now_s: float) -> None:
        """Sessions cannot go on at a worker."""
        for number, epoch in zip(message.sessions, message.epochs, strict=True):
            session = self._sessions.get(number)
            if session is None or session.epoch != epoch or session.path is None:
                continue
            session.losses += 1
            if message.retryable and session.losses <= self.gate.bounds.max_losses:
                self._requeue(session, self._paths.by_number[session.path], now_s)
            else:
                self._refuse(session, Failure(message.reason), now_s)
        self._bind(now_s)

    def handed(self, sender: str, message: api.Handed, now_s: float) -> None:
        """The KV state of a session was copied, or could not be: now it moves."""
        found = self._handings.answered(sender, message)
        if found is None:
            if message.positions:  # it came too late: nobody knows of the copy any more
                self._out.add(sender, api.Release([message.session], [message.epoch]))
            return
        session, handing = found
        # The newest token was sampled behind the last stage: all have the positions before it.
        kept = min(message.positions, len(session.tokens) - 1) if sender == handing.target else 0
        self._end_handing(session, is_kept=kept > 0)
        self._move(session, handing.addresses, kept)
        self._out.flush()
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
            session.losses = 0
            if session.trail is not None:
                step = step or packed(now_s, message.times)
                session.trail.steps.append(step)
            done = session.is_complete
            self._outcomes.append(Deliver(number, [token], done))
            if done:
                has_ended = True
                self._end(session, SessionState.FINISHED, now_s)
            elif number in self.suspects and self.suspects.passed(number, len(session.tokens)):
                self._cleared(session, now_s)
        if has_ended:
            self._bind(now_s)

    def tick(self, now_s: float) -> None:
        """Refuses what is too late; replays what was not copied in time."""
        self.entrance.adapt(self.fleet)
        for session, handing in self._handings.late(now_s):
            self.late_copies += 1
            self._end_handing(session)
            self._move(session, handing.addresses)
        self._out.flush()
        for number in self._quarantine.outlasted(now_s):
            self._cleared(self._sessions[number], now_s)
        for address in self._quarantine.overdue(now_s):
            self._leave_all(address, now_s)
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

    def _why_not(self, session: Session, now_s: float, *, has_room: bool) -> Refusal | None:
        """Why the first in the queue is refused: nobody holds it any more, or, if new, it would be late."""
        if not has_room:
            return why_unfit(self.fleet, session.most_kv)
        left_s, limit_s = session.deadline_s - now_s, session.deadline_s - session.arrived_s
        is_new = not session.epoch and not session.generated
        is_late = is_new and self.entrance.is_hopeless(session.left_tokens, left_s, limit_s, now_s)
        return short_of_time(left_s, limit_s) if is_late else None

    def _bind(self, now_s: float) -> None:
        for stage in self._handings.due():
            self._even_out(stage, now_s)
        while self._quarantine.waiting:
            found = self._quarantine.next(self._paths.workers(), now_s)
            if found is None:
                break
            self._begin(*found, now_s)
        while (number := self.entrance.queue.peek()) is not None:
            session = self._sessions[number]
            addresses = self.fleet.choose_path(session.reservation, self._paths.workers(), session.most_kv)
            refusal = self._why_not(session, now_s, has_room=addresses is not None)
            if refusal is not None:
                self._refuse(session, refusal, now_s)
                continue
            if addresses is None:
                break
            self.entrance.begin(session.left_tokens, now_s, is_first=session.epoch == 0)
            self.gate.leave(session.request.nbytes, session.request.tenant)
            self._begin(session, addresses, now_s)
        self._out.flush()
        self._count()

    def _begin(self, session: Session, addresses: tuple[str, ...], now_s: float) -> None:
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
            self.meters[0].waited(now_s - session.arrived_s)
        else:
            self.replayed_tokens += len(session.tokens)
        self._out.start(path.owner, session.spec())

    def _path(self, addresses: tuple[str, ...]) -> Path:
        path, is_new = self._paths.get(addresses)
        if is_new:
            replicas = [self.fleet.workers[a].hello.replica for a in addresses]
            waves = self._waves_of(addresses)
            kv_blocks = min(self.fleet.workers[a].hello.kv_tokens for a in addresses) // BLOCK_TOKENS
            route = api.Route(path.number, replicas, list(addresses), waves, kv_blocks)
            self._out.add(path.owner, route)
        return path

    def _even_out(self, stage: int, now_s: float) -> None:
        running = sorted(
            (s for s in self._sessions.values() if s.path is not None), key=lambda s: (s.bound_s, s.number)
        )
        by_number = self._paths.by_number
        entries = [
            Bound(
                s.number, s.handing.addresses if s.handing else by_number[s.path].addresses, s.held_kv,
                s.most_kv, s.handing is not None or self._quarantine.is_alone(s.number),
            )
            for s in running
            if s.path
        ]  # fmt: skip
        for move in plan_moves(self.fleet, stage, entries):
            session = self._sessions[move.session]
            before = by_number[session.path or 0].addresses
            hands = self._handings.begin(session, before, move.addresses, stage, now_s)
            if hands is None:
                self._move(session, move.addresses)
            for hand in hands or ():
                self._out.add(*hand)
        self._out.flush()

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
        self._out.release(session, left if kept else before)
        session.epoch += 1
        session.state = advance(session.state, SessionState.RUNNING)
        session.path = path.number
        self.moves += 1
        if session.trail is not None:
            session.trail.moves += 1
        self.replayed_tokens += len(session.tokens) - kept
        self._out.move(path.owner, session.spec(kept))

    def _end_handing(self, session: Session, *, is_kept: bool = False) -> None:
        """A copy has come, or is not wanted any more."""
        target = self._handings.end(session)
        if target is not None and not is_kept:
            self._out.release(session, [target])

    def _cleared(self, session: Session, now_s: float) -> None:
        """It did not end its worker: others may come, and where another suspect waits it steps aside."""
        is_in_the_way = self._quarantine.steps_aside(session)
        kept = self._quarantine.release(session.number)
        if is_in_the_way and session.path is not None:
            self._requeue(session, self._paths.by_number[session.path], now_s)
        for address in () if is_in_the_way else kept:
            for stage in self.fleet.workers[address].hello.stages:
                self._even_out(stage, now_s)
        if kept:
            self._bind(now_s)

    def _leave_all(self, address: str, now_s: float) -> None:
        """Every session leaves a worker that is kept for a suspect."""
        for session, _ in self._handings.to(address):
            self._end_handing(session)
        paths = self._paths.by_number
        for session in reversed(list(self._sessions.values())):
            if session.path is not None and address in paths[session.path].addresses:
                self._requeue(session, paths[session.path], now_s)

    def _requeue(self, session: Session, path: Path, now_s: float) -> None:
        """Back to the front of the queue; what the living workers of its path hold is freed."""
        self._end_handing(session)
        self.fleet.give_back(path.addresses, session.held_kv)
        self._out.release(session, path.addresses)
        session.path = None
        session.state = advance(session.state, SessionState.QUEUED)
        self.entrance.ended(session.number)
        if not self._quarantine.takes(session, now_s):
            self.entrance.again(session.waiter, session.request.nbytes)

    def _refuse(self, session: Session, refusal: Refusal, now_s: float) -> None:
        state = SessionState.REFUSED if isinstance(refusal, TooLate) else SessionState.FAILED
        self._outcomes.append(Refuse(session.number, refusal))
        self._end(session, state, now_s)

    def _end(self, session: Session, state: SessionState, now_s: float) -> None:
        self._end_handing(session)
        waited_apart = self._quarantine.withdraw(session)
        if session.path is not None:
            path = self._paths.by_number[session.path]
            self.fleet.give_back(path.addresses, session.held_kv)
            self._out.release(session, path.addresses)
        elif not waited_apart:
            self.entrance.leave(session.number)
            self.gate.leave(session.request.nbytes, session.request.tenant)
        self.entrance.ended(session.number, now_s if state is SessionState.FINISHED else None)
        if state is SessionState.FINISHED:
            self.completed += 1
            self.gate.completed(now_s)
            self.meters[0].served(now_s - session.bound_s, now_s - session.arrived_s)
        session.state = advance(session.state, state)
        session.path = None
        del self._sessions[session.number]
        self._count()

    def _count(self) -> None:
        self.meters[0].queue = queued = len(self.entrance) + len(self._quarantine.waiting)
        self.meters[0].in_flight = len(self._sessions) - queued
