"""Facts of the machine a report was made on. Read after the run, so that it disturbs nothing."""

from __future__ import annotations

import dataclasses
import functools
import os
import platform
import subprocess
import sys
from pathlib import Path

import psutil

_TORCH_PROBE = (
    "import torch; c = torch.cuda.is_available();"
    "print(torch.__version__, 'cuda ' + torch.cuda.get_device_name(0) if c else 'cpu', sep='|')"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """What ran the load generator (and, on one machine, everything else).

    Attributes:
        cpu_model: name of the processor.
        cores: logical processors usable by this process.
        memory_bytes: physical memory.
        system: operating system and release.
        python: version of the interpreter.
        torch: version of torch, or `not installed`.
        torch_device: `cpu`, or the name of the first CUDA device; empty without torch.
    """

    cpu_model: str
    cores: int
    memory_bytes: int
    system: str
    python: str
    torch: str
    torch_device: str


def facts() -> Machine:
    """Reads them. Torch is asked in a process of its own: importing it here would cost memory and
    could leave a device context in a process that must stay without one.
    """  # noqa: D205
    version, device = _torch()
    return Machine(
        cpu_model=_cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=psutil.virtual_memory().total,
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        torch=version,
        torch_device=device,
    )


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


@functools.cache
def _torch() -> tuple[str, str]:
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TORCH_PROBE], capture_output=True, text=True, timeout=120, check=True
        )
    except (subprocess.SubprocessError, OSError):
        return "not installed", ""
    version, _, device = done.stdout.strip().partition("|")
    return version, device
