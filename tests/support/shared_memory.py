"""What lies in /dev/shm."""

from __future__ import annotations

from pathlib import Path


def shared_names() -> set[str]:
    """Names in /dev/shm, without the semaphores that Python makes, in tests that run beside this one, too."""
    return {path.name for path in Path("/dev/shm").iterdir() if not path.name.startswith("sem.")}
