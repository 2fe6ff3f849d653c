"""Those that fork for us, fork server and holders: one question at a time, and what an answer is.

Below `daemon_forkserver`, `daemon_holders` and `daemon_standbys`. When a forker dies between fork and
answer, the child it left is found by the socket it was given, and ended: nobody would own it. This
module must not know what is forked, or why.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Sequence
from typing import TypeVar

from keystage.keysmanager.api import Message, Refused
from keystage.keysmanager.asked import close_all
from keystage.keysmanager.channel import Channel, ChannelError, PeerGone, Told
from keystage.keysmanager.claims import holders_of

ANSWER_S = 120.0
"""A fork takes milliseconds; the bound is for a fork server that imports on a busy machine."""
END_S = 3.0
"""From end of file on its socket to SIGKILL."""

T = TypeVar("T", bound=Message)


class ForkerError(Exception):
    """Nothing was forked; says why.

    Attributes:
        is_unsure: the forker ended or hung before it answered: a child may have been left.
        is_over: this forker will never answer again; unless `is_unsure`, nothing was asked of it.
    """

    def __init__(self, reason: str, *, is_unsure: bool = False, is_over: bool = False) -> None:
        super().__init__(reason)
        self.is_unsure = is_unsure
        self.is_over = is_unsure or is_over


class Forker:
    """One process that forks on request.

    Args:
        sock: our end of its socket pair.
        name: for messages.
    """

    def __init__(self, sock: socket.socket, name: str) -> None:
        sock.setblocking(False)
        self._channel = Channel(sock)
        self._name = name
        self._turn = asyncio.Lock()
        self._is_closed = False
        self._hears = False

    async def ask(self, message: Told, fds: Sequence[int], kind: type[T]) -> T:
        """Sends a message and waits for the answer to it.

        Raises:
            ForkerError: refused, ended, or hung.
        """
        async with self._turn:
            if self._is_closed:
                raise ForkerError(f"{self._name} has ended", is_over=True)
            try:
                await self._channel.asend(message, fds)
            except PeerGone as error:
                self.close()
                raise ForkerError(f"{self._name}: {error}", is_over=True) from error
            except (OSError, ChannelError) as error:
                raise ForkerError(f"{self._name}: {error}") from error
            return await self.hear(kind)

    async def hear(self, kind: type[T]) -> T:
        """Waits for a message of one kind.

        Raises:
            ForkerError: something else came, or nothing.
        """
        answer, fds = await self.hear_with(kind)
        close_all(fds)
        return answer

    async def hear_with(self, kind: type[T]) -> tuple[T, list[int]]:
        """As `hear`, with the descriptors beside the message: the caller's."""
        try:
            received = await self._hear()
        except TimeoutError:
            self.close()
            raise ForkerError(f"{self._name} did not answer in {ANSWER_S:.0f} s", is_unsure=True) from None
        except (OSError, ChannelError) as error:
            self.close()
            raise ForkerError(f"{self._name}: {error}", is_unsure=True) from error
        if received is None:
            self.close()
            raise ForkerError(f"{self._name} ended before it answered", is_unsure=True)
        answer, received_fds = received
        if isinstance(answer, Refused):
            close_all(received_fds)
            raise ForkerError(f"{self._name}: {answer.reason}")
        if not isinstance(answer, kind):
            close_all(received_fds)
            self.close()
            raise ForkerError(
                f"{self._name} said {type(answer).__name__}, not {kind.__name__}", is_unsure=True
            )
        return answer, received_fds

    async def _hear(self) -> tuple[Told, list[int]] | None:
        self._hears = True
        try:
            async with asyncio.timeout(ANSWER_S):
                return await self._channel.areceive()
        finally:
            self._hears = False
            if self._is_closed:
                self._channel.close()

    def close(self) -> None:
        """Closes the socket: the forker reads end of file, and ends; so does who waits for an answer."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._hears:
            # A descriptor closed under a waiting task would never wake it, and its number be reused.
            with contextlib.suppress(OSError):
                self._channel.sock.shutdown(socket.SHUT_RDWR)
        else:
            self._channel.close()


class Life:
    """A process that is no child of ours, by its pidfd: its end can be awaited, and forced without doubt.

    Attributes:
        pid: process id.
        ended: set when it is gone.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.ended = asyncio.Event()
        try:
            self._fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._fd = -1
            self.ended.set()
            return
        asyncio.get_running_loop().add_reader(self._fd, self._gone)

    def kill(self) -> None:
        """SIGKILL, unless it is gone."""
        if self._fd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._fd, signal.SIGKILL)

    async def end(self, within_s: float = END_S) -> None:
        """Waits until it is gone; kills it after `within_s` seconds."""
        try:
            async with asyncio.timeout(within_s):
                await self.ended.wait()
        except TimeoutError:
            self.kill()
            await self.ended.wait()

    def close(self) -> None:
        """Stops watching."""
        if self._fd >= 0:
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _gone(self) -> None:
        self.close()
        self.ended.set()


async def end_strays(number: int) -> list[int]:
    """Ends every process that has the socket with this inode number; returns their ids.

    Waits for nothing but the kernel: a fork that was under way is seen by the second look.
    """
    ended: list[int] = []
    while found := await asyncio.to_thread(holders_of, number):
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        ended += [pid for pid in found if pid not in ended]
        await asyncio.sleep(0.01)
    return ended
