"""Worlds of `keystage bench mixed`: pipelines that share one pool of GPUs under the Azure Functions trace.

Before it: `whole_trace` deals functions to pipelines. After it: `mixed` runs them. Simulated: the five models
of QUART's Table 1 in four stages each, 8 hours of the trace at 100 times its speed, a pool that the mean load
fills to `POOL_LOAD`. Live: three of them whose whole model fits one GPU, ten minutes at 10 times its speed,
requests through the gateway. Simulated runs start with what the mean load needs at a utilisation of
`BEGIN_LOAD`, for a trace does not begin from nothing (INFless with whole instances by the same rule); live
ones with one replica of each stage, or the whole instances that fill these GPUs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

from keystage.baselines.static import allocate
from keystage.bench.paper_arrivals import achieved_cv
from keystage.bench.paper_cells import CV_SLO
from keystage.bench.paper_models import MODELS
from keystage.bench.paper_policies import OURS, RIVALS, STATIC, Traffic
from keystage.bench.paper_world import GPU_BYTES, GPUS, HOP_S, MEMORY_BPS, NETWORK_BPS, NETWORK_S
from keystage.bench.steered import Order, steering
from keystage.bench.tuning_chosen import chosen
from keystage.bench.whole_client import Floats
from keystage.bench.whole_models import STAGES, Part, parts
from keystage.bench.whole_score import Score, simulated_score
from keystage.bench.whole_trace import CountTrace, Sample
from keystage.bench.whole_world import Plan, Served
from keystage.controller.domain.snapshot import Slo
from keystage.simulator import api
from keystage.simulator.run import simulate
from keystage.simulator.watch import Watched

OFF = "off"
POLICIES = (OURS, OFF, *RIVALS, STATIC)
POOL_LOAD = 0.5
"""Mean offered load (without batches) over the GPUs of the simulated pool."""
BEGIN_LOAD = 0.7
LIVE_POOL = 36
"""GPUs of the live pool: the most stage processes at once."""
LIVE_MODELS = (0, 1, 2)
"""Each fits one GPU as a whole, so that a replica is a GPU for everybody."""
SIMULATED_MODELS = (0, 1, 2, 3, 4)
WARM_MINUTES = 30.0
"""Of the trace, not counted in simulated runs; of a short run a quarter."""
PATIENCE_S = 600.0
EQUAL_RATIO = 0.02
EFFORTS = (0.5, 4.0)
SEARCH_STEPS = 8
"""Halvings of the efforts: the last two differ by 1 %."""


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """One load on one pool.

    Attributes:
        sample: of the trace.
        models: rows of Table 1.
        from_minute: window.
        minutes: its length.
        speed: how many times as fast it is played.
        seed: of times within minutes.
    """

    sample: Sample
    models: tuple[int, ...]
    from_minute: int
    minutes: int
    speed: float
    seed: int

    @property
    def duration_s(self) -> float:
        """Length of the schedule."""
        return self.minutes * 60.0 / self.speed

    @property
    def warm_minutes(self) -> float:
        """Minutes of the trace that do not count in a simulated run."""
        return min(WARM_MINUTES, self.minutes / 4)


class Load:
    """A cell with its arrivals.

    Args:
        cell: the cell.
        trace: its trace.
    """

    def __init__(self, cell: Cell, trace: CountTrace) -> None:
        self.cell = cell
        self.source = trace.source
        self.times_s: list[Floats] = trace.times_s(
            len(cell.models), cell.from_minute, cell.minutes, cell.speed, cell.seed
        )

    @property
    def rates_rps(self) -> list[float]:
        """Mean rate of each pipeline."""
        return [len(times_s) / self.cell.duration_s for times_s in self.times_s]

    @property
    def erlangs(self) -> float:
        """Offered load of all pipelines without batches."""
        pairs = zip(self.cell.models, self.rates_rps, strict=True)
        return sum(MODELS[m].exec_s * rate for m, rate in pairs)

    def served(
        self, policy: str, allocation: Sequence[Sequence[int]] = (), *, is_live: bool = False
    ) -> tuple[Served, ...]:
        """The pipelines as a policy gets them.

        Args:
            policy: INFless gets whole models, the others stages.
            allocation: replicas by pipeline and stage, where they are not those of the begin.
            is_live: begin with one replica of each stage, or as many whole instances as fill these GPUs: in
                the slow warm-up of a live run everybody would give more back.
        """
        found = []
        for place, (index, times_s) in enumerate(zip(self.cell.models, self.times_s, strict=True)):
            model = MODELS[index]
            functions = parts(model, whole=policy == "infless")
            rate_rps = self.rates_rps[place]
            fewest = (STAGES // functions[0].gpus,) if len(functions) == 1 else (1,) * STAGES
            first = fewest if is_live else begin(functions, rate_rps)
            replicas = tuple(allocation[place]) if allocation else first
            name = model.name.split("-")[0].lower()
            found.append(Served(name, functions, times_s, CV_SLO * model.exec_s, replicas))
        return tuple(found)

    def order(self, policy: str, effort: float = 1.0) -> Order | None:
        """Who steers, with an effort over the tuned one; nobody for `off`."""
        if policy == OFF:
            return None
        tuned, values = chosen(policy)
        traffic = []
        if policy == STATIC:
            traffic = [
                Traffic(one.name, rate_rps, achieved_cv(one.times_s))
                for one, rate_rps in zip(self.served(policy), self.rates_rps, strict=True)
            ]
        return Order(policy=policy, effort=tuned * effort, changes=dict(values), traffic=traffic)

    def off(self, gpus: float) -> list[list[int]]:
        """Static replicas by pipeline and stage: equal replica-seconds, rounded up to whole replicas.

        Of each pipeline the best by the G/G/c model (`baselines.static`), all with one number of replicas per
        erlang, the largest that stays within the total; never less than what is stable.

        Args:
            gpus: time-averaged GPUs of Keystage's run.
        """
        total = math.ceil(gpus - 1e-9)
        pipelines = [
            ([part.item_s for part in one.parts], rate_rps, achieved_cv(one.times_s) ** 2)
            for one, rate_rps in zip(self.served(OURS), self.rates_rps, strict=True)
        ]

        @functools.cache
        def allocated(step: int) -> list[list[int]]:
            found = []
            for services_s, rate_rps, scv in pipelines:
                stable = sum(math.floor(rate_rps * s) + 1 for s in services_s)
                asked = math.ceil(0.01 * step * rate_rps * sum(services_s))
                found.append(allocate(rate_rps, services_s, scv, 0.0, max(stable, asked)))
            return found

        low, high = 0, 10_000
        while high - low > 1:
            middle = (low + high) // 2
            if sum(map(sum, allocated(middle))) <= total:
                low = middle
            else:
                high = middle
        return allocated(low)


def begin(functions: Sequence[Part], rate_rps: float) -> tuple[int, ...]:
    """Replicas at the start of a run."""
    return tuple(max(1, math.ceil(rate_rps * part.item_s / BEGIN_LOAD)) for part in functions)


def servers(load: Load) -> int:
    """Servers of the simulated pool."""
    return math.ceil(load.erlangs / POOL_LOAD / GPUS)


def simulated_world(load: Load, policy: str, allocation: Sequence[Sequence[int]] = ()) -> api.World:
    """The pool and its pipelines in the simulator; every parameter lies in every host memory (Table B)."""
    number = servers(load)
    pipelines = []
    for index, one in zip(load.cell.models, load.served(policy, allocation), strict=True):
        model = MODELS[index]
        stages = tuple(
            api.StageSpec(
                alpha_s=part.alpha_s,
                beta_s=part.beta_s,
                most=part.most,
                parameter_bytes=model.size_bytes // len(one.parts),
                gpus=part.gpus,
                activation_bytes=model.activation_bytes,
                max_replicas=min(1000, number * GPUS),
                replicas=replicas,
            )
            for part, replicas in zip(one.parts, one.replicas, strict=True)
        )
        pipelines.append(
            api.PipelineSpec(
                name=one.name,
                stages=stages,
                arrivals=api.ArrivalSpec(times_s=tuple(one.times_s.tolist())),
                slo=Slo(deadline_s=one.deadline_s),
                tokens=model.tokens,
            )
        )
    return api.World(
        pipelines=tuple(pipelines),
        nodes=(api.NodeSpec(count=number, gpus=GPUS, gpu_bytes=GPU_BYTES),),
        load=api.LoadSpec(memory_bps=MEMORY_BPS, holders="all"),
        hop_s=HOP_S,
        network_s=NETWORK_S,
        network_bps=NETWORK_BPS,
        duration_s=load.cell.duration_s,
        limit_s=load.cell.duration_s + PATIENCE_S,
        budget_replicas=number * GPUS,
        warm_s=load.cell.warm_minutes * 60.0 / load.cell.speed,
    )


def simulate_cell(
    load: Load, policy: str, allocation: Sequence[Sequence[int]] = (), *, effort: float = 1.0
) -> tuple[Score, api.Outcome]:
    """One policy on the simulated pool."""
    world = simulated_world(load, policy, allocation)
    order = load.order(policy, effort)
    watched = Watched(None if order is None else steering(order))
    outcome = simulate(world, watched, load.cell.seed)
    served = load.served(policy)
    score = simulated_score(
        outcome,
        watched.points,
        [one.parts for one in served],
        [one.deadline_s for one in served],
        warm_s=world.warm_s,
        duration_s=load.cell.duration_s - world.warm_s,
    )
    return score, outcome


def live_plan(load: Load, policy: str, allocation: Sequence[Sequence[int]] = ()) -> Plan:
    """One policy on the real platform, through the gateway."""
    return Plan(
        load.served(policy, allocation, is_live=True),
        load.cell.duration_s,
        load.order(policy),
        LIVE_POOL,
        through_gateway=True,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Equal:
    """What the search for equal GPU-seconds found.

    Attributes:
        effort: over the tuned one.
        tried: efforts tried.
        ratio: GPU-seconds over Keystage's, on the search's part of the trace.
    """

    effort: float
    tried: int
    ratio: float


def equalise(load: Load, policy: str, target_gpu_s: float) -> Equal:
    """The effort that brings a rival to Keystage's GPU-seconds, by bisection in its logarithm.

    Args:
        load: a part of the trace, with another seed than the run's.
        policy: the rival.
        target_gpu_s: what Keystage used on it.

    Returns:
        Of the efforts within `EQUAL_RATIO` that with the least latency, else the nearest one.
    """
    tried: dict[float, Score] = {}
    low, high = math.log(EFFORTS[0]), math.log(EFFORTS[1])
    for _ in range(SEARCH_STEPS):
        middle = (low + high) / 2
        effort = math.exp(middle)
        tried[effort] = simulate_cell(load, policy, effort=effort)[0]
        if tried[effort].gpu_s < target_gpu_s:
            low = middle
        else:
            high = middle

    def rank(effort: float) -> tuple[bool, float]:
        far = abs(tried[effort].gpu_s / target_gpu_s - 1)
        return far > EQUAL_RATIO, tried[effort].mean_s if far <= EQUAL_RATIO else far

    best = min(tried, key=rank)
    return Equal(best, len(tried), tried[best].gpu_s / target_gpu_s)
