"""How many replicas one machine can use: the cap of stages that compute on its CPU.

Before it: function records. After it: `FunctionView.cap` with its reason. Rule: the cores are shared
evenly among the CPU stage functions, each replica taking its threads; at least one each. Beyond that
replicas take turns on the same cores: more processes, no more work. And a further replica needs
memory for its own copy of the parameters. Replicas of a stage on `cuda` are given a GPU each
(`local.gpus`), those on `cuda:N` share one: beyond that they take turns. Emulated stages only sleep and
are not capped.
"""

from __future__ import annotations

import dataclasses

COPIES = 2
"""Copies of the parameters a starting worker holds at its peak: as read, and as laid out for compute."""

RUNTIME_BYTES = 400 << 20
"""Interpreter, torch and buffers of one CPU worker."""


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """What replicas share: cores and GPUs this process may use, and bytes of memory available now."""

    cores: int
    available_bytes: int
    gpus: int = 0


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


def gpu_cap_of(machine: Machine, device: str) -> tuple[int, str]:
    """The cap of one GPU stage function and its reason.

    Args:
        machine: how many GPUs it has.
        device: `cuda`: a replica may have any of them; `cuda:N`: all have that one.
    """
    if device == "cuda" and machine.gpus > 1:
        return machine.gpus, f"{machine.gpus} GPUs here, one for each replica: more would take turns"
    return 1, "all replicas of a stage share one GPU here: more would take turns"
