"""Query parameters of the management API: read strictly, refused by name, bound and value.

Used by `gateway.rest*`. Pure.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Mapping

import msgspec

from keystage.gateway.backend import BadRequest

TRUE = frozenset({"1", "t", "T", "true", "True", "TRUE"})
FALSE = frozenset({"", "0", "f", "F", "false", "False", "FALSE"})
"""Spellings of Go's strconv.ParseBool, which faas-cli writes; empty is absent."""
MAX_TAIL = 10**9
_INTEGER = re.compile(r"[-+]?[0-9]{1,19}")
# [0-9] and not \d: that takes the digits of every script.
_RFC3339 = re.compile(
    r"([0-9]{4}-[0-9]{2}-[0-9]{2})[Tt]([0-9]{2}:[0-9]{2}:[0-9]{2})(\.[0-9]{1,30})?([Zz]|[-+][0-9]{2}:[0-9]{2})"
)
_SHOWN = 80


def boolean(query: Mapping[str, str], name: str) -> bool:
    """A parameter that is true or false, absent: false.

    Raises:
        BadRequest: it is neither.
    """
    text = query.get(name, "")
    if text not in TRUE and text not in FALSE:
        raise BadRequest(f"query parameter {name} must be true or false, not {text[:_SHOWN]!r}")
    return text in TRUE


def unix_s(text: str) -> float | None:
    """An RFC 3339 time as Unix seconds, None if it is none."""
    match = _RFC3339.fullmatch(text)
    if match is None:
        return None
    day, clock, fraction, zone = match.groups()
    zone = "+00:00" if zone in "Zz" else zone
    try:
        at = dt.datetime.fromisoformat(f"{day}T{clock}{(fraction or '')[:7]}{zone}")
        return (at - dt.datetime(1970, 1, 1, tzinfo=dt.UTC)).total_seconds()
    except (ValueError, OverflowError):
        return None


class LogQuery(msgspec.Struct, frozen=True):
    """Query of GET /system/logs.

    Attributes:
        name: function.
        namespace: namespace.
        instance: only this replica.
        tail: newest lines at most, None for all.
        since_s: only later lines, Unix seconds.
        follow: go on with new lines.
    """

    name: str
    namespace: str
    instance: str
    tail: int | None
    since_s: float
    follow: bool

    @staticmethod
    def parse(query: Mapping[str, str]) -> LogQuery:
        """Reads query parameters.

        Raises:
            BadRequest: names the parameter and what it held.
        """
        if not query.get("name"):
            raise BadRequest("query parameter name is missing: which function's logs?")
        text = query.get("tail", "")
        if text and not _INTEGER.fullmatch(text):
            raise BadRequest(
                f"query parameter tail must be an integer of at most 19 digits, not {text[:_SHOWN]!r}"
            )
        # faas-provider: 0 or less is no limit; faas-cli sends -1 for all lines.
        tail = int(text) if text else 0
        since = query.get("since", "")
        since_s = unix_s(since) if since else 0.0
        if since_s is None:
            raise BadRequest(
                f"query parameter since must be an RFC 3339 time (+ written %2B), not {since[:_SHOWN]!r}"
            )
        return LogQuery(
            name=query["name"],
            namespace=query.get("namespace", ""),
            instance=query.get("instance", ""),
            tail=min(tail, MAX_TAIL) if tail > 0 else None,
            since_s=max(0.0, since_s),
            follow=boolean(query, "follow"),
        )
