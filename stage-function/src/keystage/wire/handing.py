"""The messages by which a session moves with its KV state, on one node. Part of `wire.api`.

Router `Hand` -> the worker that is left; that one `KvState` -> the worker that takes over; that one
`Handed` -> router, which then sends `Move` with `SessionSpec.kept`. The session runs on meanwhile.
Whatever goes wrong, `Handed` says 0 positions, or never comes: then the router replays.
"""

from __future__ import annotations

from keystage.wire.shapes import Message, TensorRef


class Hand(Message, frozen=True, array_like=True, tag=True):
    """Copy a session's KV state of one stage to another worker of this node; go on with it meanwhile.

    Attributes:
        session: whose.
        epoch: its epoch.
        stage: which stage's.
        to: inbox endpoint of the worker that takes it.
        most: most positions the session can ever need.
    """

    session: int
    epoch: int
    stage: int
    to: str
    most: int


class KvState(Message, frozen=True, array_like=True, tag=True):
    """The KV state of a session in one stage, as far as it reached.

    Attributes:
        session: whose.
        epoch: epoch under which it was computed.
        stage: which stage's.
        router: inbox endpoint of the session's router, for `Handed`.
        sender: inbox endpoint of the sender, for the `Ack`.
        positions: token positions it holds.
        most: most positions the session can ever need.
        ref: the state; its shape is the executor's affair.
    """

    session: int
    epoch: int
    stage: int
    router: str
    sender: str
    positions: int
    most: int
    ref: TensorRef


class Handed(Message, frozen=True, array_like=True, tag=True):
    """The sender holds so many positions of a session's KV state, 0: it could not be copied.

    Attributes:
        session: whose.
        epoch: epoch under which it was computed.
        positions: token positions.
    """

    session: int
    epoch: int
    positions: int
