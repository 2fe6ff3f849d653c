"""What the logs of a local world say, when a benchmark that brought it up fails: they go with its folder."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

LOG_LINES = 12
"""Of each process."""
_TELLING = ("WARNING", "ERROR", "Error", "failed")


def log_ends(home: Path) -> str:
    """The last lines of every log of a world, then its warnings and errors.

    Args:
        home: folder of the world.
    """
    ends, told = [], []
    for path in sorted((home / "logs").glob("*.log")):
        lines = path.read_text(errors="replace").splitlines()
        telling = [line for line in lines if any(word in line for word in _TELLING)]
        ends += [f"--- {path.name}", *lines[-LOG_LINES:]]
        told += [f"--- {path.name}: warnings and errors", *telling[-LOG_LINES:]] if telling else []
    return "\n".join([*ends, *told])  # its end is what is kept where little is


@contextlib.contextmanager
def telling_why(home: Path) -> Iterator[None]:
    """Shows the ends of a world's logs on standard error when what is within fails.

    Args:
        home: folder of the world.
    """
    try:
        yield
    except Exception:
        print(log_ends(home), file=sys.stderr, flush=True)
        raise
