"""A request from its arrival until its answer, with the descriptors that came beside it.

Made by `server`, carried through the daemon, answered once by whoever knows. This module must not know
sockets or what a request means.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from keystage.keysmanager.api import Answer, Request


class Asked:
    """A request that waits for its answer.

    Attributes:
        number: unique in this process.
        message: the request.
        fds: descriptors that came with it; whoever uses them takes them by `take_fds`.
        origin: who asks: the UID of a pod, empty for the node's own user.
        is_open: no answer yet, and the asker is there.
        is_claim: a segment was given; the connection is its claim.
    """

    def __init__(
        self,
        number: int,
        message: Request,
        fds: Sequence[int],
        wake: Callable[[], None],
        origin: str = "",
    ) -> None:
        self.number = number
        self.message = message
        self.fds = tuple(fds)
        self.origin = origin
        self.is_open = True
        self.is_claim = False
        self._wake = wake
        self._answer: tuple[Answer, tuple[int, ...]] | None = None

    def answer(self, message: Answer, fds: Sequence[int] = (), *, is_claim: bool = False) -> bool:
        """Answers it. The descriptors are closed once sent.

        Returns:
            False when it was answered before or its asker is gone; the descriptors are closed then too.
        """
        if not self.is_open:
            close_all(fds)
            return False
        self.is_open = False
        self.is_claim = is_claim
        self._answer = (message, tuple(fds))
        self.drop_fds()
        self._wake()
        return True

    def take_fds(self) -> tuple[int, ...]:
        """Hands the descriptors over."""
        taken, self.fds = self.fds, ()
        return taken

    def drop_fds(self) -> None:
        """Closes those that nobody took."""
        close_all(self.take_fds())

    def ready(self) -> tuple[Answer, tuple[int, ...]] | None:
        """The answer, once."""
        answer, self._answer = self._answer, None
        return answer


def close_all(fds: Sequence[int]) -> None:
    """Closes descriptors."""
    for fd in fds:
        os.close(fd)
