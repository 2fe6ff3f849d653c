"""The answer of `GET /_/start`: how far a worker's start is, and when it first did work.

Before it: `worker.http` answers it. After it: `local.starts` reads it and knows when each replica was
wanted. All times are `time.monotonic`, one clock for a machine. It must not import a transport.
"""

from __future__ import annotations

import msgspec

START_PATH = "/_/start"


class StartReport(msgspec.Struct, frozen=True, kw_only=True):
    """When a worker reached each phase, 0 for not yet.

    Attributes:
        begun_s: it began to run.
        mapped_s: its parameters were in its memory (or on its device).
        listening_s: it answered HTTP, with parameters.
        forward_s: its first forward pass was done.
        ready_s: new work was welcome.
        first_item_s: its first item of work (a wave's row or an item of a batch) was computed.
    """

    begun_s: float = 0.0
    mapped_s: float = 0.0
    listening_s: float = 0.0
    forward_s: float = 0.0
    ready_s: float = 0.0
    first_item_s: float = 0.0
