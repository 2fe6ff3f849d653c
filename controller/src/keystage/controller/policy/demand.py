"""How many replicas one stage needs: feed-forward by queueing model and by backlog.

Before it: estimates and the stage's share. After it: the corrector trims the number. QUART section
5.1 takes M/M/c; we take G/G/c waits (see `maths.erlang`) and add a backlog term, which reacts at
once, and look ahead over the dead time, so a replica that is starting is not asked for again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from keystage.controller.domain.snapshot import Starting
from keystage.controller.maths import erlang, transient
from keystage.controller.maths.estimator import is_number
from keystage.controller.policy.settings import MOST_REPLICAS


class Load(msgspec.Struct, frozen=True, gc=False):
    """Work that meets one stage.

    Attributes:
        arrival_rps: arrivals a second.
        arrival_scv: squared CV of inter-arrival times.
        service_s: seconds one server (a replica, or one slot of it) is taken by an item.
        service_scv: squared CV of that.
        servers: servers per replica (1, or slots).
        backlog: items waiting.
        wait_s: mean wait that is allowed.
    """

    arrival_rps: float
    arrival_scv: float
    service_s: float
    service_scv: float
    servers: int
    backlog: float
    wait_s: float

    @property
    def replica_rps(self) -> float:
        """Items a busy replica finishes a second."""
        return self.servers / self.service_s


def for_wait(load: Load, most: int) -> int:
    """Smallest replica number whose mean wait is allowed, at most `most`."""
    servers = erlang.servers_for_wait(
        load.arrival_rps,
        load.service_s,
        load.arrival_scv,
        load.service_scv,
        load.wait_s,
        most * load.servers,
    )
    return math.ceil(servers / load.servers)


def for_backlog(
    load: Load,
    ready: int,
    starting: Sequence[Starting],
    at_s: float,
    start_s: float,
    drain_s: float,
    most: int,
) -> int:
    """Smallest replica number that has the backlog gone by start_s + drain_s from now, at most `most`.

    At least ceil(lambda / mu), since fewer never catch up. Beyond the replicas there are (those on their
    way count from when they are ready) one is asked for only if it helps: it takes start_s to get ready
    (dead time), and what the present ones work off by then is no reason (`transient.servers_to_drain`).
    """
    least = ceil_within(load.arrival_rps / load.replica_rps, most)
    serving = min(max(0, ready), most)
    starts_s = [
        min(start_s, max(0.0, replica.expected_ready_s - at_s))
        if is_number(replica.expected_ready_s)
        else start_s
        for replica in starting
    ]
    more = transient.servers_to_drain(
        load.backlog, load.arrival_rps, load.replica_rps, serving, starts_s, start_s, start_s + drain_s, most
    )
    return max(least, min(most, serving + len(starting) + more)) if more else least


def pipeline_rps(arrival_rps: float, arrival_scv: float, wait_s: float) -> float:
    """Items a second every stage of a chain shall be able to work off, so that bursts wait at most `wait_s`.

    A burst queues once, before the stage of least capacity; those behind it see what it lets through.
    So capacity above the others' is of no use, and the chain waits like one server of its least capacity
    T (Kingman's bound in heavy traffic, services of squared CV 1):

        W = (ca2 + 1) / 2  lambda / (T (T - lambda))   =>   T = (lambda + sqrt(lambda^2 + 4 lambda f / W)) / 2

    Args:
        arrival_rps: lambda at the entry.
        arrival_scv: ca2 there.
        wait_s: W, mean wait of the chain, > 0.
    """
    factor = (arrival_scv + 1) / 2
    return (arrival_rps + math.sqrt(arrival_rps * arrival_rps + 4 * arrival_rps * factor / wait_s)) / 2


def ceil_within(value: float, most: int) -> int:
    """Rounds up (forgiving rounding errors) into 0..most."""
    return most if value >= most else math.ceil(value * (1 - 1e-9))


def model_wait_s(load: Load, replicas: int) -> float:
    """Modelled mean wait at a number of replicas; infinite when they cannot keep up."""
    servers = max(1, min(MOST_REPLICAS, replicas)) * load.servers
    return erlang.ggc_wait_s(load.arrival_rps, load.service_s, servers, load.arrival_scv, load.service_scv)
