"""What can go wrong at the API server, on demand: errors, delays, watches that break or fall silent."""

from __future__ import annotations

import dataclasses
import threading
import time

from support.kube.answers import Refused


@dataclasses.dataclass(slots=True)
class _Rule:
    left: int
    code: int
    verb: str
    resource: str
    delay_s: float


class Faults:
    """Faults to come. The HTTP face asks `before` each request and `is_mute` before each event."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rules: list[_Rule] = []
        self.is_mute = False
        """Watches stay open and say nothing: a half-open connection."""
        self.watch_round = 0
        """Watches of an earlier round break off."""

    def fail(self, times: int = 1, *, code: int = 500, verb: str = "", resource: str = "") -> None:
        """The next so many requests are refused; empty verb or resource (`pods`, `pods/status`): any."""
        with self._lock:
            self._rules.append(_Rule(times, code, verb, resource, 0.0))

    def delay(self, delay_s: float, times: int = 1, *, verb: str = "", resource: str = "") -> None:
        """The next so many requests take longer."""
        with self._lock:
            self._rules.append(_Rule(times, 0, verb, resource, delay_s))

    def drop_watches(self) -> None:
        """Every open watch breaks off in the middle."""
        with self._lock:
            self.watch_round += 1

    def clear(self) -> None:
        """No more faults."""
        with self._lock:
            self._rules.clear()
        self.is_mute = False

    def before(self, verb: str, resource: str) -> None:
        """Delays or refuses a request.

        Raises:
            Refused: as it was asked for.
        """
        with self._lock:
            hits = [
                r for r in self._rules
                if r.left > 0 and r.verb in ("", verb) and r.resource in ("", resource)
            ]  # fmt: skip
            for rule in hits:
                rule.left -= 1
        for rule in hits:
            if rule.delay_s:
                time.sleep(rule.delay_s)
            if rule.code:
                raise Refused(
                    rule.code, _REASONS.get(rule.code, "InternalError"), "fault asked for by the test"
                )


_REASONS = {
    401: "Unauthorized",
    403: "Forbidden",
    409: "Conflict",
    410: "Expired",
    429: "TooManyRequests",
    500: "InternalError",
    503: "ServiceUnavailable",
    504: "Timeout",
}
