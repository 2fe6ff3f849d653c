"""A worker whose stages run as spans on the CPU, under Triton's interpreter, and hand over by a lane.

`python -m support.lane_worker` is `keystage.worker.app` but for two things that need a GPU: what a decode
step runs on (the same kernels, interpreted, nothing captured) and the driver of the lane (memory that
other processes map is a memfd). Everything between is the real thing.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from pathlib import Path

import torch

from keystage.bundle.api import Pipeline
from keystage.worker import app, cuda_executor
from keystage.worker.config import WorkerConfig
from keystage.worker.device_lane import Arena, DeviceLane, LaneError
from keystage.worker.executor import Executor, Handoff
from keystage.worker.supply import Supply

HANDLE = b"on the host "


class HostDriver:
    """A lane's driver where the device's memory is the host's."""

    def __init__(self) -> None:
        self.mapped: dict[int, object] = {}
        self.pinned: dict[int, int] = {}

    def copy(self, target: int, source: int, nbytes: int) -> None:
        ctypes.memmove(target, source, nbytes)

    def settle(self) -> None:
        pass

    def map(self, handle: bytes) -> int:
        if not handle.startswith(HANDLE):
            raise LaneError(f"handle {handle!r} is none of this driver")
        pid, fd = handle.removeprefix(HANDLE).split()
        try:
            opened = os.open(f"/proc/{int(pid)}/fd/{int(fd)}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise LaneError(str(error)) from error
        whole = mmap.mmap(opened, os.fstat(opened).st_size)
        os.close(opened)
        owner = ctypes.c_char.from_buffer(whole)
        address = ctypes.addressof(owner)
        self.mapped[address] = owner
        return address

    def unmap(self, address: int) -> None:
        del self.mapped[address]

    def pin(self, address: int, nbytes: int) -> None:
        assert address not in self.pinned
        self.pinned[address] = nbytes

    def unpin(self, address: int) -> None:
        del self.pinned[address]

    def arena(self, nbytes: int) -> Arena:
        fd = os.memfd_create("arena")
        os.ftruncate(fd, nbytes)
        owner = ctypes.c_char.from_buffer(mmap.mmap(fd, nbytes))
        return Arena(ctypes.addressof(owner), nbytes, HANDLE + f"{os.getpid()} {fd}".encode(), owner)


def open_lane(_device: torch.device, nbytes: int, handoff: Handoff) -> DeviceLane:
    """As `cuda_lane.open_lane`."""
    driver = HostDriver()
    arena = driver.arena(nbytes) if handoff == "auto" else None
    return DeviceLane(driver, arena, is_pinning=handoff != "pageable")


def executor(
    config: WorkerConfig, folder: Path, pipeline: Pipeline, stages: tuple[int, ...], supply: Supply | None
) -> tuple[Executor, str]:
    """As `app._executor` where there is a GPU."""
    slots = config.slots or 4
    return cuda_executor.CudaExecutor(
        folder, pipeline, stages, "cpu", pipeline.dtype, 1, supply, config.kv_budget_bytes, slots
    ), "cuda:0"


if __name__ == "__main__":
    cuda_executor.open_lane = open_lane
    app._executor = executor
    sys.exit(app.main())
