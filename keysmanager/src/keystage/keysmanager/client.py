"""How other parts ask the KeysManager of this node: one request a connection, answers typed.

Between `local` (replicas, key stages), workers (`get_segment`), the command line, and `server`. This
module and `api` are all that other parts import; both are light. It must not retry: who asks knows
best whether a second try makes sense (a fork may have happened).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import select
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from keystage.keysmanager.api import (
    Evict,
    Fork,
    Forked,
    Get,
    Invalidate,
    KeyStages,
    Message,
    NodeStatus,
    Ok,
    Progress,
    Refused,
    Request,
    Segment,
    StageName,
    Standbys,
    StatusAsked,
)
from keystage.keysmanager.channel import Channel, ChannelError, PeerGone

T = TypeVar("T", bound=Message)

SHORT_S = 10.0
"""Bound on answers that need no loading: the daemon's loop is never busy for seconds."""
FULL_PAUSE_S = 0.02
"""Between two tries to connect to a daemon that accepts more slowly than others connect."""


class KeysManagerError(Exception):
    """The KeysManager did not do what was asked."""


class KeysManagerRefused(KeysManagerError):
    """It said no.

    Attributes:
        reason: names the thing, the bound and the actual value.
        status: HTTP status that fits.
    """

    def __init__(self, reason: str, status: int) -> None:
        super().__init__(reason)
        self.reason = reason
        self.status = status


class KeysManagerGone(KeysManagerError):
    """Nobody listens there, or it ended before it answered."""


class Claim:
    """Keeps a segment in memory while open; closed by `close`, as a context, or with the process."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def report(self, progress: Progress) -> None:
        """Tells how far a start is; does nothing when the daemon is gone."""
        try:
            self._channel.send(progress)
        except (OSError, ChannelError):
            return  # the daemon is no owner: whoever maps the segment goes on without it

    def fileno(self) -> int:
        """The descriptor, to pass it on."""
        return self._channel.fileno()

    @property
    def channel(self) -> Channel:
        """What it is made of, for who takes it over."""
        return self._channel

    def close(self) -> None:
        """Gives the segment back."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclasses.dataclass(frozen=True, slots=True)
class Got:
    """A segment in the caller's hands.

    Attributes:
        segment: what it holds.
        fd: sealed memfd; the caller closes it.
        claim: keeps it counted as mapped.
    """

    segment: Segment
    fd: int
    claim: Claim


class KeysManagerClient:
    """Asks the daemon that listens on a UNIX socket; may be used from several tasks at once.

    Every method raises `KeysManagerRefused` when the daemon says no and `KeysManagerGone` when there
    is none.

    Args:
        path: the daemon's socket.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    async def fork(self, request: Fork, lifeline_fd: int, output_fd: int, http_fd: int) -> Forked:
        """Starts a replica; takes as long as its parameters take to load.

        Args:
            request: what to start.
            lifeline_fd: read end of the owner's pipe.
            output_fd: where standard output and error go.
            http_fd: listening socket.

        The descriptors stay the caller's. A cancelled call ends the replica if it was started.
        """
        answer = await self._ask(request, (lifeline_fd, output_fd, http_fd), None)
        return _expect(answer, Forked)

    async def get(self, name: StageName) -> Got:
        """A stage's raw parameters; takes as long as they take to load."""
        channel = await self._connect()
        try:
            answer, fds = await self._exchange(channel, Get(name=name), (), None)
        except BaseException:
            channel.close()
            raise
        # From here on the connection is used by whoever holds the claim, perhaps without a loop.
        os.set_blocking(channel.fileno(), True)
        return _got(channel, answer, fds)

    async def key_stages(self, stages: Sequence[StageName]) -> None:
        """Replaces the ranked list of stages to keep in memory, most important first."""
        _expect(await self._ask(KeyStages(tuple(stages))), Ok)

    async def invalidate(self, identity: str) -> None:
        """Parameters of this identity are not handed out any longer."""
        _expect(await self._ask(Invalidate(identity)), Ok)

    async def evict(self, identity: str) -> None:
        """Ends a holder that nobody maps."""
        _expect(await self._ask(Evict(identity)), Ok)

    async def standbys(self, request: Standbys, lifeline_fd: int) -> None:
        """Keeps so many idle standbys; `lifeline_fd` is the read end of their owner's pipe."""
        _expect(await self._ask(request, (lifeline_fd,)), Ok)

    async def status(self) -> NodeStatus:
        """What is where on the node."""
        return _expect(await self._ask(StatusAsked()), NodeStatus)

    async def _ask(
        self, request: Request, fds: Sequence[int] = (), timeout_s: float | None = SHORT_S
    ) -> Message:
        channel = await self._connect()
        try:
            answer, received = await self._exchange(channel, request, fds, timeout_s)
        finally:
            channel.close()
        _close_all(received)
        return answer

    async def _exchange(
        self, channel: Channel, request: Request, fds: Sequence[int], timeout_s: float | None
    ) -> tuple[Message, list[int]]:
        try:
            async with asyncio.timeout(timeout_s):
                with contextlib.suppress(PeerGone):  # it may have said why: that is received
                    await channel.asend(request, fds)
                received = await channel.areceive()
        except TimeoutError as error:
            raise KeysManagerGone(f"KeysManager at {self.path} did not answer in {timeout_s} s") from error
        except (OSError, ChannelError) as error:
            raise KeysManagerGone(f"KeysManager at {self.path}: {error}") from error
        return _answered(self.path, received)

    async def _connect(self) -> Channel:
        until_s = time.monotonic() + SHORT_S
        while True:
            channel = _open(self.path, until_s)
            if channel is not None:
                channel.sock.setblocking(False)
                return channel
            await asyncio.sleep(FULL_PAUSE_S)


