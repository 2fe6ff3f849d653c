"""Cuts a plan into the parts that processes or machines send: every n-th request each.

Comes after `plan` and `target`, before `processes` and `fleet`. Pure. Bodies are made when a part is made.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np

from keystage.loadgen.plan import Plan
from keystage.loadgen.sending.messages import Part
from keystage.loadgen.sending.route import VERSIONS, Reading, Version, route
from keystage.loadgen.sending.row import Row
from keystage.loadgen.target import Target

PROCESS_RPS = 5000.0
"""What one process is trusted to send a second: a fifth of a core (docs/loadgen.md), with room for bursts."""

COSTLY_PROCESS_RPS = 1250.0
"""The same over HTTP/2, or of answers that stream: each takes four times as much."""

Count: TypeAlias = int | Literal["auto"]


def processes_for(
    times_s: Sequence[float] | np.ndarray, each_rps: float = PROCESS_RPS, cores: int | None = None
) -> int:
    """Processes for a schedule: one for every `each_rps` of its busiest second, as far as cores go.

    Args:
        times_s: the schedule.
        each_rps: what one process is trusted to send.
        cores: processors to be used; those of this process, if None.
    """
    cores = len(os.sched_getaffinity(0)) if cores is None else cores
    if not len(times_s):
        return 1
    _, counts = np.unique(np.floor(np.asarray(times_s)).astype(np.int64), return_counts=True)
    return max(1, min(cores, math.ceil(int(counts.max()) / each_rps), len(times_s)))


@dataclasses.dataclass(frozen=True, slots=True)
class Manner:
    """How requests are sent.

    Attributes:
        timeout_s: a request fails this long after it was sent, all its attempts included.
        http: version of HTTP.
        retries: how often a request that failed is sent again.

    Raises:
        ValueError: a setting out of bounds.
    """

    timeout_s: float = 300.0
    http: Version = "1.1"
    retries: int = 0

    def __post_init__(self) -> None:
        """Refuses what is out of bounds."""
        if self.http not in VERSIONS:
            raise ValueError(f"http must be one of {', '.join(VERSIONS)}, got {self.http!r}")
        if self.retries < 0:
            raise ValueError(f"retries must be at least 0, got {self.retries}")
        if not (math.isfinite(self.timeout_s) and self.timeout_s > 0):
            raise ValueError(f"timeout_s must be finite and above 0, got {self.timeout_s}")


class Parts:
    """A plan that can be cut.

    Args:
        plan: what is sent when.
        target: how; its address is replaced by the plan's, where the plan has any.
        manner: how each is sent.

    Attributes:
        rows: one a request, in the plan's order.
        end_s: when every request has ended, seconds from the start.

    Raises:
        RouteError: an address that cannot be sent to.
    """

    def __init__(self, plan: Plan, target: Target, manner: Manner) -> None:
        addresses = plan.addresses or (target.base_url,)
        self._urls = [dataclasses.replace(target, base_url=address.rstrip("/")).url for address in addresses]
        self._reading: Reading = "stream" if target.is_streaming else "json"
        if target.kind in ("raw", "bodies"):
            self._reading = "times"
        for url in self._urls:
            route(url, target.headers, self._reading)
        self._plan, self._target, self._manner = plan, target, manner
        self._targets = np.asarray(plan.targets, np.int32)
        self._times_s = np.asarray(plan.times_s, np.float64)
        self.rows = [
            Row(index, at_s, target=place)
            for index, (at_s, place) in enumerate(
                zip(self._times_s.tolist(), self._targets.tolist(), strict=True)
            )
        ]
        self.end_s = manner.timeout_s + (float(self._times_s[-1]) if self.rows else 0.0)

    def count(self, processes: Count) -> int:
        """How many processes there are to be.

        Raises:
            ValueError: less than one.
        """
        if processes == "auto":
            is_costly = self._reading == "stream" or self._manner.http == "2"
            processes = processes_for(self._times_s, COSTLY_PROCESS_RPS if is_costly else PROCESS_RPS)
        if processes < 1:
            raise ValueError(f"processes must be at least 1 or 'auto', got {processes}")
        return max(1, min(processes, len(self.rows)))

    def part(self, first: int, step: int) -> Part:
        """Requests `first`, `first + step`, ...; their bodies are made now, equal objects held once."""
        share = np.arange(first, len(self.rows), step, dtype=np.int64)
        places: dict[int, int] = {}
        contents: list[bytes] = []
        bodies = [self._plan.bodies[place] for place in share.tolist()]  # all held, so that ids differ
        chosen = np.empty(len(bodies), np.int32)
        for number, body in enumerate(bodies):
            place = places.setdefault(id(body), len(contents))
            if place == len(contents):
                contents.append(body)
            chosen[number] = place
        manner = self._manner
        return Part(
            share.tobytes(), self._times_s[share].tobytes(), self._targets[share].tobytes(),
            chosen.tobytes(), contents, self._urls, self._target.headers, self._reading, manner.timeout_s,
            manner.http, manner.retries,
        )  # fmt: skip


def count_of(part: Part, processes: int | None) -> int:
    """How many processes are to send a part here; None: as many as its rate and the cores ask for."""
    times_s = np.frombuffer(part.times_s, np.float64)
    if processes is None:
        is_costly = part.reading == "stream" or part.http == "2"
        processes = processes_for(times_s, COSTLY_PROCESS_RPS if is_costly else PROCESS_RPS)
    return max(1, min(processes, len(times_s)))


def cut(part: Part, first: int, step: int) -> Part:
    """Requests `first`, `first + step`, ... of a part, with no more contents than they carry."""
    share = slice(first, None, step)
    used, chosen = np.unique(np.frombuffer(part.bodies, np.int32)[share], return_inverse=True)
    return Part(
        np.frombuffer(part.indices, np.int64)[share].tobytes(),
        np.frombuffer(part.times_s, np.float64)[share].tobytes(),
        np.frombuffer(part.targets, np.int32)[share].tobytes(),
        chosen.astype(np.int32).tobytes(), [part.contents[place] for place in used.tolist()], part.urls,
        part.headers, part.reading, part.timeout_s, part.http, part.retries,
    )  # fmt: skip
