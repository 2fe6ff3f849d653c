"""Headers that the gateway itself adds to an invocation: which call it is, and those of a refusal.

One place for `gateway.proxy`, `gateway.websocket` and `gateway.queue_calls`; `gateway.headers` says what of
others' headers crosses. It must not know bodies.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

from keystage.gateway.replicas import RETRY_AFTER_S

Pair = tuple[bytes, bytes]
TEXT = (b"content-type", b"text/plain; charset=utf-8")


def identity(pairs: Iterable[Pair]) -> tuple[Pair, Pair]:
    """`X-Call-Id`, the caller's or a new one, and `X-Start-Time` in Unix nanoseconds, as OpenFaaS has them.

    Args:
        pairs: the caller's headers, lower-case names; of several ids the last counts.
    """
    call_id = b""
    for name, value in pairs:
        if name == b"x-call-id":
            call_id = value
    return (b"x-call-id", call_id or os.urandom(16).hex().encode()), (
        b"x-start-time",
        b"%d" % time.time_ns(),
    )


def of_refusal(status: int) -> list[Pair]:
    """Headers of an answer in words with this status, but its length.

    Retry-After: 429 and 503 pass. Connection: close: after 408 and 413 the rest of the body is not read.
    """
    headers = [TEXT]
    if status in (429, 503):
        headers.append((b"retry-after", b"%d" % RETRY_AFTER_S))
    if status in (408, 413):
        headers.append((b"connection", b"close"))
    return headers
