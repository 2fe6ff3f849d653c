"""Who a router is, so that another one can tell whether it still lives.

Between routers of one pipeline, through the journal. Where both are on one node the process table answers
at once; elsewhere a router counts as dead when its key in the journal has expired.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from keystage.wire.opening import node_identity


class Owner(msgspec.Struct, frozen=True):
    """A router's process.

    Attributes:
        node: see `wire.link.node_identity`: process ids are the same there.
        pid: its process id.
        begun: when it was started, in the kernel's ticks: process ids are used again.
    """

    node: str
    pid: int
    begun: int

    @classmethod
    def this(cls) -> Owner:
        """This process."""
        pid = os.getpid()
        return cls(node_identity(), pid, _begun(pid) or 0)

    def is_gone(self, node: str) -> bool:
        """Whether it is known on this node that it has ended."""
        return self.node == node and _begun(self.pid) != self.begun


def _begun(pid: int) -> int | None:
    """When a process was started, None: there is none, or a dead one that nobody has asked for."""
    try:
        # Fields behind the name, which is in parentheses and may hold anything (man 5 proc).
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return None if fields[0] in (b"Z", b"X") else int(fields[19])
    except (OSError, IndexError, ValueError):
        return None
