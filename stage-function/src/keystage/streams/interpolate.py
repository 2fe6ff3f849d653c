"""Service time of a module from few measurements: over batch and tokens, and on part of a device. Pure.

Profiling every batch size and length takes too long, so a grid is measured and what lies between is
interpolated, as DistServe does (NeuStream, section 6.5). After it: `keystage.batching` (largest batch within
a partial SLO) and `streams.allocate` (L(b, a)).

- Between measured points time is piecewise linear, in batch and in tokens.
- Times never fall with batch or tokens: a measured point below a smaller one's is noise and is raised to it,
  so that no batch is promised less than what a smaller one took.
- Below the least measured batch or length the least's time counts (it is no less than the truth).
- Beyond the largest measured batch there is no batch; a length beyond the largest measured is refused: the
  straight line that would continue the grid is wrong exactly there, where memory or attention takes over.
- A module that has a of the n K SPUs of n devices runs at a / (n K) of their rate, L(b, a) = L(b) n K / a
  (NeuStream, section 5).
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Sequence

from keystage.batching.profile import LatencyProfile, ProfileError


@dataclasses.dataclass(frozen=True, slots=True)
class TableProfile(LatencyProfile):
    """A service time given by points; whoever needs a line finds the least-squares one in its fields.

    Make it with `table`.

    Attributes:
        batches: measured sizes, ascending.
        seconds: time of each, never falling.
    """

    batches: tuple[int, ...] = ()
    seconds: tuple[float, ...] = ()

    def latency_s(self, batch: int) -> float:
        """Seconds of a batch of this size, between measured sizes by a straight line.

        Raises:
            ProfileError: it is larger than any that was measured.
        """
        if batch > self.most:
            raise ProfileError(f"a batch of {batch} was not measured, the largest is {self.most}")
        place = bisect.bisect_left(self.batches, batch)
        if place == 0 or self.batches[place] == batch:
            return self.seconds[place]
        low, high = self.batches[place - 1], self.batches[place]
        part = (batch - low) / (high - low)
        return self.seconds[place - 1] + part * (self.seconds[place] - self.seconds[place - 1])

    def largest_batch(self, within_s: float) -> int:
        """The largest batch that takes at most so many seconds, 0 when not even one item does."""
        place = bisect.bisect_right(self.seconds, within_s)
        if place == 0:
            return 0
        if place == len(self.seconds):
            return self.most
        low, high = self.batches[place - 1], self.batches[place]
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.latency_s(middle) <= within_s else (low, middle)
        return low


def table(batches: Sequence[int], seconds: Sequence[float]) -> TableProfile:
    """A profile from measured points.

    Args:
        batches: sizes, ascending, at least 1.
        seconds: time of each.

    Raises:
        ProfileError: names what is not ascending, missing or no time.
    """
    _check_axis("batches", batches)
    if len(seconds) != len(batches):
        raise ProfileError(f"{len(batches)} batch sizes need as many times, got {len(seconds)}")
    for batch, value in zip(batches, seconds, strict=True):
        if not (math.isfinite(value) and value > 0):
            raise ProfileError(f"the time of a batch of {batch} must be more than 0 s, it is {value}")
    rising = tuple(itertools.accumulate(seconds, max))
    alpha_s, beta_s = _line(batches, rising)
    return TableProfile(alpha_s, beta_s, batches[-1], tuple(batches), rising)


@dataclasses.dataclass(frozen=True, slots=True)
class ProfileGrid:
    """Service time measured over batch and tokens. Make it with `grid`.

    Attributes:
        batches: sizes, ascending.
        tokens: lengths of each request, ascending; (1,) where time depends on the batch alone.
        seconds: [batches][tokens], falling along neither.
    """

    batches: tuple[int, ...]
    tokens: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]

    def at(self, tokens: float) -> TableProfile:
        """The profile over batches of requests of this length.

        Args:
            tokens: length of each request, or their mean.

        Raises:
            ProfileError: longer than any that was measured.
        """
        if tokens > self.tokens[-1]:
            raise ProfileError(f"{tokens:g} tokens were not measured, the longest are {self.tokens[-1]}")
        place = bisect.bisect_left(self.tokens, tokens)
        if place == 0:
            return table(self.batches, [row[0] for row in self.seconds])
        low, high = self.tokens[place - 1], self.tokens[place]
        part = (tokens - low) / (high - low)
        return table(
            self.batches, [row[place - 1] + part * (row[place] - row[place - 1]) for row in self.seconds]
        )

    def latency_s(self, batch: int, tokens: float) -> float:
        """Seconds of a batch of requests of this length.

        Raises:
            ProfileError: outside what was measured.
        """
        return self.at(tokens).latency_s(batch)


def grid(batches: Sequence[int], tokens: Sequence[int], seconds: Sequence[Sequence[float]]) -> ProfileGrid:
    """A grid from measurements.

    Args:
        batches: sizes, ascending, at least 1.
        tokens: lengths, ascending, at least 1.
        seconds: [batches][tokens].

    Raises:
        ProfileError: names what is not ascending, missing or no time.
    """
    _check_axis("tokens", tokens)
    for batch, row in zip(batches, seconds, strict=False):
        if len(row) != len(tokens):
            raise ProfileError(f"batch {batch} needs {len(tokens)} times, one a length, got {len(row)}")
    columns = [table(batches, [row[place] for row in seconds]).seconds for place in range(len(tokens))]
    rows = [tuple(itertools.accumulate(row, max)) for row in zip(*columns, strict=True)]
    return ProfileGrid(tuple(batches), tuple(tokens), tuple(rows))


def slowed(profile: LatencyProfile, factor: float, item_s: float = 0.0) -> LatencyProfile:
    """The profile on a slower device.

    Args:
        profile: seconds by batch size.
        factor: so many times as long.
        item_s: seconds that each item costs besides, such as its way from another device.

    Raises:
        ProfileError: the factor is not positive, or the seconds are negative.
    """
    if not (math.isfinite(factor) and factor > 0):
        raise ProfileError(f"a profile is slowed by more than 0, not by {factor}")
    if isinstance(profile, TableProfile):
        times = [factor * s + item_s * b for b, s in zip(profile.batches, profile.seconds, strict=True)]
        return table(profile.batches, times)
    return LatencyProfile(factor * profile.alpha_s + item_s, factor * profile.beta_s, profile.most)


def on_spus(profile: LatencyProfile, spus: float, devices: int, device_spus: int) -> LatencyProfile:
    """L(b, a) = L(b) n K / a.

    Args:
        profile: L(b), measured on all of n devices.
        spus: a, what the module has of them, all devices together.
        devices: n.
        device_spus: K of each.

    Raises:
        ProfileError: a is not positive, or more than the devices have.
    """
    whole = devices * device_spus
    if not 0 < spus <= whole:
        raise ProfileError(f"a module has between 1 and {whole} SPUs of {devices} devices, not {spus:g}")
    return profile if spus == whole else slowed(profile, whole / spus)


def economical_batch(profile: LatencyProfile, within_s: float, ratio: float) -> int:
    """The batch beyond which a larger one gains little (NeuStream, section 2, challenge II).

    Args:
        profile: seconds by batch size.
        within_s: no larger batch than fits this time.
        ratio: of the best throughput b / L(b) there is within the time, so much is enough.

    Returns:
        The smallest batch with that throughput, 0 when not even one item fits.
    """
    most = profile.largest_batch(within_s)
    rates = [batch / profile.latency_s(batch) for batch in range(1, most + 1)]
    enough = ratio * max(rates, default=0.0)
    return next((batch for batch, rate in enumerate(rates, start=1) if rate >= enough), 0)


def _check_axis(name: str, values: Sequence[int]) -> None:
    if not values:
        raise ProfileError(f"a profile needs at least one point, {name} has none")
    if values[0] < 1 or any(later <= earlier for earlier, later in itertools.pairwise(values)):
        raise ProfileError(f"{name} must ascend from at least 1, got {list(values)}")


def _line(batches: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Least squares through the points, neither part below 0."""
    mean_b, mean_s = sum(batches) / len(batches), sum(seconds) / len(seconds)
    spread = sum((b - mean_b) ** 2 for b in batches)
    together = sum((b - mean_b) * (s - mean_s) for b, s in zip(batches, seconds, strict=True))
    alpha_s = max(0.0, together / spread) if spread else 0.0  # rounding may leave a flat line below 0
    beta_s = mean_s - alpha_s * mean_b
    if beta_s < 0:
        return sum(b * s for b, s in zip(batches, seconds, strict=True)) / sum(b * b for b in batches), 0.0
    return alpha_s, beta_s
