"""The batching policy of a pipeline by its name, as `KEYSTAGE_BATCHING` and worlds give it. Pure.

Before it: a setting in words. After it: `router.binding` and `simulator.scheduled` make the policy of it,
one for each stage. The words are documented in docs/batching.md.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, TypeAlias, get_args

PolicyName: TypeAlias = Literal["eager", "timeout", "deferred", "partial-slo"]
Late: TypeAlias = Literal["demote", "refuse"]
"""What becomes of requests that cannot meet their deadlines: they wait behind the others, or are refused."""

LONGEST_TIMEOUT_MS = 60_000.0


@dataclasses.dataclass(frozen=True, slots=True)
class BatchingChoice:
    """When batches start.

    Attributes:
        policy: see docs/batching.md.
        timeout_s: how long the oldest request waits for others (`timeout`).
    """

    policy: PolicyName = "eager"
    timeout_s: float = 0.0

    def __str__(self) -> str:
        return f"timeout:{1e3 * self.timeout_s:g}" if self.policy == "timeout" else self.policy


EAGER = BatchingChoice()


def parse_batching(text: str) -> BatchingChoice:
    """Reads `eager`, `timeout:MS`, `deferred` or `partial-slo`.

    Raises:
        ValueError: it is none of them, or MS is no number of milliseconds; names the value and the bound.
    """
    name, colon, value = text.partition(":")
    policy: PolicyName | None = next((p for p in get_args(PolicyName) if p == name), None)
    if policy is None or (colon and policy != "timeout"):
        raise ValueError(f"{text!r} is no batching: it must be eager, timeout:MS, deferred or partial-slo")
    if policy != "timeout":
        return BatchingChoice(policy)
    try:
        timeout_ms = float(value)
    except ValueError:
        timeout_ms = math.nan
    if not 0 <= timeout_ms <= LONGEST_TIMEOUT_MS:
        raise ValueError(
            f"{text!r}: timeout needs milliseconds, 0 to {LONGEST_TIMEOUT_MS:g} (timeout:5), not {value!r}"
        )
    return BatchingChoice(policy, timeout_ms / 1e3)


def parse_late(text: str) -> Late:
    """Reads `demote` or `refuse`.

    Raises:
        ValueError: it is neither.
    """
    late: Late | None = next((choice for choice in get_args(Late) if choice == text), None)
    if late is None:
        raise ValueError(f"{text!r} must be demote or refuse")
    return late
