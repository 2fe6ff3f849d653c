"""What of a steering may be tuned, as data: the search gives every policy the same budget on these.

Read by `keystage.bench.tuning`. A range is part of a policy's description: it says between which values
the authors, or a platform engineer, would set it.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class Range(msgspec.Struct, frozen=True):
    """Values of one parameter.

    Attributes:
        low: smallest value.
        high: largest value.
        is_log: whether it is searched by its logarithm (then low > 0).
        is_whole: whether it is a whole number.
    """

    low: float
    high: float
    is_log: bool = False
    is_whole: bool = False

    def __post_init__(self) -> None:
        """Checks the bounds.

        Raises:
            ValueError: low above high, or a logarithmic range that does not start above 0.
        """
        if not self.low <= self.high:
            raise ValueError(f"a range needs low <= high, got {self.low} and {self.high}")
        if self.is_log and not self.low > 0:
            raise ValueError(f"a logarithmic range needs low > 0, got {self.low}")


class Choice(msgspec.Struct, frozen=True):
    """One of a few values without an order."""

    values: tuple[str | bool | float, ...]


Ranges = Mapping[str, Range | Choice]
