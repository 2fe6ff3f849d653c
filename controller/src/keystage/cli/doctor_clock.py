"""Whether the clocks of the parts agree. Judging is pure; `gateway_clock` reads one.

A gateway tells its clock at the head of its stream of reports, a controller the time of each report. Nodes of
a cluster tell theirs by heartbeats, of which only those from the future say something.
"""

from __future__ import annotations

import datetime as dt
import http.client
import json
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from keystage.cli.doctor_report import Check, judged
from keystage.observability.api import EVENTS_PATH
from keystage.openfaas.exchange import Wire

MOST_S = 3.0
"""A report may be a second old, and an exchange takes its time."""
HERE = "this machine"
_LINES = 10
"""Lines of a stream in which its clock must come."""
_LINE_BYTES = 4096


def gateway_clock(wire: Wire) -> float | None:
    """Seconds that a gateway's clock is ahead of ours, None where it does not tell.

    Args:
        wire: how it is reached.
    """
    parts = urlsplit(wire.url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=wire.timeout_s)
    headers = {"Accept": "text/event-stream"}
    if wire.credentials is not None:
        headers["Authorization"] = wire.credentials.header()
    try:
        asked_s = time.time()
        connection.request("GET", parts.path.rstrip("/") + EVENTS_PATH, headers=headers)
        answer = connection.getresponse()
        if answer.status != http.client.OK:
            return None
        return _ahead(answer, (asked_s + time.time()) / 2)
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def check(area: str, ahead_s: Mapping[str, float]) -> Check:
    """Whether parts agree.

    Args:
        area: of the check.
        ahead_s: seconds that a part's clock is ahead of this machine's.
    """
    clocks = {HERE: 0.0, **ahead_s}
    first = max(clocks, key=lambda part: clocks[part])
    last = min(clocks, key=lambda part: clocks[part])
    apart_s = clocks[first] - clocks[last]
    middle = sorted(clocks.values())[len(clocks) // 2]
    wrong = max(clocks, key=lambda part: abs(clocks[part] - middle))
    shown = ", ".join(f"{part} {seconds:+.1f} s" for part, seconds in ahead_s.items())
    return judged(
        area,
        "clocks",
        f"within {MOST_S:g} s of each other",
        f"{first} is {apart_s:.1f} s ahead of {last} (beside {HERE}: {shown})"
        if apart_s > MOST_S
        else f"{shown or 'none told'} beside {HERE}",
        "warn",
        "overrides end at a wrong time, ages and logs mislead: let a time service set the clocks "
        "(timedatectl set-ntp true, or chronyd)" + (f", first that of {wrong}" if len(clocks) > 2 else ""),
        is_met=apart_s <= MOST_S,
    )


def of_cluster(
    nodes: list[dict[str, Any]] | None, lease: dict[str, Any] | None, now: dt.datetime
) -> dict[str, float]:
    """Seconds that nodes and the leading controller are ahead at the least; those in the past tell nothing.

    Args:
        nodes: as an API server tells them.
        lease: the controllers'.
        now: with a zone.
    """
    told = {
        f"node {node['metadata']['name']}": condition.get("lastHeartbeatTime", "")
        for node in nodes or ()
        for condition in node.get("status", {}).get("conditions", ())
        if condition.get("type") == "Ready"
    }
    told["the leading controller"] = (lease or {}).get("spec", {}).get("renewTime", "")
    ahead = {who: (dt.datetime.fromisoformat(at) - now).total_seconds() for who, at in told.items() if at}
    return {who: seconds for who, seconds in ahead.items() if seconds > 0}


def _ahead(stream: http.client.HTTPResponse, now_s: float) -> float | None:
    """The clock at the head of a stream of events, beside ours."""
    before = b""
    for _ in range(_LINES):
        line = stream.readline(_LINE_BYTES)
        if before.strip() == b"event: clock" and line.startswith(b"data:"):
            try:
                return float(json.loads(line[5:])["now_s"]) - now_s
            except (ValueError, KeyError, TypeError):
                return None
        before = line
    return None
