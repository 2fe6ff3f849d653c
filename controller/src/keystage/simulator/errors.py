"""What is wrong with a world that was described.

Before it: `check`, `files` and `platform` find a fault. After it: the command line prints it.
"""

from __future__ import annotations


class WorldError(ValueError):
    """A world that cannot be; the message names the thing, the bound and the value."""
