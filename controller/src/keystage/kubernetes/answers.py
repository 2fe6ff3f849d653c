"""What an API server's answers mean: errors by status, events by line; and how queries are written. Pure.

Used by `client`, which does the exchanges. It must not do any.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import quote

from keystage.kubernetes.errors import (
    ClusterError,
    ClusterUnavailable,
    Conflict,
    Forbidden,
    Gone,
    Invalid,
    NotFound,
)

MAX_MESSAGE = 1000
"""A server repeats what it refuses, however long that is; logs and statuses hold its words."""
_ERRORS: dict[int, type[ClusterError]] = {
    400: Invalid,
    401: Forbidden,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    410: Gone,
    422: Invalid,
}


def error_of(status: int, told: Mapping[str, Any], what: str) -> ClusterError:
    """The error that a `Status` object stands for; says what was asked, and the server's own words."""
    message = told.get("message") or told.get("reason") or "no reason given"
    kind = _ERRORS.get(status, ClusterUnavailable if status == 429 or status >= 500 else ClusterError)
    if status == 422 and _is_another(told):
        kind = Conflict
    return kind(f"{what} answered {status}: {str(message)[:MAX_MESSAGE]}", status)


def _is_another(told: Mapping[str, Any]) -> bool:
    """A patch named the `uid` of an object that was replaced: the server calls that an invalid change."""
    causes = (told.get("details") or {}).get("causes") or ()
    return any(cause.get("field") == "metadata.uid" for cause in causes)


def lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Whole lines that are not empty, whatever the pieces they come in."""
    rest = b""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        yield from (line for line in whole if line.strip())
    if rest.strip():
        yield rest


def parameters(**given: str) -> dict[str, str]:
    """Parameters of a query, without those that are empty."""
    return {key: value for key, value in given.items() if value}


def query_text(given: Mapping[str, str]) -> str:
    """A query as it stands in a URL, empty for none."""
    return (
        "?" + "&".join(f"{quote(key)}={quote(text, safe='')}" for key, text in given.items()) if given else ""
    )
