"""A replica that only holds its parameters: says what it has, then waits for its owner's end.

Forked by real fork servers and holders in tests, in place of a worker where a model is not the point.
It writes one line to its output: the SHA-256 of the raw parameters it was given, or the identity of
those it was given built, or `none`.
"""

from __future__ import annotations

import hashlib
import os
import select
import signal
from typing import Any


def main(supply: Any) -> int:
    """Says what it was given, and waits."""
    ended = os.eventfd(0)
    signal.signal(signal.SIGTERM, lambda *_: os.eventfd_write(ended, 1))
    if os.environ.get("TEST_DIES") == "1":
        os._exit(7)
    stock = supply._stock
    raw = stock.raw if stock is not None else None
    supply.report("mapped")
    identity = stock.parameters.identity if stock is not None else "none"
    print(hashlib.sha256(raw).hexdigest() if raw is not None else identity, flush=True)
    supply.report("ready")
    if os.environ.get("TEST_RELEASES") == "1":
        supply.claim.close()
    select.select([int(os.environ["KEYSTAGE_LIFELINE_FD"]), ended], [], [])
    return 0
