"""How long a function's next pod is put off after pods of it failed. Pure but for what it remembers.

Before it: `reconciler` sees pods that ended. After it: `plan` makes no new ones before the hold is over.
Failures that come long after one another do not add up. A new leader begins with none. Belongs to one thread.
"""

from __future__ import annotations

import dataclasses

HEALTHY_S = 30.0
"""Without a failure for so long, beyond the hold, the next one counts as the first."""
FIRST_S = 0.5
LONGEST_S = 30.0


def backoff_s(failures: int) -> float:
    """Seconds to wait after so many failures in a row: 0, 0.5, 1, 2 ... 30."""
    return 0.0 if failures <= 1 else min(LONGEST_S, FIRST_S * 2.0 ** min(failures - 2, 10))


@dataclasses.dataclass(frozen=True, slots=True)
class _Run:
    failures: int
    at_s: float


class Backoff:
    """Failures in a row, by whatever fails."""

    def __init__(self) -> None:
        self._runs: dict[str, _Run] = {}

    def failed(self, key: str, at_s: float) -> None:
        """One failed.

        Args:
            key: function, and the template it fails with: another one begins anew.
            at_s: Unix seconds.
        """
        before = self._runs.get(key)
        is_next = before is not None and at_s - before.at_s < HEALTHY_S + backoff_s(before.failures)
        self._runs[key] = _Run((before.failures if before is not None and is_next else 0) + 1, at_s)

    def hold_until_s(self, key: str) -> float:
        """Unix seconds before which there shall be no new one, 0: at once."""
        run = self._runs.get(key)
        return run.at_s + backoff_s(run.failures) if run is not None else 0.0

    def keep_only(self, keys: set[str]) -> None:
        """Forgets the others."""
        self._runs = {key: run for key, run in self._runs.items() if key in keys}
