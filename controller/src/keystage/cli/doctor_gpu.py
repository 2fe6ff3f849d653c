"""What `keystage doctor` asks of GPUs, their driver, and the torch that is to use them.

NVML reads the driver's books without a CUDA context; torch's files are read, torch is not imported.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from pathlib import Path
from typing import Any

from keystage.cli.doctor_report import Check, judged

AREA = "machine"
GIB = 1 << 30
DEVICES = Path("/dev")
LEAST_TORCH = (2, 11)
_MISMATCH = (
    "the kernel's module and the library are of different driver releases, as after an upgrade: restart the "
    "machine, or unload the module (rmmod nvidia_uvm nvidia) and load it again"
)
_NO_LIBRARY = (
    "the driver's libnvidia-ml.so.1 is not here: install the driver; in a container, start it with "
    "--gpus all or runtime class nvidia, with NVIDIA_DRIVER_CAPABILITIES=compute,utility"
)
_CURES = (
    ("mismatch", _MISMATCH),
    ("driver not loaded", "load the kernel's module: modprobe nvidia, nvidia-smi tells whether it worked"),
    ("shared library not found", _NO_LIBRARY),
    ("nvidia-ml-py", "pip install 'keystage[keysmanager]'"),
    ("permission", "this user may not open /dev/nvidia*: add it to their group (ls -l /dev/nvidia0)"),
)
"""What to do, by a word of NVML's reason."""


def checks() -> tuple[list[Check], bool]:
    """Everything about GPUs, and whether there is one that works."""
    found = gpus()
    has_gpu = found.level == "ok" and not found.actual.startswith("none")
    made = [found]
    if has_gpu:
        made.append(driver(cuda_of_driver(), torch_cuda()))
    made.append(torch(has_gpu=has_gpu))
    return made, has_gpu


def gpus(nvml: Any = None) -> Check:
    """Whether every GPU that the kernel shows answers.

    Args:
        nvml: the module `pynvml`, None: imported if it is installed.
    """
    from keystage.keysmanager import inventory

    nodes = [path.name for path in DEVICES.glob("nvidia[0-9]*")]
    found, missing = inventory.gpus(nvml)
    shown = ", ".join(f"{gpu.name} ({gpu.total_bytes // GIB} GiB)" for gpu in found)
    if found:
        actual = f"{len(found)} of {max(len(found), len(nodes))}: {shown}"
    else:
        actual = f"none of {len(nodes)} ({missing})" if nodes else f"none ({missing})"
    is_met = not missing and len(found) >= len(nodes) if found else not nodes
    return judged(
        AREA,
        "GPUs",
        "every GPU that has a device node is shown by NVML",
        actual,
        "fail",
        cure(missing),
        is_met=is_met,
    )


def cure(reason: str) -> str:
    """What to do about NVML's reason."""
    unknown = "see dmesg, and what nvidia-smi says"
    known = next((text for word, text in _CURES if word in reason.lower()), unknown)
    return f"{known} ({reason})" if reason else known


def cuda_of_driver(nvml: Any = None) -> tuple[str, tuple[int, int]]:
    """Release of the driver, and the newest CUDA it runs; empty and (0, 0) where it does not tell.

    Args:
        nvml: see `gpus`.
    """
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return "", (0, 0)
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return "", (0, 0)
    try:
        release = nvml.nvmlSystemGetDriverVersion()
        cuda = int(nvml.nvmlSystemGetCudaDriverVersion_v2())
    except nvml.NVMLError:
        return "", (0, 0)
    finally:
        nvml.nvmlShutdown()
    return (release.decode() if isinstance(release, bytes) else release), (cuda // 1000, cuda % 1000 // 10)


def torch_cuda() -> tuple[int, int]:
    """CUDA that torch was built for, (0, 0) for a build without and where there is no torch."""
    try:
        file = Path(str(importlib.metadata.distribution("torch").locate_file("torch/version.py")))
        found = re.search(r"^cuda\b[^=]*=\s*['\"](\d+)\.(\d+)", file.read_text(), re.MULTILINE)
    except (importlib.metadata.PackageNotFoundError, OSError):
        return (0, 0)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def driver(runs: tuple[str, tuple[int, int]], built: tuple[int, int]) -> Check:
    """Whether the driver runs what torch was built for: any CUDA of the same first number, or an older one.

    Args:
        runs: see `cuda_of_driver`.
        built: see `torch_cuda`.
    """
    release, newest = runs
    needed = f"CUDA {built[0]}.x or newer: torch was built for {built[0]}.{built[1]}" if built[0] else "any"
    told = f"{release}, CUDA up to {newest[0]}.{newest[1]}" if release else "does not tell its release"
    return judged(
        AREA,
        "GPU driver",
        needed,
        told,
        "fail",
        f"upgrade the driver, or install a torch that was built for CUDA {newest[0]}",
        is_met=not release or newest[0] >= built[0],
    )


def torch(*, has_gpu: bool) -> Check:
    """Whether there is a torch that stages run on."""
    bound = "2.11 or newer where stages run, with CUDA where there is a GPU"
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return Check(area=AREA, level="ok", thing="torch", bound=bound, actual="none: no stages here")
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    is_met = numbers >= LEAST_TORCH and not (has_gpu and version.endswith("+cpu"))
    return judged(AREA, "torch", bound, version, "fail", "install another build of torch", is_met=is_met)
