"""What every gateway has in hand for every function, asked for several times a second.

Before it: gateway pods (`GET /_/loads`). After it: the controller's platform (plain functions are scaled by
it), and the reconciler (a pod that leaves is deleted once nobody has a request there). A gateway that cannot
be read may have anything in hand: then loads are missing, which holds numbers and pods. Deleted pods count as
long as they run. It must not decide.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from keystage.kubernetes.api import HTTP_PORT, LOADS_PATH
from keystage.kubernetes.asking import Asking, NotAnswered
from keystage.kubernetes.polled import Heard, Polled
from keystage.kubernetes.view import address_of, condition, is_ended
from keystage.kubernetes.world import World
from keystage.local.api import Load
from keystage.wire.unreadable import UNREADABLE

EVERY_S = 0.25
TIMEOUT_S = 0.5
LOST_S = 30.0
"""A gateway that is neither ready nor heard of for so long is taken for dead: its node is gone, and its
clients with it."""

Told = dict[str, Load]
"""By function."""


@dataclasses.dataclass(frozen=True, slots=True)
class Loads:
    """What is known at one moment.

    Attributes:
        by_function: every gateway's newest word, by function; `at_s` is when it was asked for (Unix seconds).
        unread: gateways whose present word is missing, with the reason.
        asked_at_s: when the oldest word of those was asked for (Unix seconds), infinite without gateways.
    """

    by_function: Mapping[str, tuple[Load, ...]]
    unread: Mapping[str, str]
    asked_at_s: float

    def requests_on(self, function: str, replica: str, since_s: float) -> int | None:
        """Requests that gateways have on a replica, all of it asked for after a moment.

        Args:
            function: the replica's function.
            replica: its name.
            since_s: Unix seconds.

        Returns:
            None where some gateway has not told since then.
        """
        if self.unread or self.asked_at_s <= since_s:
            return None
        return sum(load.replicas.get(replica, 0) for load in self.by_function.get(function, ()))


class GatewayLoads:
    """Asks all gateways.

    Args:
        world: knows the gateways' pods.
        asking: the exchanges.
        port: of gateways.
    """

    def __init__(self, world: World, asking: Asking, *, port: int = HTTP_PORT) -> None:
        self._world = world
        self._asking = asking
        self._port = port
        self._polled = Polled(
            "gateway-loads", self._targets, self._ask, every_s=EVERY_S, now_s=world.clock.now_s
        )

    def start(self) -> None:
        """Begins to ask."""
        self._polled.start()

    def stop(self) -> None:
        """Ends."""
        self._polled.stop()

    def now(self) -> Loads:
        """What is known now; a gateway that has appeared since the last round is not read yet."""
        heard = self._polled.heard()
        by_function: dict[str, list[Load]] = {}
        unread: dict[str, str] = {}
        oldest_s = float("inf")
        for name, pod in self._running():
            word = heard.get(name)
            if word is None or word.answer is None or not word.is_current:
                if not _is_lost(pod, word, self._world.clock.now_s()):
                    unread[name] = word.reason if word is not None else "it was not asked yet"
                continue
            oldest_s = min(oldest_s, word.answered_at_s)
            for function, load in word.answer.items():
                told = msgspec.structs.replace(load, at_s=word.answered_at_s)
                by_function.setdefault(function, []).append(told)
        return Loads({name: tuple(loads) for name, loads in by_function.items()}, unread, oldest_s)

    def _running(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Gateway pods in which a process may run."""
        for name, pod in self._world.gateways().items():
            if _may_run(pod):
                yield name, pod

    def _targets(self) -> dict[str, str]:
        return {name: address_of(pod, self._port) for name, pod in self._running()}

    def _ask(self, name: str, address: str) -> Told:
        body = self._asking.ask("GET", address, LOADS_PATH, timeout_s=TIMEOUT_S)
        try:
            return dict(msgspec.json.decode(body, type=list[tuple[str, Load]]))
        except UNREADABLE as error:
            raise NotAnswered(f"gateway {name}: {error}") from error


def _may_run(pod: Mapping[str, Any]) -> bool:
    status = pod.get("status", {})
    if is_ended(pod) or not status.get("podIP"):
        return False
    states = [entry.get("state", {}) for entry in status.get("containerStatuses") or ()]
    return not states or any("running" in state for state in states)


def _is_lost(pod: Mapping[str, Any], word: Heard[Told] | None, now_s: float) -> bool:
    if condition(pod, "Ready").get("status") == "True" or word is None:
        return False
    return bool(word.failed_since_s) and now_s - word.failed_since_s >= LOST_S
