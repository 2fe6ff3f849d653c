"""The driver behind a worker's `device_lane` on a GPU, and the arena that others map.

Made by `app` for executors that hand over on the device. Copies go to torch's current stream, so they are
queued behind the compute they follow and before the compute that follows them.
"""

from __future__ import annotations

import logging

import torch

from keystage.wire.cuda_driver import HANDLE_BYTES, PORTABLE, CudaError, Driver
from keystage.worker.device_lane import Arena, DeviceLane, LaneError
from keystage.worker.executor import Handoff

log = logging.getLogger(__name__)

_OFFSET_BYTES = 8


class CudaLaneDriver:
    """A GPU as a lane sees it; belongs to the thread that made it.

    Args:
        device: the GPU; its context exists.

    Raises:
        CudaError: no driver, or no context.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._driver = Driver()
        self._bases: dict[int, int] = {}

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """See `LaneDriver.copy`."""
        stream = torch.cuda.current_stream(self._device).cuda_stream
        try:
            self._driver.copy_between(target, source, nbytes, stream)
        except CudaError as error:
            raise LaneError(f"copy of {nbytes} bytes on {self._device}: {error}") from error

    def settle(self) -> None:
        """See `LaneDriver.settle`."""
        try:
            self._driver.wait_stream(torch.cuda.current_stream(self._device).cuda_stream)
        except CudaError as error:
            raise LaneError(f"{self._device} is lost: {error}") from error

    def map(self, handle: bytes) -> int:
        """See `LaneDriver.map`."""
        if len(handle) != HANDLE_BYTES + _OFFSET_BYTES:
            raise LaneError(f"a handle of {len(handle)} bytes, {HANDLE_BYTES + _OFFSET_BYTES} expected")
        try:
            base = self._driver.ipc_open(handle[:HANDLE_BYTES])
        except CudaError as error:
            raise LaneError(f"not to be mapped on {self._device}: {error}") from error
        address = base + int.from_bytes(handle[HANDLE_BYTES:], "little")
        self._bases[address] = base
        return address

    def unmap(self, address: int) -> None:
        """See `LaneDriver.unmap`."""
        try:
            self._driver.ipc_close(self._bases.pop(address))
        except CudaError as error:
            raise LaneError(str(error)) from error

    def pin(self, address: int, nbytes: int) -> None:
        """See `LaneDriver.pin`."""
        try:
            self._driver.register(address, nbytes, PORTABLE)
        except CudaError as error:
            raise LaneError(f"not pinned: {error}") from error

    def unpin(self, address: int) -> None:
        """See `LaneDriver.unpin`."""
        try:
            self._driver.unregister(address)
        except CudaError as error:
            raise LaneError(str(error)) from error

    def arena(self, nbytes: int) -> Arena:
        """New device memory that others may map.

        Raises:
            LaneError: there is no room, or memory of this kind has no handle.
        """
        try:
            data = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError as error:
            raise LaneError(f"no room for {nbytes} bytes on {self._device}: {error}") from error
        address = data.data_ptr()
        try:
            base = self._driver.base_of(address)
            handle = self._driver.ipc_handle(base) + (address - base).to_bytes(_OFFSET_BYTES, "little")
        except CudaError as error:
            raise LaneError(f"memory of {self._device} has no handle: {error}") from error
        return Arena(address, nbytes, handle, data)


def open_lane(device: torch.device, nbytes: int, handoff: Handoff) -> DeviceLane | None:
    """The lane of a GPU; None: the driver cannot be reached, tensors go as from a CPU. Says so once.

    Args:
        device: the GPU; torch has used it.
        nbytes: size of the arena.
        handoff: best way allowed, see `device_lane`.
    """
    try:
        driver = CudaLaneDriver(device)
    except CudaError as error:
        log.warning("tensors pass through pageable memory: %s", error)
        return None
    arena: Arena | None = None
    if handoff == "auto":
        try:
            arena = driver.arena(nbytes)
        except LaneError as error:
            log.warning("tensors pass through host memory: %s", error)
    return DeviceLane(driver, arena, is_pinning=handoff != "pageable")
