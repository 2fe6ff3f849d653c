"""How many replicas one stage needs: feed-forward by queueing model and by backlog.

Before it: estimates and the stage's share. After it: the corrector trims the number. QUART section
5.1 takes M/M/c; we take G/G/c waits (see `maths.erlang`) and add a backlog term, which reacts at
once, and look ahead over the dead time, so a replica that is starting is not asked for again.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from keystage.controller.domain.snapshot import Starting
from keystage.controller.maths import erlang


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
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
    """Smallest replica number that has the backlog gone in time, at most `most`.

    ceil((lambda + backlog / drain_s) / mu): it reacts at once. While replicas are on their way (dead
    time), more than those are asked for only if they would not do by start_s + drain_s from now;
    otherwise the backlog that grows during a long start would be answered again and again.
    """
    rate_rps = load.arrival_rps + load.backlog / drain_s
    asked = _ceil_within(rate_rps / load.replica_rps, most)
    held = min(ready + len(starting), most)
    if not starting or asked <= held:
        return asked
    horizon_s = start_s + drain_s
    done = ready * horizon_s
    for replica in starting:
        late_s = min(start_s, max(0.0, replica.expected_ready_s - at_s))
        done += horizon_s - late_s
    work = (load.backlog + load.arrival_rps * horizon_s) / load.replica_rps
    return min(asked, held + _ceil_within(max(0.0, work - done) / drain_s, most))


def _ceil_within(value: float, most: int) -> int:
    """Rounds up (forgiving rounding errors) into 0..most."""
    return most if value >= most else math.ceil(value * (1 - 1e-9))


def model_sojourn_s(load: Load, replicas: int) -> float:
    """Modelled mean wait + service at a number of replicas; infinite when they cannot keep up."""
    servers = max(1, replicas) * load.servers
    wait_s = erlang.ggc_wait_s(load.arrival_rps, load.service_s, servers, load.arrival_scv, load.service_scv)
    return wait_s + load.service_s
