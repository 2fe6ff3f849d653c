"""Which GPUs this node has and how much of their memory is free, as NVML tells it.

Asked by `daemon` for its status; the device plugin reads other things by the same `each`. NVML
(`nvidia-ml-py`) reads the driver's books without a CUDA context, so the daemon stays as forkable and as small
as it was; this module must never touch CUDA. Without the package, the library or the driver there are no
GPUs, and a reason says which of them is missing.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from keystage.keysmanager.api import Gpu

T = TypeVar("T")


class LeftOut(Exception):
    """A GPU that is there and is not counted; says why."""


def gpus(nvml: Any = None) -> tuple[tuple[Gpu, ...], str]:
    """All GPUs in NVML's order (that of the PCI bus), and why some or all are missing.

    Args:
        nvml: the module `pynvml`; None: imported if it is installed.

    Returns:
        GPUs, and a reason that is empty where nothing is missing.
    """
    return each(_gpu, nvml)


def visible(environment: Mapping[str, str]) -> int:
    """How many GPUs processes with this environment see: NVML's, less what CUDA_VISIBLE_DEVICES hides."""
    there = len(gpus()[0])
    shown = environment.get("CUDA_VISIBLE_DEVICES")
    if shown is None or not there:
        return there
    named = [part.strip() for part in shown.split(",")]
    # As CUDA reads it: what follows an entry that is none does not count.
    return min(there, next((n for n, part in enumerate(named) if part in ("", "-1")), len(named)))


def each(read: Callable[[Any, int], T], nvml: Any = None) -> tuple[tuple[T, ...], str]:
    """What is read of every GPU. NVML is started anew: only then does it notice lost and new ones.

    Args:
        read: reads one, given the module and NVML's number of it; may raise `LeftOut`.
        nvml: see `gpus`.

    Returns:
        See `gpus`.
    """
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError as error:
            return (), f"no GPUs are seen: {error} (package nvidia-ml-py)"
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return (), f"no GPUs are seen: NVML does not start: {error}"
    try:
        return _each(read, nvml)
    except nvml.NVMLError as error:
        return (), f"no GPUs are seen: NVML: {error}"
    finally:
        nvml.nvmlShutdown()


def _each(read: Callable[[Any, int], T], nvml: Any) -> tuple[tuple[T, ...], str]:
    found: list[T] = []
    missing: list[str] = []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            found.append(read(nvml, index))
        except LeftOut as error:
            missing.append(f"GPU {index} {error}")
        except nvml.NVMLError as error:  # one that fell off the bus must not hide the others
            missing.append(f"GPU {index}: {error}")
    return tuple(found), "; ".join(missing)


def _gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return Gpu(
        index=index,
        uuid=as_text(nvml.nvmlDeviceGetUUID(handle)),
        name=as_text(nvml.nvmlDeviceGetName(handle)),
        total_bytes=int(memory.total),
        free_bytes=int(memory.free),
    )


def as_text(value: str | bytes) -> str:
    """Older releases of the package give bytes."""
    return value.decode() if isinstance(value, bytes) else value
