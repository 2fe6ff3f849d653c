"""Sessions that leave or join this worker with their KV state; called by the engine's thread.

Before it: the router's `Hand`, or another worker's `KvState`. After it: `Handed`, on which the router
moves the session, and a row that goes on with the state (`sessions.Verdict.ADOPT`). Nothing here is
needed for a right answer: whatever is odd is refused, and the router replays the session.
"""

from __future__ import annotations

import logging
from functools import partial

from keystage.models.blocks import blocks_for
from keystage.wire import api
from keystage.wire.ring import RingError
from keystage.wire.sources import TensorSources
from keystage.worker.claims import Claims
from keystage.worker.device_lane import DeviceLane
from keystage.worker.executor import Activation, AnyActivation, CopiesState, Executor
from keystage.worker.outbox import TensorOutbox
from keystage.worker.sessions import SessionTable

log = logging.getLogger(__name__)

ELSEWHERE = -1
"""No path's number: a session that comes has none here yet."""


class Handing:
    """Both ends of a copy.

    Args:
        executor: holds the state.
        table: the sessions here.
        claims: who waits for blocks here.
        outbox: sends.
        sources: reads other workers' tensors.
        is_copying: False: every move is a replay (`KEYSTAGE_KV_COPY`).
    """

    def __init__(
        self,
        executor: Executor,
        table: SessionTable,
        claims: Claims,
        outbox: TensorOutbox,
        sources: TensorSources,
        *,
        is_copying: bool = True,
    ) -> None:
        self._is_copying = is_copying
        self._executor = executor
        self._table = table
        self._claims = claims
        self._outbox = outbox
        self._sources = sources

    def hand(self, router: str, message: api.Hand) -> None:
        """Copies a session's state into the ring for the worker that takes over."""
        session, epoch = message.session, message.epoch
        reach = self._table.reach(session, epoch)
        state = None
        if reach and self._is_copying and isinstance(self._executor, CopiesState):
            state = self._executor.copy_out(session, message.stage)
        if state is None or not self._outbox.fits(state):
            self._outbox.send(router, api.Handed(session, epoch, 0))
            return
        build = partial(_kv_state, message, router, self._outbox.address, reach)
        self._outbox.push(message.to, state, build)

    def take(self, message: api.KvState) -> None:
        """Takes a session's state, if it fits; tells its router how much of it is here."""
        ref = message.ref
        is_here = False
        try:
            if ref.pid:
                is_here = self._place(
                    message, input_of(ref, message.sender, self._outbox.lane, self._sources)
                )
        except RingError as error:
            log.warning("session %d comes without its KV state: %s", message.session, error)
        if ref.pid:
            if self._outbox.lane is not None:
                self._outbox.lane.settle()
            self._sources.release(ref, message.sender)
            self._outbox.taken(message.sender, ref.slot)
        positions = message.positions if is_here else 0
        self._outbox.send(message.router, api.Handed(message.session, message.epoch, positions))

    def _place(self, message: api.KvState, state: AnyActivation) -> bool:
        executor, session = self._executor, message.session
        if not self._is_copying or not isinstance(executor, CopiesState) or not state.nbytes:
            return False
        free, total = executor.kv_blocks
        ahead = self._claims.ahead_of(ELSEWHERE, session)
        if blocks_for(message.positions) + ahead > free or blocks_for(message.most) > total:
            return False
        if not self._table.place(session, message.epoch, message.router, message.stage, message.positions):
            return False
        if executor.copy_in(session, message.stage, message.most, state):
            return True
        self._table.drop(session, message.epoch)
        return False


def input_of(
    ref: api.TensorRef, sender: str, lane: DeviceLane | None, sources: TensorSources
) -> AnyActivation:
    """What a reference names, on the device or in a ring; valid until its `Ack`.

    Raises:
        RingError: it cannot be had.
    """
    if ref.slot < 0:
        if lane is None:
            raise RingError(
                f"{ref.nbytes} bytes in the device memory of {sender}, and there is no device here"
            )
        return lane.open(ref, sender)
    data = sources.view(ref, sender)
    if lane is not None:
        lane.note(ref, sender)
    return Activation(ref.dtype, ref.shape, data)


def _kv_state(message: api.Hand, router: str, sender: str, positions: int, ref: api.TensorRef) -> api.KvState:
    return api.KvState(
        message.session, message.epoch, message.stage, router, sender, positions, message.most, ref
    )
