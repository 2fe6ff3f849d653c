"""Rates over time: ramps, steps, bursts, and the states of a modulated process. Pure.

Comes after `arrivals_spec`, which reads them, and before `arrivals_process`, which places arrivals
by them. Each becomes an `Intensity`: a rate lambda(t) that is linear between edges and may jump at
them. Arrivals are placed by time change: for an increasing sequence u of a process of rate 1,
t = L^-1(u) with L(t) = integral of lambda from 0 to t is a process of rate lambda(t) (Cinlar,
"Introduction to Stochastic Processes", 1975, section 4.7, for Poisson). Gaps keep their CV in the
time of L, hence also in clock time where the rate changes little within a gap.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Protocol

import numpy as np

from keystage.loadgen.arrivals import ArrivalError, Floats, check_positive, stream

MAX_EDGES = 1_000_000
"""Changes of rate in one run."""

_CHUNK = 4096


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Intensity:
    """A rate that is linear in each of n pieces.

    Attributes:
        edges_s: where pieces begin and end, ascending from 0, shape (n + 1,).
        begin_rps: rate at the begin of each piece, shape (n,).
        end_rps: rate at its end, shape (n,).
    """

    edges_s: Floats
    begin_rps: Floats
    end_rps: Floats

    @property
    def total(self) -> float:
        """Arrivals expected over all pieces."""
        return float(self._areas().sum())

    @property
    def mean_rps(self) -> float:
        """Mean rate over all pieces."""
        return self.total / float(self.edges_s[-1])

    @property
    def peak_rps(self) -> float:
        """The highest rate."""
        return float(max(self.begin_rps.max(), self.end_rps.max()))

    def scaled(self, factor: float) -> Intensity:
        """The same shape at `factor` times the rate."""
        return Intensity(self.edges_s, self.begin_rps * factor, self.end_rps * factor)

    def place(self, counted: Floats) -> Floats:
        """Clock times at which the integral of the rate reaches the given values.

        In a piece of length l from rate a to b, the integral y is reached after
        x = 2 y / (a + sqrt(a^2 + 2 y (b - a) / l)), which is stable for b = a and for a = 0.

        Args:
            counted: ascending values in [0, total], shape (m,).
        """
        ends = np.cumsum(self._areas())
        values = np.minimum(counted, ends[-1])
        piece = np.minimum(np.searchsorted(ends, values, side="left"), len(ends) - 1)
        begins = np.concatenate(([0.0], ends[:-1]))
        lengths_s = np.diff(self.edges_s)
        y = values - begins[piece]
        a = self.begin_rps[piece]
        slope = ((self.end_rps - self.begin_rps) / lengths_s)[piece]
        root = np.sqrt(np.maximum(a * a + 2 * y * slope, 0.0))
        with np.errstate(invalid="ignore", divide="ignore"):
            x = np.where(y > 0, 2 * y / (a + root), 0.0)
        x = np.minimum(x, lengths_s[piece])
        placed: Floats = np.minimum(self.edges_s[piece] + x, self.edges_s[piece + 1])
        return np.maximum.accumulate(placed)

    def _areas(self) -> Floats:
        areas: Floats = (self.begin_rps + self.end_rps) / 2 * np.diff(self.edges_s)
        return areas


class Profile(Protocol):
    """A rate over time that is known before the run."""

    def over(self, duration_s: float) -> Intensity:
        """The rate from 0 to `duration_s`.

        Raises:
            ArrivalError: the profile does not fit the duration.
        """
        ...

    @property
    def peak_rps(self) -> float:
        """The highest rate it names."""
        ...


def flat(rate_rps: float, duration_s: float) -> Intensity:
    """One rate from 0 to `duration_s`."""
    return Intensity(np.array([0.0, duration_s]), np.array([rate_rps]), np.array([rate_rps]))


@dataclasses.dataclass(frozen=True, slots=True)
class Ramp:
    """A rate that grows or falls linearly, then stays.

    Attributes:
        from_rps: at the start.
        to_rps: at the end of the ramp and after.
        over_s: length of the ramp; the whole run if None.
    """

    from_rps: float
    to_rps: float
    over_s: float | None = None

    @property
    def peak_rps(self) -> float:
        """The highest rate it names."""
        return max(self.from_rps, self.to_rps)

    def over(self, duration_s: float) -> Intensity:
        """See `Profile`; a ramp longer than the run is cut."""
        long_s = duration_s if self.over_s is None else self.over_s
        if long_s >= duration_s:
            reached = self.from_rps + (self.to_rps - self.from_rps) * duration_s / long_s
            return Intensity(np.array([0.0, duration_s]), np.array([self.from_rps]), np.array([reached]))
        return Intensity(
            np.array([0.0, long_s, duration_s]),
            np.array([self.from_rps, self.to_rps]),
            np.array([self.to_rps, self.to_rps]),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Steps:
    """Rates that hold until the next step.

    Attributes:
        rates_rps: one more than steps; the first holds from 0.
        at_s: when the next rate begins, ascending, above 0.
    """

    rates_rps: tuple[float, ...]
    at_s: tuple[float, ...]

    @property
    def peak_rps(self) -> float:
        """The highest rate it names."""
        return max(self.rates_rps)

    def over(self, duration_s: float) -> Intensity:
        """See `Profile`; every step lies within the run, for one that is never reached is a mistake."""
        if self.at_s[-1] >= duration_s:
            raise ArrivalError(f"at must lie before the run's end at {duration_s:g} s, got {self.at_s[-1]:g}")
        rates = np.array(self.rates_rps)
        return Intensity(np.array([0.0, *self.at_s, duration_s]), rates, rates)


@dataclasses.dataclass(frozen=True, slots=True)
class Bursts:
    """A base rate with bursts.

    Attributes:
        base_rps: rate between bursts.
        height_rps: rate within a burst.
        length_s: length of a burst.
        every_s: from the begin of a burst to the begin of the next.
        first_s: begin of the first; in the middle of the first spacing if None.
    """

    base_rps: float
    height_rps: float
    length_s: float
    every_s: float
    first_s: float | None = None

    @property
    def peak_rps(self) -> float:
        """The highest rate it names."""
        return max(self.base_rps, self.height_rps)

    def over(self, duration_s: float) -> Intensity:
        """See `Profile`; at least one burst begins within the run."""
        first_s = (self.every_s - self.length_s) / 2 if self.first_s is None else self.first_s
        if first_s >= duration_s:
            raise ArrivalError(
                f"the first burst begins at {first_s:g} s, it must before the run's end at {duration_s:g} s"
            )
        count = math.ceil((duration_s - first_s) / self.every_s)
        if 2 * count > MAX_EDGES:
            raise ArrivalError(
                f"every {self.every_s:g} s gives {count} bursts in {duration_s:g} s, at most {MAX_EDGES // 2}"
            )
        begins = first_s + self.every_s * np.arange(count)
        edges = np.minimum(np.column_stack((begins, begins + self.length_s)).ravel(), duration_s)
        rates = np.tile([self.height_rps, self.base_rps], count)
        edges, rates = np.concatenate(([0.0], edges, [duration_s])), np.concatenate(([self.base_rps], rates))
        kept = np.diff(edges) > 0
        edges = np.concatenate((edges[:-1][kept], [duration_s]))
        return Intensity(edges, rates[kept], rates[kept])


@dataclasses.dataclass(frozen=True, slots=True)
class Modulation:
    """The states of a Markov-modulated Poisson process.

    The process stays in state i for an exponential time of mean dwell_s[i], then goes to one of the
    others, each as likely; so its share of time in state i is dwell_s[i] / sum(dwell_s). It starts in
    a state drawn by these shares. (Fischer and Meier-Hellstern, "The Markov-modulated Poisson process
    cookbook", Performance Evaluation 18, 1993.)

    Attributes:
        rates_rps: arrival rate in each state, two states or more.
        dwell_s: mean time in each.
    """

    rates_rps: tuple[float, ...]
    dwell_s: tuple[float, ...]

    @property
    def mean_rps(self) -> float:
        """Mean rate of an endless run."""
        weighted = sum(rate * dwell for rate, dwell in zip(self.rates_rps, self.dwell_s, strict=True))
        return weighted / sum(self.dwell_s)

    def drawn(self, duration_s: float, seed: int, purpose: int) -> Intensity:
        """One draw of the states from 0 to `duration_s`.

        Raises:
            ArrivalError: for a duration that is not positive, or too many changes of state.
        """
        check_positive("duration", duration_s)
        states, shares = len(self.rates_rps), np.array(self.dwell_s) / sum(self.dwell_s)
        expected = duration_s * states / sum(self.dwell_s)
        if expected > MAX_EDGES / 2:
            raise ArrivalError(
                f"dwell gives about {expected:.0f} changes of state in {duration_s:g} s, "
                f"at most {MAX_EDGES // 2}"
            )
        source = stream(seed, purpose)
        state = int(np.searchsorted(np.cumsum(shares), source.uniform(), side="right").clip(0, states - 1))
        dwell, rates = np.array(self.dwell_s), np.array(self.rates_rps)
        ends: list[Floats] = []
        held: list[Floats] = []
        at_s = 0.0
        while at_s < duration_s:
            hops = 1 + source.randint(0, states - 1, _CHUNK)
            visited = (state + np.concatenate(([0], np.cumsum(hops)))) % states
            until = at_s + np.cumsum(source.exponential(1.0, _CHUNK) * dwell[visited[:-1]])
            ends.append(until)
            held.append(rates[visited[:-1]])
            state, at_s = int(visited[-1]), float(until[-1])
        edges, kept = np.concatenate(ends), np.concatenate(held)
        last = int(np.searchsorted(edges, duration_s, side="left"))
        rates_rps = kept[: last + 1]
        return Intensity(np.concatenate(([0.0], edges[:last], [duration_s])), rates_rps, rates_rps)
