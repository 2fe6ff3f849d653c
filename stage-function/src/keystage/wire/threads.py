"""Compute threads of a worker: the body of `PUT /_/threads`, and how long they wait for work awake.

Before it: `local.cores` puts the body, whoever starts a worker sets the variable. After it: `worker.http`
takes the body, the OpenMP library reads the variable. One definition for both ends, so that neither can send
what the other refuses. It must not import a transport.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

THREADS_PATH = "/_/threads"
MAX_THREADS = 1024

SPIN = {"GOMP_SPINCOUNT": "10000"}
"""Environment of whoever computes with torch on a CPU, where the operator has not set it: threads that have
nothing to do stay awake for about 0.2 ms, longer than from one multiplication of a layer to the next, and
then sleep. Left to itself GNU's OpenMP keeps them awake for some milliseconds, on the core that the next
stage's worker needs: SmolLM2 in four stages with two threads each took 65 ms a token, so 35."""


class Threads(msgspec.Struct, frozen=True):
    """Compute threads of a worker from the next batch on."""

    threads: Annotated[int, msgspec.Meta(ge=1, le=MAX_THREADS)]
