"""What the core of a looping pipeline wants sent: by worker, in an order that workers can follow. Pure.

Room is made before it is given away (`Release` before `Start` and `Move`): a wave of the new session may be
quick.
"""

from __future__ import annotations

from collections.abc import Iterable

from keystage.router.fleet import Fleet
from keystage.router.sessions import Session
from keystage.wire import api


class LoopingSends:
    """Messages to be sent, in order.

    Args:
        fleet: the workers; those that are gone are told nothing.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._sends: list[tuple[str, api.Message]] = []
        self._releases: dict[str, tuple[list[int], list[int]]] = {}
        self._started: dict[str, list[api.SessionSpec]] = {}
        self._moved: dict[str, list[api.SessionSpec]] = {}

    def add(self, address: str, message: api.Message) -> None:
        """One message, after what was sent before."""
        self._sends.append((address, message))

    def release(self, session: Session, addresses: Iterable[str]) -> None:
        """Workers are to free what they have of a session."""
        for address in set(addresses):
            if address in self._fleet.workers:
                sessions, epochs = self._releases.setdefault(address, ([], []))
                sessions.append(session.number)
                epochs.append(session.epoch)

    def start(self, owner: str, spec: api.SessionSpec) -> None:
        """The owner of a path is given a session."""
        self._started.setdefault(owner, []).append(spec)

    def move(self, owner: str, spec: api.SessionSpec) -> None:
        """A session goes on under a higher epoch."""
        self._moved.setdefault(owner, []).append(spec)

    def flush(self) -> None:
        """Puts what was gathered behind what was sent."""
        for address, (sessions, epochs) in self._releases.items():
            self._sends.append((address, api.Release(sessions, epochs)))
        self._sends += [(owner, api.Start(specs)) for owner, specs in self._started.items()]
        self._sends += [(owner, api.Move(specs)) for owner, specs in self._moved.items()]
        self._releases, self._started, self._moved = {}, {}, {}

    def take(self) -> list[tuple[str, api.Message]]:
        """Everything; forgets it."""
        self.flush()
        taken, self._sends = self._sends, []
        return taken
