"""Whether this process may fork now: one task, and no CUDA.

Asked before every fork by `fork_spawn` and `forkserver`. A forked child has only the thread that
forked: locks that others held stay locked, pools wait for workers that do not exist. A CUDA context
does not survive a fork at all. So a second thread is a reason to refuse, never a risk to take.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

_TASKS = Path("/proc/self/task")
_FDS = Path("/proc/self/fd")
_CUDA_DEVICE = "/dev/nvidia-uvm"
"""Opened when a process initialises CUDA (not by NVML)."""


class ForkError(Exception):
    """Nothing was forked; names what stood in the way."""

    http_status = 500


def tasks() -> list[str]:
    """Names of this process's tasks (threads), the first one's first."""
    ids = sorted(int(entry.name) for entry in _TASKS.iterdir())
    names = []
    for task in ids:
        with contextlib.suppress(OSError):  # it has just ended
            names.append((_TASKS / str(task) / "comm").read_bytes().decode(errors="replace").strip())
    return names


def check_forkable() -> None:
    """Refuses unless this process has one task and has not touched CUDA.

    Raises:
        ForkError: names the other tasks, or CUDA.
    """
    found = tasks()
    if len(found) != 1:
        raise ForkError(f"fork refused: {len(found)} tasks are running ({', '.join(found)}), 1 is allowed")
    if has_cuda():
        raise ForkError("fork refused: CUDA is initialised in the forking process")


def has_cuda() -> bool:
    """Whether this process has initialised CUDA, by torch's word and by its open devices."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return True
    for entry in _FDS.iterdir():
        with contextlib.suppress(OSError):  # the descriptor of this very listing
            if str(entry.readlink()) == _CUDA_DEVICE:
                return True
    return False
