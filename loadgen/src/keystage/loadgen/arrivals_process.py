"""Arrival processes: what a piece of `--arrivals` sends, and sums of pieces.

Comes after `arrivals_spec` and before `plan`. Pure: files have been read (`arrivals_files`), times
come out.

A run sends the integral of its rate, rounded: no run is some percent off what was asked. N arrivals
of a renewal process (constant, Poisson, gamma) are its gaps, rescaled to the run, placed along the
rate (`arrivals_intensity`). One piece of one rate ends with an arrival at the run's end, as `--rate`
and `--cv` always did; in sums and under a changing rate the last gap is left open, so that a Poisson
process given its count is what comes out, exactly, and pieces do not end at one instant.
Replayed gaps at their own speed are taken as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from keystage.loadgen import arrivals
from keystage.loadgen.arrivals import CONSTANT_BELOW_CV, ArrivalError, Floats, check_positive, whole_count
from keystage.loadgen.arrivals_intensity import Intensity, Modulation, Profile, flat

Kind = Literal["constant", "poisson", "gamma", "mmpp", "replay"]

_FURTHER_STREAMS = 0x8000_0000
"""Streams of further pieces; those below are the arrivals', lengths' and prompts' (three and up)."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """One process of a sum.

    Attributes:
        text: as written.
        number: from 1.
        kind: what it is.
        cv: of its gaps; None for mmpp and replay.
        rate_rps: mean rate over the run, if it names one; rates in its states or profile are then
            relative.
        share: part it takes of a rate that is given to the whole, relative to other pieces'.
        modulation: states of an mmpp.
        profile: how its rate changes.
        path: file of a replay.
        gaps_s: what the file holds, shape (n,); None before it is read.
        looped: whether replayed gaps begin again when used up.
    """

    text: str
    number: int
    kind: Kind
    cv: float | None = None
    rate_rps: float | None = None
    share: float = 1.0
    modulation: Modulation | None = None
    profile: Profile | None = None
    path: Path | None = None
    gaps_s: Floats | None = None
    looped: bool = False

    @property
    def takes_rate(self) -> bool:
        """Whether it names no rate, so that one given to the whole is (partly) its."""
        return self.rate_rps is None and self.modulation is None and self.profile is None

    @property
    def peak_rps(self) -> float | None:
        """The highest rate it names in so many words."""
        if self.rate_rps is not None:
            return self.rate_rps
        if self.modulation is not None:
            return max(self.modulation.rates_rps)
        return None if self.profile is None else self.profile.peak_rps

    def refused(self, why: str) -> ArrivalError:
        """An error that names the piece."""
        return ArrivalError(f"piece {self.number} {self.text!r}: {why}")

    def own_rate_rps(self, duration_s: float) -> float | None:
        """Its mean rate, None if it names none; of states, that of an endless run.

        Raises:
            ArrivalError: its profile does not fit the run; names the piece.
        """
        if self.rate_rps is not None:
            return self.rate_rps
        if self.modulation is not None:
            return self.modulation.mean_rps
        if self.profile is not None:
            try:
                return self.profile.over(duration_s).mean_rps
            except ArrivalError as error:
                raise self.refused(str(error)) from error
        return None if self.gaps_s is None else len(self.gaps_s) / float(self.gaps_s.sum())

    def times(self, rate_rps: float | None, duration_s: float, seed: int, *, alone: bool) -> Floats:
        """Its arrivals, ascending, within the run.

        Args:
            rate_rps: mean rate it is to have; its own if None.
            duration_s: length of the run.
            seed: of the run; each piece has streams of its own.
            alone: whether it is the only one.

        Raises:
            ArrivalError: nothing comes out, or too much; not named after the piece.
        """
        rate_rps = self.rate_rps if rate_rps is None else rate_rps
        if self.gaps_s is not None and rate_rps is None and self.profile is None:
            at_s = self._counted(self.gaps_s, None, duration_s)
            return at_s[at_s <= duration_s]
        if alone and self.cv is not None and self.profile is None and rate_rps is not None:
            return arrivals.synthetic(rate_rps, self.cv, duration_s, seed)
        intensity = self._intensity(rate_rps, duration_s, seed)
        count = whole_count(intensity.total)
        if count < 1:
            return np.empty(0)
        if self.gaps_s is not None:
            counted = self._counted(self.gaps_s, count, duration_s)
            counted = counted / counted[-1] * len(counted)
            return intensity.place(counted * (intensity.total / count))
        return intensity.place(self._renewals(count, seed) * intensity.total)

    def _intensity(self, rate_rps: float | None, duration_s: float, seed: int) -> Intensity:
        if self.modulation is not None:
            shape = self.modulation.drawn(duration_s, seed, _FURTHER_STREAMS + 2 * self.number)
        elif self.profile is not None:
            shape = self.profile.over(duration_s)
        else:
            assert rate_rps is not None, "the sum gives a rate to pieces without one"
            return flat(rate_rps, duration_s)
        if rate_rps is None:
            return shape
        if shape.total <= 0:
            raise ArrivalError(
                f"its rate is 0 throughout the {duration_s:g} s at seed {seed}: it cannot have a mean of "
                f"{rate_rps:g}/s; take a longer run"
            )
        return shape.scaled(rate_rps / shape.mean_rps)

    def _renewals(self, count: int, seed: int) -> Floats:
        """Arrivals of a renewal process, as shares of the whole in (0, 1)."""
        cv = 1.0 if self.cv is None else self.cv
        if cv < CONSTANT_BELOW_CV:
            return np.arange(1, count + 1) / count
        purpose = arrivals.ARRIVAL_STREAM if self.number == 1 else _FURTHER_STREAMS + 2 * self.number + 1
        drawn = np.cumsum(arrivals.gaps(count + 1, cv, seed, purpose))
        if drawn[-1] <= 0:
            raise ArrivalError(
                f"all {count} gaps are 0 at cv {cv:g}, seed {seed}; take a longer run or a lower cv"
            )
        shares: Floats = drawn[:-1] / drawn[-1]
        return shares

    def _counted(self, gaps_s: Floats, count: int | None, duration_s: float) -> Floats:
        """Replayed arrivals at the file's own speed: `count` of them, or what a duration takes."""
        span_s = float(gaps_s.sum())
        rounds = 1
        if self.looped:
            wanted = len(gaps_s) * (duration_s / span_s) if count is None else count
            rounds = whole_count(wanted) // len(gaps_s) + 1
        taken = np.tile(gaps_s, rounds) if rounds > 1 else gaps_s
        counted: Floats = np.cumsum(taken[:count])
        if counted[-1] <= 0:
            raise ArrivalError(f"the first {len(counted)} gaps of the file are 0: no shape to keep")
        return counted


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Process:
    """A sum of pieces.

    Attributes:
        text: as written.
        pieces: one or more.
    """

    text: str
    pieces: tuple[Piece, ...]

    @property
    def takes_rate(self) -> bool:
        """Whether any piece names no rate of its own."""
        return any(piece.takes_rate for piece in self.pieces)

    @property
    def cv(self) -> float | None:
        """CV of the gaps where that is one number: for one piece of one rate."""
        alone = self.pieces[0] if len(self.pieces) == 1 else None
        return None if alone is None or alone.profile is not None else alone.cv

    @property
    def description(self) -> str:
        """In words, for the report."""
        if self.cv is not None:
            names = {0.0: "constant spacing", 1.0: "Poisson arrivals"}
            return names.get(self.cv, f"gamma arrivals of CV {self.cv:g}")
        return self.text

    def own_duration_s(self, rate_rps: float | None = None) -> float | None:
        """How long replayed files last, if all pieces are replays that do not begin again; else None."""
        lasting = []
        rates = self._rates(rate_rps, 1.0) if all(piece.kind == "replay" for piece in self.pieces) else []
        for piece, rate in zip(self.pieces, rates, strict=False):
            if piece.looped or piece.profile is not None or piece.gaps_s is None:
                return None
            lasting.append(float(np.cumsum(piece.gaps_s)[-1]) if rate is None else len(piece.gaps_s) / rate)
        return max(lasting, default=None)

    def early_ends(self, rate_rps: float | None, duration_s: float) -> tuple[str, ...]:
        """Replayed files that are used up before the run ends, in words for a note."""
        told = []
        for piece, given in zip(self.pieces, self._rates(rate_rps, duration_s), strict=True):
            if piece.gaps_s is None or piece.looped:
                continue
            rate = piece.own_rate_rps(duration_s) if given is None else given
            wanted = (rate or 0.0) * duration_s
            if len(piece.gaps_s) + 0.5 < wanted:
                told.append(
                    f"piece {piece.number} {piece.text!r}: the file's {len(piece.gaps_s)} arrivals are used "
                    f"up before the run's end, its rate would have sent {wanted:.0f}; add ,loop to go on"
                )
        return tuple(told)

    def asked_rate_rps(self, rate_rps: float | None, duration_s: float) -> float:
        """Mean rate that `times` is asked for.

        Raises:
            ArrivalError: a piece has no rate.
        """
        rates = self._rates(rate_rps, duration_s)
        own = [piece.own_rate_rps(duration_s) for piece in self.pieces]
        return sum(mine or 0.0 if rate is None else rate for rate, mine in zip(rates, own, strict=True))

    def times(self, rate_rps: float | None, duration_s: float, seed: int) -> Floats:
        """Arrival times in seconds, ascending, within [0, duration_s].

        Args:
            rate_rps: goes to the pieces that name none, by their shares; where every piece names one,
                the whole is rescaled to this mean, its shape kept. None leaves all at their own.
            duration_s: length of the run.
            seed: decides everything drawn.

        Returns:
            Shape (n,), n at least 1 and at most MAX_ARRIVALS.

        Raises:
            ArrivalError: nothing comes out, or too much; names the piece.
        """
        check_positive("duration", duration_s)
        rates = self._rates(rate_rps, duration_s)
        alone = len(self.pieces) == 1
        if not alone:
            self._checked(self._expected(rates, duration_s))
        found = []
        for piece, rate in zip(self.pieces, rates, strict=True):
            try:
                found.append(piece.times(rate, duration_s, seed, alone=alone))
            except ArrivalError as error:
                raise piece.refused(str(error)) from error
        if self._checked(sum(len(part) for part in found)) < 1:
            raise ArrivalError(f"{self.text!r} gives no arrival in {duration_s:g} s; raise rate or duration")
        return found[0] if alone else np.sort(np.concatenate(found), kind="stable")

    def _expected(self, rates: Sequence[float | None], duration_s: float) -> float:
        """Arrivals of the pieces that draw them, before they do."""
        drawing = ((p, rate) for p, rate in zip(self.pieces, rates, strict=True) if p.kind != "replay")
        mean_rps = sum((p.own_rate_rps(duration_s) or 0.0) if rate is None else rate for p, rate in drawing)
        return mean_rps * duration_s

    def _checked(self, expected: float) -> int:
        try:
            return whole_count(expected)
        except ArrivalError as error:
            raise ArrivalError(f"{self.text!r} {error}") from error

    def _rates(self, rate_rps: float | None, duration_s: float) -> list[float | None]:
        """Rate of each piece, None for its own."""
        if rate_rps is None:
            for piece in self.pieces:
                if piece.takes_rate and piece.kind != "replay":
                    raise piece.refused("names no rate: give rate= in the piece, or --rate")
            return [None for _ in self.pieces]
        check_positive("rate", rate_rps)
        if self.takes_rate:
            total = sum(piece.share for piece in self.pieces if piece.takes_rate)
            return [rate_rps * piece.share / total if piece.takes_rate else None for piece in self.pieces]
        own = [piece.own_rate_rps(duration_s) or 0.0 for piece in self.pieces]
        factor = rate_rps / sum(own)
        return [rate * factor for rate in own]


def gamma(cv: float) -> Process:
    """The process of `--cv`: gamma gaps of this CV at whatever rate is given."""
    return Process(f"gamma:cv={cv:g}", (Piece(f"gamma:cv={cv:g}", 1, "gamma", cv),))
