"""A histogram of times that keeps three significant digits, is quick to feed, and can be merged.

`progress` feeds one while a run goes; `report` keeps those of the whole run, so that runs of several
machines can be merged without their rows. Final percentiles come from all rows (`measures`), not from
here. Pure.

Log-linear, as in Tene's HdrHistogram (hdrhistogram.org): every octave [2^k, 2^(k+1)) of the unit has
1,024 buckets of equal width. A value v of at least one unit and its bucket's middle differ by at most
v / 2048 (0.05 %); values below one unit (1 us) lie in one bucket, [0, 1 us). Quantiles are nearest-rank,
as in `measures`: the bucket that holds the exact nearest-rank value is found, so the error bound of a
value is that of a quantile. Counts are integers and the sum is in whole nanoseconds, hence merging is
exact, commutative and associative: the merge is the histogram of the union.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator

import numpy as np

UNIT_S = 1e-6
"""Finer than any clock that a request passes."""

SIGNIFICANT_DIGITS = 3
SUBBUCKETS = 1024
"""Per octave; the power of two that gives 3 significant digits."""

MAX_S = 1e9
"""30 years: whatever is later than this is no time a run can have measured."""

RELATIVE_ERROR = 1 / (2 * SUBBUCKETS)


class HistogramError(ValueError):
    """A value that is no time, or a record that cannot be read."""


@dataclasses.dataclass(frozen=True, slots=True)
class HistogramRecord:
    """A histogram as JSON keeps it.

    Attributes:
        unit_s: end of the lowest bucket; octaves begin there.
        subbuckets: buckets per octave.
        failed: values that are infinitely late.
        total_ns: sum of the others, in nanoseconds.
        min_s: least of them, None if there are none.
        max_s: largest of them.
        buckets: `index:count` pairs, ascending, separated by blanks. Index 0 is [0, unit); index
            1 + subbuckets * k + j is [2^k (1 + j / subbuckets), 2^k (1 + (j + 1) / subbuckets)) units.
    """

    unit_s: float
    subbuckets: int
    failed: int
    total_ns: int
    min_s: float | None
    max_s: float | None
    buckets: str


class Histogram:
    """Counts of times in seconds.

    Attributes:
        failed: values recorded as infinitely late.
        count: all values, failed ones included.
    """

    __slots__ = ("_buckets", "_max_s", "_min_s", "_total_ns", "count", "failed")

    def __init__(self) -> None:
        self._buckets: dict[int, int] = {}
        self._min_s, self._max_s = math.inf, -math.inf
        self._total_ns = 0
        self.count = 0
        self.failed = 0

    def record(self, value_s: float) -> None:
        """Takes one value; below 0 (clocks of two processes) counts as 0.

        Raises:
            HistogramError: for NaN, infinity or more than `MAX_S`.
        """
        if not value_s <= MAX_S:
            raise HistogramError(f"a time must be a number up to {MAX_S:g} s, got {value_s}")
        value_s = max(value_s, 0.0)
        index = index_of(value_s)
        self._buckets[index] = self._buckets.get(index, 0) + 1
        self._total_ns += round(value_s * 1e9)
        self._min_s, self._max_s = min(self._min_s, value_s), max(self._max_s, value_s)
        self.count += 1

    def fail(self, count: int = 1) -> None:
        """Takes values that are infinitely late."""
        self.count += count
        self.failed += count

    @classmethod
    def of(cls, values_s: Iterable[float], failed: int = 0) -> Histogram:
        """A histogram of these values.

        Raises:
            HistogramError: as `record`.
        """
        made = cls()
        for value_s in values_s:
            made.record(value_s)
        made.fail(failed)
        return made

    def merge(self, other: Histogram) -> Histogram:
        """A new histogram of both together."""
        made = Histogram()
        made._buckets = dict(self._buckets)
        for index, count in other._buckets.items():
            made._buckets[index] = made._buckets.get(index, 0) + count
        made._total_ns = self._total_ns + other._total_ns
        made._min_s = min(self._min_s, other._min_s)
        made._max_s = max(self._max_s, other._max_s)
        made.count, made.failed = self.count + other.count, self.failed + other.failed
        return made

    def quantile(self, probability: float) -> float | None:
        """Nearest-rank quantile in seconds, within 0.05 %; None on a failure or with no values."""
        if not 0 <= probability <= 1:
            raise HistogramError(f"a probability must be in 0..1, got {probability}")
        rank = max(math.ceil(probability * self.count), 1)
        if rank > self.count - self.failed:
            return None
        buckets = self._buckets.copy()  # one step of the interpreter: another thread may be recording
        order = sorted(buckets)
        ends = itertools.accumulate(buckets[index] for index in order)
        index = next((i for i, end in zip(order, ends, strict=True) if end >= rank), order[-1])
        low_s, high_s = bounds_s(index)
        return min(max((low_s + high_s) / 2, self._min_s), self._max_s)

    @property
    def mean_s(self) -> float | None:
        """Of values that did not fail, None if there are none."""
        served = self.count - self.failed
        return self._total_ns / 1e9 / served if served else None

    @property
    def max_s(self) -> float | None:
        """Likewise, exactly."""
        return self._max_s if self.count > self.failed else None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Histogram):
            return NotImplemented
        return self.record_of() == other.record_of()

    __hash__ = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[tuple[float, float, int]]:
        """Buckets that hold something: from, to (seconds), count; ascending."""
        for index in sorted(self._buckets):
            yield (*bounds_s(index), self._buckets[index])

    def record_of(self) -> HistogramRecord:
        """As JSON keeps it."""
        served = self.count > self.failed
        return HistogramRecord(
            unit_s=UNIT_S,
            subbuckets=SUBBUCKETS,
            failed=self.failed,
            total_ns=self._total_ns,
            min_s=self._min_s if served else None,
            max_s=self._max_s if served else None,
            buckets=" ".join(f"{index}:{self._buckets[index]}" for index in sorted(self._buckets)),
        )

    @classmethod
    def from_record(cls, record: HistogramRecord) -> Histogram:
        """Reads it back.

        Raises:
            HistogramError: buckets of another size, or text that is none.
        """
        if (record.unit_s, record.subbuckets) != (UNIT_S, SUBBUCKETS):
            raise HistogramError(
                f"histogram of unit {record.unit_s:g} s and {record.subbuckets} buckets an octave; "
                f"only {UNIT_S:g} s and {SUBBUCKETS} can be merged"
            )
        made = cls()
        try:
            pairs = [(int(i), int(n)) for i, _, n in (p.partition(":") for p in record.buckets.split())]
        except ValueError as error:
            raise HistogramError(f"buckets of a histogram: {error}") from error
        if any(index < 0 or count < 1 for index, count in pairs) or record.failed < 0:
            raise HistogramError("buckets of a histogram: an index below 0, or a count below 1")
        made._buckets = dict(pairs)
        made.count = sum(count for _, count in pairs) + record.failed
        made.failed = record.failed
        made._total_ns = record.total_ns
        if pairs:
            if record.min_s is None or record.max_s is None:
                raise HistogramError("a histogram with values lacks its least or largest one")
            made._min_s, made._max_s = record.min_s, record.max_s
        return made


def merged(parts: Iterable[Histogram]) -> Histogram:
    """All of them together."""
    whole = Histogram()
    for part in parts:
        whole = whole.merge(part)
    return whole


def index_of(value_s: float) -> int:
    """Bucket of a time of at least 0."""
    units = value_s / UNIT_S
    if units < 1:
        return 0
    mantissa, exponent = math.frexp(units)  # units = mantissa * 2^exponent, mantissa in [0.5, 1)
    return 1 + SUBBUCKETS * (exponent - 1) + int((2 * mantissa - 1) * SUBBUCKETS)


def bounds_s(index: int) -> tuple[float, float]:
    """Where a bucket begins and ends."""
    if index == 0:
        return 0.0, UNIT_S
    octave, place = divmod(index - 1, SUBBUCKETS)
    unit_s = math.ldexp(UNIT_S, octave)
    return unit_s * (1 + place / SUBBUCKETS), unit_s * (1 + (place + 1) / SUBBUCKETS)


def rounded(values_s: np.typing.NDArray[np.float64]) -> np.typing.NDArray[np.float64]:
    """Every value as its bucket's middle, infinities as they are; values below a unit are half a unit."""
    units = np.asarray(values_s, dtype=np.float64) / UNIT_S
    mantissa, exponent = np.frexp(units)
    middle = np.ldexp((np.floor(mantissa * 2 * SUBBUCKETS) + 0.5) / (2 * SUBBUCKETS), exponent) * UNIT_S
    made: np.typing.NDArray[np.float64] = np.where(units < 1, UNIT_S / 2, middle)
    return np.where(np.isfinite(values_s), made, values_s)
