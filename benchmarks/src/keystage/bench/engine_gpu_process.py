"""A function that answers orders in a process of its own: rivals and profiles of `keystage bench engine`.

Whatever it takes of a GPU is gone with it, and what it does wrong is an answer, not the end of the run.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

from keystage.bench.frame import BenchError


class OrderError(Exception):
    """An order that could not be carried out; says why."""


class Orders:
    """A process that answers.

    Args:
        answer: called there with each order; its result travels back, an exception's text does too.
        name: for messages.
    """

    def __init__(self, answer: Callable[[dict[str, Any]], Any], name: str) -> None:
        self._name = name
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, answer), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends it."""
        self.close()

    def close(self) -> None:
        """Ends it."""
        self._connection.close()
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(5)

    def ask(self, timeout_s: float, **order: Any) -> Any:
        """Carries an order out.

        Raises:
            OrderError: it failed there.
            BenchError: the process has ended, or takes too long.
        """
        try:
            self._connection.send(order)
            if not self._connection.poll(max(1.0, timeout_s)):
                self._process.kill()
                raise BenchError(f"{self._name} did not answer within {timeout_s:.0f} s: {order}")
            is_done, answer = self._connection.recv()
        except (EOFError, OSError) as error:
            raise BenchError(f"{self._name} has ended (exit {self._process.exitcode}): {order}") from error
        if not is_done:
            raise OrderError(f"{self._name}: {answer}")
        return answer


def _serve(connection: Connection, answer: Callable[[dict[str, Any]], Any]) -> None:
    while True:
        try:
            order = connection.recv()
        except EOFError:
            return
        try:
            reply = (True, answer(order))
        except Exception as error:  # noqa: BLE001  # whatever it is: whoever asked is told, and goes on
            reply = (False, f"{order}: {type(error).__name__}: {error}"[:800])
        connection.send(reply)
