"""What executors have in common that keep no sessions: single-pass stages, and modules of stream programs.

Between the `Executor` port, which looping stages need whole, and `torch_single`, `torch_program`.
"""

from __future__ import annotations

from collections.abc import Sequence

from keystage.wire.api import StepRows
from keystage.worker.executor import AnyActivation, StageError, StepOutput


class Sessionless:
    """The part of `Executor` that is about sessions and their waves, refused by name.

    Args:
        what: pipeline and its kind, for messages: `minilm is single-pass`.
    """

    def __init__(self, what: str) -> None:
        self._what = what

    @property
    def kv_blocks(self) -> tuple[int, int]:
        """There are none."""
        return 0, 0

    def open(self, session: int, tokens: int) -> None:
        """Keeps no sessions.

        Raises:
            StageError: always.
        """
        raise StageError(f"{self._what} and keeps no sessions (session {session})")

    def reserve(self, session: int, tokens: int) -> bool:
        """Keeps no sessions."""
        return False

    def close(self, session: int) -> None:
        """Keeps no sessions."""

    def step(
        self, first: int, last: int, ids: Sequence[int], activation: AnyActivation | None, rows: StepRows
    ) -> StepOutput:
        """Takes no waves.

        Raises:
            StageError: always.
        """
        raise StageError(f"{self._what} and takes no waves (stages {first}..{last})")
