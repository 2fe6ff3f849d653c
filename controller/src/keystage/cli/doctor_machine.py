"""What `keystage doctor` asks of the machine it runs on: kernel, memory, GPU, Python.

Everything that can be tried is tried: memory is really sealed, not read off the kernel's version. Nothing
is left behind, torch is not imported, no CUDA context is made.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import sys
from pathlib import Path

from keystage.cli import doctor_gpu
from keystage.cli.doctor_report import Check, judged

AREA = "machine"
GIB = 1 << 30
SHM = Path("/dev/shm")  # noqa: S108  (it is looked at, not written)
LEAST_SHM_BYTES = 64 << 20
LEAST_MEMORY_BYTES = 1 * GIB
LEAST_DISK_BYTES = 1 * GIB
LEAST_DESCRIPTORS = 4096
THP = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


def checks(home: Path) -> list[Check]:
    """Everything about this machine.

    Args:
        home: state folder of `keystage up`.
    """
    gpus, has_gpu = doctor_gpu.checks()
    return [
        _python(),
        _seals(),
        _shm(),
        _memory(),
        _huge_pages(has_gpu=has_gpu),
        _memlock(has_gpu=has_gpu),
        _descriptors(),
        _cores(),
        *gpus,
        _disk(home),
    ]


def _python() -> Check:
    return judged(
        AREA,
        "Python",
        "3.11 or 3.12",
        platform.python_version(),
        "fail",
        "use another interpreter",
        is_met=(3, 11) <= sys.version_info[:2] < (3, 13),
    )


def _seals() -> Check:
    from keystage.keysmanager.segment import SegmentError, create

    kernel = f"kernel {platform.release()}"
    bound = "memory files whose seals refuse every write (Linux 5.1 or newer)"
    try:
        fd = create(1, "doctor", huge=False).seal()
    except (SegmentError, OSError) as error:
        return _unsealed(bound, f"{kernel}: {error}")
    try:
        os.pwrite(fd, b"x", 0)
    except OSError:
        return Check(area=AREA, level="ok", thing="seals", bound=bound, actual=kernel)
    finally:
        os.close(fd)
    return _unsealed(bound, f"{kernel}: a sealed file was written")


def _unsealed(bound: str, actual: str) -> Check:
    return Check(
        area=AREA,
        level="fail",
        thing="seals",
        bound=bound,
        actual=actual,
        advice="the KeysManager cannot share parameters safely: every replica loads its own",
    )


def _shm() -> Check:
    try:
        free = shutil.disk_usage(SHM).free
        is_writable = os.access(SHM, os.W_OK)
    except OSError as error:
        free, is_writable = 0, False
        actual = str(error.strerror)
    else:
        actual = f"{free >> 20} MiB free{'' if is_writable else ', not writable'}"
    return judged(
        AREA,
        str(SHM),
        f"writable, {LEAST_SHM_BYTES >> 20} MiB (parameters and activations are in memory files, not there)",
        actual,
        "warn",
        "libraries that use it fail with a bus error: --shm-size, or an emptyDir of medium Memory",
        is_met=is_writable and free >= LEAST_SHM_BYTES,
    )


def _memory() -> Check:
    from keystage.keysmanager import memory

    bound = f"{LEAST_MEMORY_BYTES >> 20} MiB below 85 % of the limit"
    try:
        seen = memory.read()
    except memory.MemoryUnreadable as error:
        return Check(
            area=AREA,
            level="warn",
            thing="host memory",
            bound=bound,
            actual=str(error),
            advice="the KeysManager needs KEYSTAGE_KEYSMANAGER_MEMORY",
        )
    left = seen.budget_bytes - seen.used_bytes
    return judged(
        AREA,
        "host memory",
        bound,
        f"{left >> 20} MiB of {seen.limit_bytes >> 20} ({seen.origin})",
        "warn",
        "key stages are not kept in memory; their replicas start from disk",
        is_met=left >= LEAST_MEMORY_BYTES,
    )


def _huge_pages(*, has_gpu: bool) -> Check:
    try:
        mode = next((word for word in THP.read_text().split() if word.startswith("[")), "[unknown]").strip(
            "[]"
        )
    except OSError as error:
        mode = f"unknown ({error.strerror})"
    free = _free_huge_pages()
    return judged(
        AREA,
        "huge pages",
        "shmem_enabled advise, within_size or always, or free 2 MiB pages; of use with a GPU",
        f"shmem_enabled {mode}, {free} pages of 2 MiB free",
        "warn",
        "5 GB take 0.6 s to register instead of 0.13 s: "
        "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled",
        is_met=not has_gpu or free > 0 or mode in ("advise", "within_size", "always", "force"),
    )


def _free_huge_pages() -> int:
    try:
        return int(Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages").read_text())
    except (OSError, ValueError):
        return 0


def _memlock(*, has_gpu: bool) -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    actual = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft >> 10} KiB"
    return judged(
        AREA,
        "RLIMIT_MEMLOCK",
        "unlimited, or as large as the largest stage; of use with a GPU",
        actual,
        "warn",
        "pinning may be refused, and parameters are copied from pageable memory, at a fifth of the speed: "
        "ulimit -l unlimited, LimitMEMLOCK=infinity, docker run --ulimit memlock=-1",
        is_met=not has_gpu or soft == resource.RLIM_INFINITY or soft >= GIB,
    )


def _descriptors() -> Check:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    actual = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    return judged(
        AREA,
        "RLIMIT_NOFILE (hard)",
        f"at least {LEAST_DESCRIPTORS}",
        actual,
        "warn",
        "the gateway refuses connections beyond it: ulimit -n, LimitNOFILE",
        is_met=hard == resource.RLIM_INFINITY or hard >= LEAST_DESCRIPTORS,
    )


def _cores() -> Check:
    count = len(os.sched_getaffinity(0))
    return judged(
        AREA,
        "CPU cores",
        "2 or more",
        str(count),
        "warn",
        "gateway, router and one worker alone fill one core",
        is_met=count >= 2,
    )


def _disk(home: Path) -> Check:
    folder = next(path for path in (home.absolute(), *home.absolute().parents) if os.path.exists(path))  # noqa: PTH110  (it may be hidden)
    free = shutil.disk_usage(folder).free
    return judged(
        AREA,
        "disk",
        f"{LEAST_DISK_BYTES >> 20} MiB free",
        f"{free >> 20} MiB in {folder}",
        "warn",
        "bundles and logs need room",
        is_met=free >= LEAST_DISK_BYTES,
    )
