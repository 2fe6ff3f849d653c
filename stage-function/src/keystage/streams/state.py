"""What a module keeps of its requests between their visits, and when it goes. Pure.

A module puts and gets; the runtime evicts a request when it leaves the module's loop, ends, or is
cancelled. Nothing is ever evicted for want of room: who admits requests bounds them.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Closing(Protocol):
    """A value that holds something beyond itself: a slot of KV state, a file."""

    def close(self) -> None:
        """Gives it back; called once."""


class StateError(Exception):
    """State where none was announced."""

    http_status = 500


class StateStore:
    """State of one module, by (request, key). Not safe for several threads.

    A value with a `close()` method is closed when it is deleted, replaced or evicted.

    Args:
        owner: name of the module's class, for messages.
        is_allowed: whether the module said that it keeps state; else a deployment would send its messages
            to any replica.
    """

    def __init__(self, owner: str = "the module", *, is_allowed: bool = True) -> None:
        self._owner = owner
        self._is_allowed = is_allowed
        self._values: dict[int, dict[str, Any]] = {}

    def get(self, request: int, key: str, default: Any = None) -> Any:
        """The value, or the default where there is none."""
        return self._values.get(request, {}).get(key, default)

    def put(self, request: int, key: str, value: Any) -> None:
        """Keeps a value; one of the same key is replaced.

        Raises:
            StateError: the module never said that it keeps state.
        """
        if not self._is_allowed:
            raise StateError(f"{self._owner} puts state {key!r}: it must say is_stateful = True")
        values = self._values.setdefault(request, {})
        before = values.get(key)
        values[key] = value
        if before is not value:
            _close(before)

    def delete(self, request: int, key: str) -> bool:
        """Forgets a value; False where there is none."""
        values = self._values.get(request, {})
        if key not in values:
            return False
        value = values.pop(key)
        if not values:
            del self._values[request]
        _close(value)
        return True

    def evict(self, request: int) -> int:
        """Forgets all that belongs to a request, in the order in which it was put.

        Returns:
            How many values there were.
        """
        values = self._values.pop(request, {})
        for value in values.values():
            _close(value)
        return len(values)

    @property
    def requests(self) -> list[int]:
        """Requests of which something is kept."""
        return list(self._values)

    def __len__(self) -> int:
        return sum(len(values) for values in self._values.values())


def _close(value: Any) -> None:
    if isinstance(value, Closing):
        value.close()
