"""What pods print and use: logs of several in order of time, and their usage where metrics are served.

Behind `gateway.kubernetes`. Synchronous, called in threads. A pod that is gone, or has not begun, has no
lines; what is kept of a pod ends with it. It must not know functions.
"""

from __future__ import annotations

import datetime as dt
import logging
from collections.abc import Iterable, Iterator

from keystage.gateway.backend import LogLine
from keystage.kubernetes.api import CONTAINER, FUNCTION_LABEL
from keystage.kubernetes.client import POD_METRICS, Cluster
from keystage.kubernetes.cores import quantity
from keystage.kubernetes.errors import ClusterError, Invalid, NotFound
from keystage.local.api import Usage

MAX_LINES = 10_000
"""Of one pod, where no number is asked for: what is held in memory at once is bounded."""
_log = logging.getLogger(__name__)


def lines_of(cluster: Cluster, pod: str, *, tail: int | None, since_s: float) -> list[LogLine]:
    """A pod's output, oldest first.

    Args:
        cluster: its namespace.
        pod: its name.
        tail: newest lines at most, None: `MAX_LINES`.
        since_s: only lines later than this (Unix seconds).

    Raises:
        ClusterError: its node does not answer, or a right is missing.
    """
    most = MAX_LINES if tail is None else min(tail, MAX_LINES)
    try:
        body = cluster.logs(pod, CONTAINER, tail=most, since_s=since_s if since_s > 0 else None)
    except (NotFound, Invalid):  # gone; or its container has not begun
        return []
    return [line for line in _parsed(pod, body) if line.at_s > since_s]


def merged(parts: Iterable[list[LogLine]], tail: int | None) -> list[LogLine]:
    """Lines of several pods in order of time; those of one pod stay in theirs."""
    rows = sorted((line for part in parts for line in part), key=lambda line: line.at_s)
    return rows if tail is None else rows[max(0, len(rows) - tail) :]


def usage_of(cluster: Cluster, function: str) -> Usage:
    """What a function's pods use together; nothing where no metrics are served, and the log says so."""
    try:
        listing = cluster.list(POD_METRICS, labels=f"{FUNCTION_LABEL}={function}")
    except ClusterError as error:
        _log.warning("usage of function %s is not known, 0 is shown: %s", function, error)
        return Usage(0.0, 0)
    used = [box.get("usage", {}) for obj in listing.items for box in obj.get("containers") or ()]
    cores = sum(quantity(each.get("cpu")) for each in used)
    return Usage(cores, round(sum(quantity(each.get("memory")) for each in used)))


def _parsed(pod: str, body: bytes) -> Iterator[LogLine]:
    """Lines as the kubelet writes them: a time-stamp, a space, the text."""
    at_s = 0.0
    for row in body.decode("utf-8", "replace").split("\n"):
        stamp, _, text = row.partition(" ")
        told_s = _seconds(stamp)
        if told_s is None:
            if not row:
                continue  # after the last line
            text = row  # a word of the kubelet's own; it has no time
        else:
            at_s = max(at_s, told_s)  # in the pod's own order, whatever its clock did
        yield LogLine(at_s, pod, text.removesuffix("\r"))


def _seconds(stamp: str) -> float | None:
    """Unix seconds, to the microsecond; None for what is no time-stamp."""
    if not (20 <= len(stamp) <= 35 and stamp[4] == "-"):
        return None
    try:
        return dt.datetime.fromisoformat(stamp).timestamp()
    except ValueError:
        return None
