"""Which close codes cross the gateway (RFC 6455 section 7.4), in either direction.

Pure. A code that one side sent reaches the other; those that stand for "no code came" and "the
connection broke" may not be sent, and become what the other side can act on.
"""

from __future__ import annotations

NORMAL = 1000
GONE = 1001
NO_CODE = 1005
ABNORMAL = 1006
BROKEN = 1011
MAX_REASON_BYTES = 123
"""A control frame holds 125 bytes, two of them for the code."""
_KNOWN = frozenset({1000, 1001, 1002, 1003, 1007, 1008, 1009, 1010, 1011, 1012, 1013, 1014})
_OWN = range(3000, 5000)


def sendable(code: int, instead: int) -> int:
    """The code to send for one that came.

    Args:
        code: as seen on the other side; 1005 stands for a close without one.
        instead: for a connection that broke, and for codes that nobody may send.
    """
    if code == NO_CODE:
        return NORMAL
    return code if code in _KNOWN or code in _OWN else instead


def fitting(reason: str) -> str:
    """The reason, cut where a close frame ends."""
    return reason.encode()[:MAX_REASON_BYTES].decode(errors="ignore")
