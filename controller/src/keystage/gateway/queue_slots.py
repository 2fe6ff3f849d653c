"""How many calls of which function may run at once. Pure; used by `gateway.queue_runner`.

A function has a bound of its own and all have one together. A function that runs nothing may always
begin one call, so that however many slow functions fill the common bound, none is shut out.
"""

from __future__ import annotations

from collections.abc import Iterable


class Slots:
    """Calls in flight by function.

    Args:
        per_function: bound of each function.
        in_all: bound of all together, exceeded at most by one call of every function.
    """

    def __init__(self, per_function: int, in_all: int) -> None:
        self._per_function = per_function
        self._in_all = in_all
        self._running: dict[str, int] = {}
        self._total = 0

    def running(self) -> dict[str, int]:
        """Calls in flight by function."""
        return dict(self._running)

    def room(self, functions: Iterable[str]) -> dict[str, int]:
        """How many calls each may begin now, in equal shares of what is free.

        Args:
            functions: those that have calls waiting.
        """
        able = [f for f in functions if self._running.get(f, 0) < self._per_function]
        if not able:
            return {}
        share, left = divmod(max(0, self._in_all - self._total), len(able))
        room = {}
        # Who runs least is first served with what does not divide evenly.
        for function in sorted(able, key=lambda f: self._running.get(f, 0)):
            running = self._running.get(function, 0)
            given = share + (1 if left > 0 else 0)
            left -= 1
            if not running:
                given = max(given, 1)
            if given:
                room[function] = min(given, self._per_function - running)
        return room

    def begin(self, function: str) -> None:
        """Counts a call that begins."""
        self._running[function] = self._running.get(function, 0) + 1
        self._total += 1

    def end(self, function: str) -> None:
        """Counts a call as ended."""
        self._total -= 1
        left = self._running[function] - 1
        if left:
            self._running[function] = left
        else:
            del self._running[function]
