"""Examples to learn the propagation of variation from: random chains, run in the simulator.

Before it: `keystage train-cv` names seeds and rates. After it: `fit` learns from them, `report` compares
on others. An example is a chain of stages with fixed replicas, the CV of its arrivals, and the CV that
was counted at every stage. Nobody steers: propagation is a property of the world, not of a policy.

Rates are told apart by the utilisation of the busiest stage: training draws it outside the bands
`HELD_OUT`, tests draw it inside, so a test shares neither seeds nor rates with the training.
A run has at least 2,000 CV^2 arrivals, since fewer read a CV wrongly (of 100 gaps at CV 4: 3.7).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from keystage.controller.maths import qna
from keystage.controller.maths.qna import Chains, Floats, Station
from keystage.simulator.api import ArrivalSpec, PipelineSpec, StageSpec, World
from keystage.simulator.run import simulate

STAGES = 8
"""Stages of a drawn chain, as the pipelines of QUART section 8 have."""
HELD_OUT = ((0.50, 0.58), (0.70, 0.77), (0.86, 0.90))
"""Bands of peak utilisation that training never sees."""
RANGE = (0.35, 0.95)
TEST_CVS = (0.1, 1.0, 2.0, 4.0, 8.0)
"""Entry CVs of the comparison: those of QUART section 8.2."""
ARRIVALS_PER_SCV = 2000
LEAST_ARRIVALS = 8000
_MOST_SERVERS, _MOST_BATCH = 24, 16


@dataclasses.dataclass(frozen=True, slots=True)
class Example:
    """One chain and what was counted.

    Attributes:
        stations: its stages.
        cv: CV of the arrivals at every stage; the first is the entry's.
        entry_cv: CV the arrivals were drawn with; NaN for recorded runs.
    """

    stations: tuple[Station, ...]
    cv: tuple[float, ...]
    entry_cv: float = math.nan


def draw_chain(random: np.random.Generator, *, held_out: bool, stages: int = STAGES) -> tuple[Station, ...]:
    """A random chain: up to 24 replicas a stage, batches up to 16, services constant or random.

    Half of the stages do not batch and half have constant services, as GPU stages do. A third of the
    chains has stages of one kind, of about one utilisation: what splitting a model evenly gives.
    """
    peak = _peak(random, held_out)
    is_even = random.random() < 1 / 3
    relative = random.uniform(0.9 if is_even else 0.15, 1.0, stages)
    kinds = [_kind(random) for _ in range(1 if is_even else stages)] * (stages if is_even else 1)
    return tuple(
        dataclasses.replace(kind, utilisation=float(rho))
        for kind, rho in zip(kinds, peak * relative / relative.max(), strict=True)
    )


def _kind(random: np.random.Generator) -> Station:
    batches = random.random() < 0.5
    return Station(
        utilisation=0.0,
        servers=round(math.exp(random.uniform(0, math.log(_MOST_SERVERS)))),
        service_scv=0.0 if random.random() < 0.5 else float(random.uniform(0.02, 1.0)),
        most=round(math.exp(random.uniform(math.log(2), math.log(_MOST_BATCH)))) if batches else 1,
        fixed_ratio=float(random.uniform(0, 1)) if batches else 0.0,
    )


def _peak(random: np.random.Generator, held_out: bool) -> float:
    while True:
        peak = float(random.uniform(*RANGE))
        if any(low <= peak < high for low, high in HELD_OUT) == held_out:
            return peak


def world(stations: Sequence[Station], entry_cv: float, arrivals: int) -> World:
    """The chain at one arrival a second: rates do not matter, only utilisations do."""
    specs = []
    for s in stations:
        full_s = s.utilisation * s.servers * s.most  # l(b) = rho c b / lambda
        alone_s = full_s / ((1 - s.fixed_ratio) * s.most + s.fixed_ratio)
        specs.append(
            StageSpec(
                alpha_s=(1 - s.fixed_ratio) * alone_s,
                beta_s=s.fixed_ratio * alone_s,
                most=round(s.most),
                scv=s.service_scv,
                replicas=round(s.servers),
            )
        )
    pipeline = PipelineSpec(
        name="chain",
        stages=tuple(specs),
        arrivals=ArrivalSpec(rate_rps=1.0, cv=entry_cv, count=arrivals),
    )
    return World(pipelines=(pipeline,))


def run(stations: Sequence[Station], entry_cv: float, seed: int, scale: float = 1.0) -> Example:
    """Counts the CV at every stage of one chain.

    Args:
        stations: the chain.
        entry_cv: CV of its arrivals.
        seed: of arrivals and services.
        scale: factor on the number of arrivals; below 1 only for a look.
    """
    arrivals = math.ceil(scale * max(LEAST_ARRIVALS, ARRIVALS_PER_SCV * entry_cv**2))
    outcome = simulate(world(stations, entry_cv, arrivals), None, seed)
    cv = tuple(stage.gap_cv for stage in outcome.pipelines[0].stages)
    return Example(tuple(stations), cv, entry_cv)


def training_example(seed: int, scale: float = 1.0) -> Example:
    """The training example of one seed: entry CV log-uniform in 0.08..9."""
    random = np.random.default_rng([seed, 0])
    chain = draw_chain(random, held_out=False)
    return run(chain, math.exp(random.uniform(math.log(0.08), math.log(9.0))), seed, scale)


def held_out_example(seed: int, entry_cv: float, scale: float = 1.0) -> Example:
    """The held-out example of one seed: a rate training never saw, and a stream of its own."""
    random = np.random.default_rng([seed, 1])
    return run(draw_chain(random, held_out=True), entry_cv, seed + (1 << 31), scale)


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    """Examples of one length as arrays: entry scv [n], chains [n, k], counted CV [n, k], drawn CV [n]."""

    entry_scv: Floats
    chains: Chains
    cv: Floats
    entry_cv: Floats


def table(examples: Sequence[Example]) -> Table:
    """Stacks examples.

    Raises:
        ValueError: there are none, or their chains differ in length.
    """
    lengths = sorted({len(e.stations) for e in examples})
    if len(lengths) != 1:
        raise ValueError(f"examples must be of one chain length, got lengths {lengths}")
    cv = np.array([e.cv for e in examples], dtype=np.float64)
    return Table(
        entry_scv=cv[:, 0] ** 2,
        chains=qna.chains([e.stations for e in examples]),
        cv=cv,
        entry_cv=np.array([e.entry_cv for e in examples], dtype=np.float64),
    )
