"""The port between `worker.program` and what executes modules of a stream program. No torch here.

A message's tensors travel as one block of bytes; `meta` says, for modules, how they lie in it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from keystage.wire.api import Fault
from keystage.wire.program import FaultKind

MOST_REASON = 2000
"""Characters of a reason that travel."""


@dataclasses.dataclass(frozen=True, slots=True)
class Packed:
    """A message on a stream, its tensors in this process's memory.

    Attributes:
        stream: the stream.
        meta: header and layout.
        data: bytes of its tensors, None where it has none.
        body: a request's body, or an answer.
        content_type: of `body`.
        visits: see `StreamMessage.visits`.
    """

    stream: str
    meta: bytes = b""
    data: memoryview | None = None
    body: bytes = b""
    content_type: str = ""
    visits: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Ended:
    """What became of a turn.

    Attributes:
        outputs: messages by stream; empty where it failed.
        fault: why it failed.
        is_kept: whether the module has state of the request now.
    """

    outputs: Sequence[Packed] = ()
    fault: Fault | None = None
    is_kept: bool = False


def fault_of(kind: FaultKind, reason: str, http_status: object = 500) -> Fault:
    """A fault that can travel, whatever user code put into its words and its status."""
    words = reason[:MOST_REASON].encode("utf-8", "backslashreplace").decode()
    status = int(http_status) if isinstance(http_status, int) else 500
    return Fault(kind, words, status if 400 <= status < 600 else 500)


@runtime_checkable
class TurnExecutor(Protocol):
    """Executes the modules that a worker hosts."""

    def run(self, stage: int, sessions: Sequence[int], inputs: Sequence[Sequence[Packed]]) -> list[Ended]:
        """Executes a module on one batch, at most one turn of a request; never raises for user code.

        Args:
            stage: the module.
            sessions: number of each turn's request.
            inputs: messages of each turn; their memory may be used again after the call.
        """

    def evict(self, session: int, stage: int) -> None:
        """Forgets the state of a request in a module, -1: in all that are hosted."""

    @property
    def kept(self) -> int:
        """Requests of which some module has state."""
