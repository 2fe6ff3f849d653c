"""The schedulers that `keystage bench batching` compares, by name, made for the models of a run. Pure.

Before: a name out of `SYSTEMS`. After: `batching_cluster`. `TUNED` names the one knob that a system has and
the values that are tried for it: the best one found on arrivals of their own is the one that is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from keystage.batching.api import Scheduler
from keystage.batching.policies import BatchPolicy, Deferred, Eager, PlainDeferred, Timeout
from keystage.batching.rivals.clockwork import ClockworkScheduler
from keystage.batching.rivals.nexus import NexusScheduler
from keystage.batching.rivals.nexus_plan import Session
from keystage.batching.rivals.shepherd import ShepherdScheduler
from keystage.batching.scheduler import CentralScheduler
from keystage.bench.batching_models import Model

SYSTEMS = ("deferred", "algorithm-1", "eager", "timeout", "clockwork", "nexus", "shepherd")
"""Ours first; `algorithm-1` (Symphony's as printed), `eager` and `timeout` are its other policies."""

TUNED: dict[str, tuple[float, ...]] = {
    "timeout": (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5),
    "nexus": (0.5, 0.6),
}
"""`timeout`: k as a share of the SLO; 0 is `eager`. `nexus`: the share of the SLO that a batch may take."""

DEFAULT = {"timeout": 0.2, "nexus": 0.5}


def make(
    system: str, models: Sequence[Model], shares: Sequence[float], rate_rps: float, knob: float | None = None
) -> Scheduler:
    """A scheduler without replicas.

    Args:
        system: one of `SYSTEMS`.
        models: to be served.
        shares: of the requests, one a model.
        rate_rps: all models together, for those that plan for one.
        knob: see `TUNED`, None: its default.

    Raises:
        KeyError: there is no such system.
    """
    return _MAKERS[system](models, shares, rate_rps, DEFAULT.get(system, 0.0) if knob is None else knob)


def _central(policy: BatchPolicy) -> Callable[[Sequence[Model], Sequence[float], float, float], Scheduler]:
    def make_one(models: Sequence[Model], shares: Sequence[float], rate_rps: float, knob: float) -> Scheduler:
        return CentralScheduler([(model.profile, policy) for model in models])

    return make_one


def _timeout(models: Sequence[Model], shares: Sequence[float], rate_rps: float, knob: float) -> Scheduler:
    return CentralScheduler([(model.profile, Timeout(knob * model.slo_s)) for model in models])


def _clockwork(models: Sequence[Model], shares: Sequence[float], rate_rps: float, knob: float) -> Scheduler:
    return ClockworkScheduler([model.profile for model in models])


def _shepherd(models: Sequence[Model], shares: Sequence[float], rate_rps: float, knob: float) -> Scheduler:
    return ShepherdScheduler([model.profile for model in models])


def _nexus(models: Sequence[Model], shares: Sequence[float], rate_rps: float, knob: float) -> Scheduler:
    sessions = [Session(model.profile, model.slo_s) for model in models]
    return NexusScheduler(sessions, [rate_rps * share for share in shares], slo_share=knob)


_MAKERS: dict[str, Callable[[Sequence[Model], Sequence[float], float, float], Scheduler]] = {
    "deferred": _central(Deferred()),
    "algorithm-1": _central(PlainDeferred()),
    "eager": _central(Eager()),
    "timeout": _timeout,
    "clockwork": _clockwork,
    "nexus": _nexus,
    "shepherd": _shepherd,
}
