"""How many files and connections a process may have open.

Used at the start of every process that holds many: gateway, router, `keystage up`, KeysManager, load
generator, benchmarks. It must not lower anything.
"""

from __future__ import annotations

import resource

MOST_DESCRIPTORS = 1 << 20
"""Enough; programs that walk through all they might have open are slow beyond it."""


def raise_descriptors() -> int:
    """Lets this process and all it starts open as many descriptors as it may: streams hold two each.

    Returns:
        How many it may open now.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MOST_DESCRIPTORS
    most = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        return most
    return soft