def get_segment(
    path: str | os.PathLike[str], name: StageName, timeout_s: float | None = None, packed: str = ""
) -> Got:
    """As `KeysManagerClient.get`, for a worker that has no loop.

    Args:
        path: the daemon's socket.
        name: the stage.
        timeout_s: longest wait for the answer, None: as long as the load takes.
        packed: see `api.Get`.

    Raises:
        KeysManagerRefused: the daemon says no.
        KeysManagerGone: there is none, or no answer in time.
    """
    until_s = time.monotonic() + SHORT_S
    while (channel := _open(Path(path), until_s)) is None:
        time.sleep(FULL_PAUSE_S)
    try:
        with contextlib.suppress(PeerGone):  # it may have said why: that is received
            channel.send(Get(name=name, packed=packed))
        if timeout_s is not None and not _is_readable(channel.fileno(), timeout_s):
            raise KeysManagerGone(f"KeysManager at {path} did not answer in {timeout_s:g} s")
        answer, fds = _answered(Path(path), channel.receive())
    except (OSError, ChannelError) as error:
        channel.close()
        raise KeysManagerGone(f"KeysManager at {path}: {error}") from error
    except BaseException:
        channel.close()
        raise
    return _got(channel, answer, fds)


def _is_readable(fd: int, timeout_s: float) -> bool:
    watch = select.poll()
    watch.register(fd, select.POLLIN)
    return bool(watch.poll(timeout_s * 1000))


def _open(path: Path, until_s: float) -> Channel | None:
    """A connection in blocking mode; None: the daemon's backlog is full, and it is not `until_s` yet.

    Connecting to a UNIX socket never waits on its own: a full backlog is told at once, as EAGAIN.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.setblocking(False)
        sock.connect(str(path))
    except BlockingIOError as error:
        sock.close()
        if time.monotonic() < until_s:
            return None
        raise KeysManagerGone(f"KeysManager at {path} accepted no connection in {SHORT_S:g} s") from error
    except OSError as error:
        sock.close()
        raise KeysManagerGone(f"no KeysManager at {path}: {error}") from error
    sock.setblocking(True)
    return Channel(sock)


def _answered(path: Path, received: tuple[Message, list[int]] | None) -> tuple[Message, list[int]]:
    if received is None:
        raise KeysManagerGone(f"KeysManager at {path} ended before it answered")
    return received


def _got(channel: Channel, answer: Message, fds: list[int]) -> Got:
    try:
        segment = _expect(answer, Segment)
        if len(fds) != 1:
            raise KeysManagerGone(f"a segment came with {len(fds)} descriptors, 1 was expected")
    except KeysManagerError:
        _close_all(fds)
        channel.close()
        raise
    return Got(segment, fds[0], Claim(channel))


def _expect(answer: Message, kind: type[T]) -> T:
    if isinstance(answer, Refused):
        raise KeysManagerRefused(answer.reason, answer.status)
    if not isinstance(answer, kind):
        raise KeysManagerGone(
            f"the KeysManager answered {type(answer).__name__}, {kind.__name__} was expected"
        )
    return answer


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
