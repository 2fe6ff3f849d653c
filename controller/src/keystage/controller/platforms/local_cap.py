"""How many replicas one machine can use: the cap of stages that compute on its CPU.

Before it: function records. After it: `FunctionView.cap` with its reason. Rule: the cores are shared
evenly among the CPU stage functions, each replica taking its threads; at least one each. Beyond that
replicas take turns on the same cores: more processes, no more work. And a further replica needs
memory for its own copy of the parameters. All replicas of a GPU stage are given the same GPU on one
machine, where a further one takes turns with the first: one each. Emulated stages only sleep and are
not capped.
"""

from __future__ import annotations

import dataclasses

COPIES = 2
"""Copies of the parameters a starting worker holds at its peak: as read, and as laid out for compute."""

RUNTIME_BYTES = 400 << 20
"""Interpreter, torch and buffers of one CPU worker."""


GPU_CAP = 1
GPU_REASON = "all replicas of a stage share one GPU here: more would take turns"


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """What replicas share: cores this process may use, and bytes of memory available now."""

    cores: int
    available_bytes: int


def is_capped(device: str) -> bool:
    """Whether a device (`KEYSTAGE_DEVICE`) is this machine's CPU."""
    return device.split(":", 1)[0] in ("", "cpu")


def is_on_gpu(device: str) -> bool:
    """Whether a device (`KEYSTAGE_DEVICE`) is a GPU of this machine."""
    return device.split(":", 1)[0] == "cuda"


def cap_of(
    machine: Machine, threads: int, threads_of_all: int, parameter_bytes: int, running: int
) -> tuple[int, str]:
    """The cap of one CPU stage function and its reason.

    Args:
        machine: cores and free memory.
        threads: compute threads of one replica, >= 1.
        threads_of_all: threads of one replica of every CPU stage function together.
        parameter_bytes: size of the stage's parameters, 0 when unknown.
        running: replicas that exist, whose memory is taken already.
    """
    by_cores = max(1, machine.cores // max(1, threads_of_all))
    need = COPIES * parameter_bytes + RUNTIME_BYTES
    by_memory = max(1, running + machine.available_bytes // need)
    if by_memory < by_cores:
        free = machine.available_bytes >> 20
        return by_memory, f"{free} MiB of memory free, a replica needs {need >> 20} MiB"
    return by_cores, (
        f"{machine.cores} cores for CPU stages of {threads_of_all} threads together "
        f"({threads} here): more replicas would take turns"
    )
