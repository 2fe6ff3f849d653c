"""What the router knows of service times and delays, from profiles and from the batches it sees end. Pure.

Before it: `binding` reports every batch. After it: the scheduler gets one `LatencyProfile` for each stage
and one pair of `Delays`. A worker that hosts several stages one after another runs them as one, so times
are kept by *span* (first stage, last stage) and worker.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from keystage.batching.api import Delays
from keystage.batching.fit import HighPercentile, ProfileFit
from keystage.batching.profile import ANY_BATCH, LatencyProfile, ProfileError
from keystage.bundle.api import StageProfile

UNKNOWN = LatencyProfile(1e-6, 0.0)
"""Stands for a stage of which nothing is known: so short that nothing is given up because of it."""
FIRST_BATCHES = 2
"""Of a worker, which wake what sleeps from then on no more: their delays do not count."""
CHANGE_RATIO = 0.02
"""A profile that moved by less is not told to the scheduler: it would compute every candidate anew."""
MOST_DELAY_S = 0.25
"""A longer way to a worker and back is a hang, not a delay to plan with."""


class ServiceTimes:
    """Profiles of the stages of one pipeline.

    Args:
        profiles: of each stage as the bundle has it, None where it has none.
    """

    def __init__(self, profiles: Sequence[StageProfile | None]) -> None:
        self._bundled = [bundled(profile) for profile in profiles]
        # (worker, first, last) -> fit; of all workers together under no worker's name.
        self._fits: dict[tuple[str, int, int], ProfileFit] = {}
        self._way = ProfileFit(LatencyProfile(0.0, 1e-3))
        self._slip = HighPercentile()

    def measured(
        self,
        worker: str,
        span: tuple[int, int],
        batch: int,
        compute_s: float,
        elsewhere_s: float,
        now_s: float = 0.0,
    ) -> bool:
        """A batch has ended; returns whether profiles or delays may be others now.

        Args:
            worker: who ran it.
            span: first and last stage.
            batch: its size.
            compute_s: seconds that the worker computed.
            elsewhere_s: seconds from the router's word to its hearing of the end, less those that the batch
                waited at the worker for another one, less compute.
            now_s: the time.
        """
        first, last = span
        fit = self._fits.get((worker, first, last))
        if fit is None:
            fit = self._fits[worker, first, last] = ProfileFit(self._prior(first, last))
        if 0 <= elsewhere_s <= MOST_DELAY_S and fit.count >= FIRST_BATCHES:
            self._way.add(batch, elsewhere_s, now_s)
            self._slip.add(elsewhere_s - self._data_s() * batch, now_s)
        together = self._fits.setdefault(("", first, last), ProfileFit(self._prior(first, last)))
        is_new = together.add(batch, compute_s, now_s)
        return fit.add(batch, compute_s, now_s) or is_new

    def forget(self, worker: str) -> None:
        """The worker is gone."""
        for key in [key for key in self._fits if key[0] == worker]:
            del self._fits[key]

    def delays(self) -> Delays:
        """The delays to plan with: a line over the batch size, as high as all but one in a hundred."""
        return Delays(self._slip.value_s, self._data_s() if len(self._slip) else 0.0)

    def _data_s(self) -> float:
        line = self._way.profile()
        return line.alpha_s if line is not None else 0.0

    def span(self, first: int, last: int, workers: Collection[str], most: int) -> LatencyProfile | None:
        """Service time of a run of stages, of the slowest of these workers; None if unknown.

        A worker of which little is known yet counts as all together.

        Args:
            first: first stage.
            last: last stage.
            workers: who may run it.
            most: largest batch.
        """
        fits = [self._fits.get((worker, first, last)) for worker in workers]
        lines = [fit for fit in fits if fit is not None and fit.is_line]
        together = self._fits.get(("", first, last))
        if together is not None and len(lines) < len(fits):
            lines.append(together)
        known = [profile for profile in (fit.profile(most) for fit in lines) if profile is not None]
        if known:
            return max(known, key=lambda profile: profile.latency_s(min(most, 8)))
        prior = self._prior(first, last)
        return None if prior is None else LatencyProfile(prior.alpha_s, prior.beta_s, most)

    def of_stages(self) -> list[float]:
        """Seconds of one item at each stage, 0 where unknown: what a deadline is divided by."""
        times = [profile.latency_s(1) if profile is not None else 0.0 for profile in self._bundled]
        measured: dict[int, list[float]] = {}
        for (worker, first, last), fit in self._fits.items():
            profile = fit.profile()
            if profile is None or not worker:
                continue
            among_s = sum(times[first : last + 1])
            for stage in range(first, last + 1):
                # A run's time is shared out as the bundle's profile has it, evenly without one.
                part = times[stage] / among_s if among_s else 1 / (last - first + 1)
                measured.setdefault(stage, []).append(profile.latency_s(1) * part)
        return [max(measured[stage]) if stage in measured else time for stage, time in enumerate(times)]

    def least_s(self) -> list[float]:
        """Seconds from each stage to the answer when all goes well: nobody waits, and the way is as usual."""
        rests: list[float] = []
        rest_s = self._slip.median_s
        for time_s in reversed(self.of_stages()):
            rest_s += time_s
            rests.append(rest_s)
        return rests[::-1]

    def _prior(self, first: int, last: int) -> LatencyProfile | None:
        """The bundle's profiles of these stages together."""
        profiles = [profile for profile in self._bundled[first : last + 1] if profile is not None]
        if len(profiles) < last - first + 1:
            return None
        return LatencyProfile(
            sum(profile.alpha_s for profile in profiles),
            sum(profile.beta_s for profile in profiles),
            ANY_BATCH,
        )


def bundled(profile: StageProfile | None) -> LatencyProfile | None:
    """A stage's profile of the bundle; a damaged one is none."""
    if profile is None:
        return None
    try:
        return LatencyProfile(profile.alpha_s, profile.beta_s)
    except ProfileError:
        return None


def differs(one: LatencyProfile, other: LatencyProfile) -> bool:
    """Whether a profile has moved so much that it is told."""
    if one.most != other.most:
        return True
    return any(
        abs(one.latency_s(b) - other.latency_s(b)) > CHANGE_RATIO * other.latency_s(b)
        for b in (1, min(one.most, 16))
    )
