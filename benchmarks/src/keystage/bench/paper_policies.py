"""Who steers in the paper experiment: Keystage, its ablations, the rivals, and the static reference.

Before it: settings. After it: `paper_run` makes one steering for each run. Every policy has one knob,
`effort`, by which Table B brings GPU-seconds to the common figure. It must not give a policy knowledge
of the future; `static` alone is told mean rate and CV, which is what a reference may be.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec

from keystage.baselines.cocktail import Cocktail, CocktailSettings
from keystage.baselines.inferline import InferLine, InferLineSettings
from keystage.baselines.infless import Infless, InflessSettings
from keystage.baselines.static import Static, StaticSettings
from keystage.bench.paper_world import Cache, Table, Terms
from keystage.controller.domain.steering import Steering
from keystage.controller.policy.settings import PolicySettings
from keystage.controller.policy.steering import Keystage

OURS = "keystage"
RIVALS = ("infless", "inferline", "cocktail")
STATIC = "static"

Changes = Mapping[str, object]
_Settings = TypeVar("_Settings", bound=msgspec.Struct)


@dataclasses.dataclass(frozen=True, slots=True)
class Traffic:
    """What `static` is told of a cell.

    Attributes:
        pipeline: name.
        rate_rps: mean rate.
        cv: CV of the gaps.
    """

    pipeline: str
    rate_rps: float
    cv: float


@dataclasses.dataclass(frozen=True, slots=True)
class Policy:
    """One steering of the experiment.

    Attributes:
        name: as in the tables.
        make: a new steering for one run, from effort and traffic.
        is_whole: it sees whole models.
        cache: what Table A lets it keep in host memory.
    """

    name: str
    make: Callable[[float, Traffic], Steering]
    is_whole: bool = False
    cache: Cache = "none"

    def terms(self, table: Table) -> Terms:
        """What a table gives it."""
        return Terms(table, is_whole=self.is_whole, cache=self.cache)


def changed(settings: _Settings, changes: Changes) -> _Settings:
    """Settings with some fields replaced; `a.b` names field b of the struct in field a.

    Raises:
        AttributeError: there is no such field.
    """
    for path, value in changes.items():
        field, _, rest = path.partition(".")
        old = getattr(settings, field)
        new = changed(old, {rest: value}) if rest else value
        settings = msgspec.structs.replace(settings, **{field: new})
    return settings


def keystage(changes: Changes | None = None, name: str = OURS, *, cache: Cache = "ahead") -> Policy:
    """Keystage with some settings changed."""
    settings = changed(PolicySettings(), changes or {})

    def make(effort: float, traffic: Traffic) -> Steering:
        return Keystage(msgspec.structs.replace(settings, effort=settings.effort * effort))

    return Policy(name, make, cache=cache)


def rival(name: str, changes: Changes | None = None) -> Policy:
    """A rival by name.

    Raises:
        KeyError: no such rival.
    """
    given = changes or {}

    def infless(effort: float, traffic: Traffic) -> Steering:
        return Infless(changed(InflessSettings(effort=effort), given))

    def inferline(effort: float, traffic: Traffic) -> Steering:
        return InferLine(changed(InferLineSettings(effort=effort), given))

    def cocktail(effort: float, traffic: Traffic) -> Steering:
        return Cocktail(changed(CocktailSettings(effort=effort), given))

    def static(effort: float, traffic: Traffic) -> Steering:
        known = StaticSettings(
            rates_rps={traffic.pipeline: traffic.rate_rps}, arrival_scv=traffic.cv**2, effort=1.4 * effort
        )
        return Static(changed(known, given))

    make = {"infless": infless, "inferline": inferline, "cocktail": cocktail, STATIC: static}[name]
    return Policy(name, make, is_whole=name == "infless")


ABLATIONS: Mapping[str, Changes] = {
    "without feedback": {"feedback": False},
    "without smoothing": {"smoothing": "off"},
    "without compensation": {"compensation": False},
    "without spread": {"spread": False},
    "without prewarming": {},
    "without cache": {},
}
"""Each takes one part away; `without prewarming` caches as QUART does (the first stages of the published
ranking and those the corrector scaled, where they ran); `without cache` loads from disk as everybody else."""

CACHES: Mapping[str, Cache] = {"without prewarming": "reactive", "without cache": "none"}


def policy(name: str, changes: Changes | None = None) -> Policy:
    """Any policy of the experiment by name.

    Args:
        name: Keystage, an ablation of it, a rival or `static`.
        changes: settings changed, beside what an ablation changes.

    Raises:
        KeyError: no such policy.
    """
    if name in ABLATIONS:
        return keystage({**(changes or {}), **ABLATIONS[name]}, name, cache=CACHES.get(name, "ahead"))
    return keystage(changes) if name == OURS else rival(name, changes)
