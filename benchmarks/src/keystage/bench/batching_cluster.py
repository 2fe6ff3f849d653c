"""An emulated cluster under a `Scheduler`, in emulated time: what it serves, and the rate it can serve.

Before: models (`batching_models`) and arrivals (`batching_arrivals`). After: the benchmarks of batching. The
loop knows nothing of policies: it tells the scheduler what happens and carries out its orders. A request is
*good* when its batch ended by its deadline, *late* when it ended after, *dropped* when the scheduler gave it
up; every request that came is one of the three. *Goodput* is the highest rate at which every model's p99 is
within its own SLO, that is, at which no model has more than 1 % late and dropped (Symphony, section 2.1).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import TypeAlias

import numpy as np

from keystage.batching.api import Drop, Order, Request, Scheduler
from keystage.bench.batching_arrivals import Arrivals
from keystage.bench.batching_emulation import Cluster, ClusterError, Network, Served
from keystage.bench.batching_models import Model

__all__ = ["ClusterError", "Found", "Model", "Network", "RunLength", "Served", "goodput", "serve"]

MAX_BAD_RATIO = 0.01
"""p99 within the SLO."""

ArrivalsAt: TypeAlias = Callable[[float, float, int], Arrivals]
"""Arrivals at a total rate (requests/s), over so many seconds, for a seed."""


def serve(
    make: Callable[[], Scheduler],
    models: Sequence[Model],
    arrivals: Arrivals,
    replicas: int,
    *,
    seconds: float,
    warm_s: float,
    network: Network | None = None,
    hosts: Sequence[Collection[int]] | None = None,
    demote: bool = False,
    give_up_ratio: float | None = None,
    pooled: bool = False,
) -> Served:
    """Runs arrivals through a scheduler until all have ended.

    Args:
        make: a new scheduler without replicas.
        models: by index.
        arrivals: within [0, seconds).
        replicas: how many, all free at 0.
        seconds: end of the window that counts.
        warm_s: its begin; earlier requests are served and not counted.
        network: drawn for every batch; None: batches start when the scheduler has said.
        hosts: models of each replica, None: all have all.
        demote: dropped requests go back behind the others and run late, instead of being refused.
        give_up_ratio: stops as soon as a model is certain to have a higher share of bad requests.
        pooled: the same, all models together.

    Raises:
        ClusterError: the scheduler lost a request, ran one twice, or ran one where its model is not.
        ValueError: a window or hosts that do not fit.
    """
    hosts = [range(len(models))] * replicas if hosts is None else hosts
    if len(hosts) != replicas or not 0 <= warm_s < seconds:
        raise ValueError(f"{len(hosts)} hosts for {replicas} replicas, warm-up {warm_s} of {seconds} s")
    cluster = Cluster(models, hosts, len(arrivals.times_s))
    cluster.warm_s, cluster.until_s, cluster.network = warm_s, seconds, network
    if give_up_ratio is not None:
        offered = np.bincount(arrivals.model[arrivals.times_s >= warm_s], minlength=len(models))
        if not pooled:
            cluster.judged_with = list(range(len(models)))
        cluster.bad_left = [int(give_up_ratio * n) for n in ([offered.sum()] if pooled else offered)]
    scheduler = make()
    for number, hosted in enumerate(hosts):
        scheduler.add_replica(number, hosted, 0.0)
    _run(cluster, scheduler, arrivals, demote)
    return cluster.served(arrivals)


def _run(cluster: Cluster, scheduler: Scheduler, arrivals: Arrivals, demote: bool) -> None:
    """The event loop; of what happens at one time, endings come first, then arrivals, then timers."""
    times_s, models = [*arrivals.times_s.tolist(), math.inf], arrivals.model.tolist()
    slos_s = [model.slo_s for model in cluster.models]
    ends, position, came_s = cluster.ends, 0, times_s[0]
    arrive, finished, take = scheduler.arrive, scheduler.finished, scheduler.take
    next_timer_s, now_s, idle_timers = scheduler.next_timer_s, 0.0, 0
    while not cluster.gave_up:
        end_s, timer_s = ends[0][0] if ends else math.inf, next_timer_s()
        if end_s <= came_s and end_s <= timer_s:
            if end_s == math.inf:
                break
            now_s = end_s
            replica = cluster.end(now_s)
            if replica is None:
                continue
            finished(replica, now_s)
        elif came_s <= timer_s:
            now_s, model = came_s, models[position]
            arrive(Request(position, model, now_s, now_s + slos_s[model]), now_s)
            position += 1
            came_s = times_s[position]
        else:
            # A scheduler whose timer stays where it is would keep the loop at one time for ever.
            idle_timers = idle_timers + 1 if timer_s <= now_s else 0
            if idle_timers > 10_000:
                raise ClusterError(f"the scheduler asks for its timer at {timer_s} s over and over")
            now_s = max(timer_s, now_s)
            scheduler.on_timer(now_s)
        orders = take()
        if orders:
            cluster.carry_out(_demoted(scheduler, orders, now_s) if demote else orders, now_s)
    if not cluster.gave_up and (lost := cluster.outcome.count(0)):
        raise ClusterError(f"{lost} requests neither served nor dropped, one is {cluster.outcome.find(0)}")


def _demoted(scheduler: Scheduler, orders: list[Order], now_s: float) -> list[Order]:
    """Gives dropped requests back; what the scheduler then orders comes behind."""
    kept: list[Order] = []
    while orders:
        for order in orders:
            if isinstance(order, Drop):
                for request in order.requests:
                    scheduler.demote(request, now_s)
            else:
                kept.append(order)
        orders = scheduler.take()
    return kept


@dataclasses.dataclass(frozen=True, slots=True)
class RunLength:
    """How long a run must be for 1 % of its requests to mean something.

    Attributes:
        requests: at least so many in the window, all models together (in bursts, 2,000 squared CVs or more).
        each: at least so many of the rarest model.
        slos: the window is at least so many of the longest SLO.
        warm_slos: the warm-up is so many of the longest SLO.
    """

    requests: int = 20_000
    each: int = 1_000
    slos: float = 20.0
    warm_slos: float = 5.0

    def window(self, models: Sequence[Model], rate_rps: float, rarest: float) -> tuple[float, float]:
        """(warm-up, end of the window) in seconds.

        Args:
            models: served.
            rate_rps: all models together.
            rarest: the smallest share of a model.
        """
        slo_s = max(model.slo_s for model in models)
        warm_s = self.warm_slos * slo_s
        window_s = max(self.requests / rate_rps, self.each / (rate_rps * rarest), self.slos * slo_s)
        return warm_s, warm_s + window_s


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """The highest rate that holds.

    Attributes:
        rate_rps: requests/s that came in the window of the best run that held; 0 when none did.
        nominal_rps: the rate that its arrivals were drawn at.
        failed_rps: the lowest nominal rate that did not hold.
        served: that run, None when none held.
        probes: runs made.
    """

    rate_rps: float
    nominal_rps: float
    failed_rps: float
    served: Served | None
    probes: int


def goodput(
    make: Callable[[float], Scheduler],
    models: Sequence[Model],
    arrivals_at: ArrivalsAt,
    replicas: int,
    *,
    most_rps: float,
    guess_rps: float | None = None,
    length: RunLength | None = None,
    seed: int = 0,
    tolerance_ratio: float = 0.005,
    rarest: float | None = None,
    pooled: bool = False,
    network: Network | None = None,
    hosts: Sequence[Collection[int]] | None = None,
) -> Found:
    """Searches the highest total rate at which every model has at most 1 % bad requests.

    Steps out from the guess, 4 % first and then twice as far each time, until one rate holds and one does
    not, and halves between them. One seed gives one pattern of arrivals at every rate.

    Args:
        make: a new scheduler without replicas, told the rate (for those that plan for one).
        models: by index.
        arrivals_at: for a rate, a length in seconds and the seed.
        replicas: how many.
        most_rps: a rate that cannot hold (`batching_models.capacity_rps`).
        guess_rps: where to begin, None: 0.8 of that.
        length: of each run.
        seed: of the arrivals.
        tolerance_ratio: the search ends when the bracket is so narrow, relative to its upper end.
        rarest: the smallest share of a model, None: all are equally popular.
        pooled: models that are exchangeable (same profile, SLO, arrivals, and a scheduler that treats them
            alike) have the same share of bad requests: then all together estimate it.
        network: as in `serve`.
        hosts: as in `serve`.
    """
    length = RunLength() if length is None else length
    rarest = 1 / len(models) if rarest is None else rarest
    held_rps, failed_rps, probes, step = 0.0, most_rps, 0, 0.04
    best: Served | None = None
    rate_rps = 0.8 * most_rps if guess_rps is None else min(guess_rps, 0.99 * most_rps)
    while failed_rps - held_rps > tolerance_ratio * failed_rps and failed_rps > 1e-4 * most_rps:
        warm_s, seconds = length.window(models, rate_rps, rarest)
        probes += 1
        served = serve(
            functools.partial(make, rate_rps),
            models,
            arrivals_at(rate_rps, seconds, seed),
            replicas,
            seconds=seconds,
            warm_s=warm_s,
            network=network,
            hosts=hosts,
            give_up_ratio=MAX_BAD_RATIO,
            pooled=pooled,
        )
        if served.stopped:
            failed_rps = rate_rps
        else:
            held_rps, best = rate_rps, served
        rate_rps = _next(held_rps, failed_rps, most_rps, step)
        step *= 2
    offered_rps = float(best.offered.sum()) / best.seconds if best is not None else 0.0
    return Found(offered_rps, held_rps, failed_rps, best, probes)


def _next(held_rps: float, failed_rps: float, most_rps: float, step: float) -> float:
    """Out from where the search stands while one end of the bracket is open, then its middle."""
    middle = (held_rps + failed_rps) / 2
    if held_rps == 0:
        return max(middle, failed_rps * (1 - step))
    if failed_rps == most_rps:
        return min(middle, held_rps * (1 + step))
    return middle
