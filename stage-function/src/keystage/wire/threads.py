"""The body of `PUT /_/threads`: how a running worker is told its number of compute threads.

Before it: `local.cores` puts it. After it: `worker.http` takes it. One definition for both ends, so that
neither can send what the other refuses. It must not import a transport.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

THREADS_PATH = "/_/threads"
MAX_THREADS = 1024


class Threads(msgspec.Struct, frozen=True):
    """Compute threads of a worker from the next batch on."""

    threads: Annotated[int, msgspec.Meta(ge=1, le=MAX_THREADS)]
