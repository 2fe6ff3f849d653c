"""Which GPUs this node has and how much of their memory is free, as NVML tells it.

Asked by `daemon` for its status. NVML (`nvidia-ml-py`) reads the driver's books without a CUDA context,
so the daemon stays as forkable and as small as it was; this module must never touch CUDA. Without the
package, the library or the driver there are no GPUs, and a reason says which of them is missing.
"""

from __future__ import annotations

import importlib
from typing import Any

from keystage.keysmanager.api import Gpu


def gpus(nvml: Any = None) -> tuple[tuple[Gpu, ...], str]:
    """All GPUs in NVML's order (that of the PCI bus), and why some or all are missing.

    Args:
        nvml: the module `pynvml`; None: imported if it is installed.

    Returns:
        GPUs, and a reason that is empty where nothing is missing.
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
        return _read(nvml)
    except nvml.NVMLError as error:
        return (), f"no GPUs are seen: NVML: {error}"
    finally:
        nvml.nvmlShutdown()


def _read(nvml: Any) -> tuple[tuple[Gpu, ...], str]:
    found: list[Gpu] = []
    missing: list[str] = []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            found.append(_gpu(nvml, index))
        except nvml.NVMLError as error:  # one that fell off the bus must not hide the others
            missing.append(f"GPU {index}: {error}")
    return tuple(found), "; ".join(missing)


def _gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return Gpu(
        index=index,
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        name=_text(nvml.nvmlDeviceGetName(handle)),
        total_bytes=int(memory.total),
        free_bytes=int(memory.free),
    )


def _text(value: str | bytes) -> str:
    """Older releases of the package give bytes."""
    return value.decode() if isinstance(value, bytes) else value
