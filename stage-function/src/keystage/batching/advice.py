"""How many replicas more or fewer: Symphony's autoscaling advice (section 3.5). Pure.

Deferred batching has a flat top: above the peak p an offered load o goes bad by (o - p) / o, below it
replicas are idle by (p - o) / p. So, of N replicas,

    more    N r / (1 - r)   at a bad rate r above a threshold: N (o - p) / p of them are missing
    fewer   N f             at an idle fraction f

Before it: counts of what was due, late or dropped, and of replica seconds, idle or not. After it: an
autoscaler; in Keystage the controller's corrector, for which it is one input among others.

Hysteresis, which the paper leaves open: a bad rate is judged over at least `add_s` and `least_due` requests,
so that one late batch is no advice; an idle fraction over `release_s`, several times longer, since a replica
that is missing costs requests and one too many costs only itself. Fewer are advised only while the bad rate
is below half the threshold, and `spare_ratio` of the idle time is kept. A changed number of replicas begins
both windows anew: what fewer or more of them did says nothing of these.
"""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True, slots=True)
class AdviceSettings:
    """Thresholds and intervals.

    Attributes:
        bad_ratio: a higher bad rate asks for more: p99 within the objective.
        add_s: seconds a bad rate is judged over at least.
        release_s: seconds an idle fraction is judged over at least.
        least_due: requests a bad rate is judged over at least; at 1 % that is two bad ones by chance.
        spare_ratio: idle fraction that is kept: Poisson load on a full cluster is not without bad requests.
        most_bad_ratio: a higher bad rate is taken as this one: at 1 the formula has no value.
    """

    bad_ratio: float = 0.01
    add_s: float = 5.0
    release_s: float = 30.0
    least_due: float = 200.0
    spare_ratio: float = 0.05
    most_bad_ratio: float = 0.8


@dataclasses.dataclass(frozen=True, slots=True)
class Growth:
    """What was counted since the last look.

    Attributes:
        seconds: since then.
        due: requests with an objective that ended, in time or not.
        bad: those of them that were late or dropped.
        served_s: seconds of all replicas.
        idle_s: those of them in which a replica had nothing to do.
    """

    seconds: float = 0.0
    due: float = 0.0
    bad: float = 0.0
    served_s: float = 0.0
    idle_s: float = 0.0

    def plus(self, other: Growth) -> Growth:
        """Both together."""
        return Growth(
            self.seconds + other.seconds,
            self.due + other.due,
            self.bad + other.bad,
            self.served_s + other.served_s,
            self.idle_s + other.idle_s,
        )

    @property
    def bad_ratio(self) -> float | None:
        """r, None when nothing was due."""
        return self.bad / self.due if self.due > 0 else None

    @property
    def idle_ratio(self) -> float | None:
        """f, None when nobody told."""
        return self.idle_s / self.served_s if self.served_s > 0 else None


@dataclasses.dataclass(frozen=True, slots=True)
class AdviceState:
    """Memory: the replicas both windows are of, and what was counted in each."""

    replicas: int = 0
    adding: Growth = Growth()
    releasing: Growth = Growth()


@dataclasses.dataclass(frozen=True, slots=True)
class Advice:
    """The advice of one look.

    Attributes:
        change: replicas more, or (negative) fewer; 0: none, or a window is not full yet.
        reason: the rate or fraction it rests on, in words; empty at 0.
    """

    change: int = 0
    reason: str = ""


def missing(replicas: int, bad_ratio: float) -> float:
    """N r / (1 - r): replicas that are missing at a bad rate below 1."""
    return replicas * bad_ratio / (1 - bad_ratio)


def surplus(replicas: int, idle_ratio: float) -> float:
    """N f: replicas that are not needed at an idle fraction."""
    return replicas * idle_ratio


def advise(
    settings: AdviceSettings, state: AdviceState, replicas: int, growth: Growth
) -> tuple[Advice, AdviceState]:
    """Takes one look in and says what it advises.

    Args:
        settings: thresholds and intervals.
        state: memory from the last look.
        replicas: N, those that served since then.
        growth: what was counted since then.
    """
    if replicas != state.replicas:
        return Advice(), AdviceState(replicas)
    if replicas < 1:
        return Advice(), state
    adding, releasing = state.adding.plus(growth), state.releasing.plus(growth)
    if adding.seconds >= settings.add_s and adding.due >= settings.least_due:
        bad = adding.bad_ratio or 0.0
        if bad > settings.bad_ratio:
            more = math.ceil(missing(replicas, min(bad, settings.most_bad_ratio)) - 1e-9)
            reason = f"{bad:.1%} of {adding.due:.0f} bad in {adding.seconds:.3g} s"
            return Advice(more, reason), AdviceState(replicas)
        adding = Growth()
    if releasing.seconds < settings.release_s:
        return Advice(), AdviceState(replicas, adding, releasing)
    idle = releasing.idle_ratio
    is_calm = (releasing.bad_ratio or 0.0) <= settings.bad_ratio / 2
    fewer = 0
    if idle is not None and is_calm:
        fewer = min(replicas - 1, math.floor(surplus(replicas, idle - settings.spare_ratio) + 1e-9))
    after = AdviceState(replicas, adding, Growth())
    if fewer < 1:
        return Advice(), after
    return Advice(-fewer, f"{idle:.0%} idle in {releasing.seconds:.3g} s"), after
