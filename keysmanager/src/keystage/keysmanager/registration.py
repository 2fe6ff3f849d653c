"""Segments that a standby maps and pins before it is told which of them it becomes.

Below `standby`, which is told over its control channel what to register, step by step while it is idle
(`daemon_ahead` decides); `segment_copy` then copies from pinned memory with nothing to wait for but the
bus. Pinning adds no copy: the pages are those of the segment, and stay counted as its own. On the CPU
there is nothing to pin, the mapping alone is made ahead. This module must not copy.
"""

from __future__ import annotations

import contextlib
import mmap

import torch

from keystage.bundle.errors import BundleError
from keystage.keysmanager import pinning, segment
from keystage.keysmanager.api import Parameters
from keystage.keysmanager.arena import Layout, check_equal, layout_of
from keystage.wire.cuda_driver import CudaError, Driver

STEP_BYTES = 128 * 1024 * 1024
"""Pinned at once: 3 ms on huge pages, 14 ms on small ones, which is what a start may have to wait. A
multiple of every page size; a copy must not cross from one registration into the next."""


class RegistrationError(Exception):
    """A segment that cannot be registered ahead; says why."""


class Registration:
    """One segment, mapped, and pinned from its start on as far as the steps have come.

    Args:
        identity: of the parameters.
        view: the file, mapped shared and read-only; owned from now on.
        layout: of the file.
        driver: None: the device needs no pinned memory.

    Attributes:
        view: None once closed.
        chunks: (address, bytes) of each registration, in order from the mapping's start.
    """

    def __init__(self, identity: str, view: memoryview, layout: Layout, driver: Driver | None) -> None:
        self.identity = identity
        self.view: memoryview | None = view
        self.layout = layout
        self.chunks: list[tuple[int, int]] = []
        self._nbytes = len(view)
        self._address = segment.as_tensor(view).data_ptr()
        self._driver = driver

    @property
    def done_bytes(self) -> int:
        """Bytes from the file's start that need no pinning any more."""
        return self._nbytes if self._driver is None else sum(nbytes for _, nbytes in self.chunks)

    @property
    def is_complete(self) -> bool:
        """Whether all of it is registered."""
        return self.done_bytes == self._nbytes

    def step(self) -> None:
        """Pins the next chunk; nothing to do once complete.

        Raises:
            CudaError: the system refuses; what was pinned stays so until `close`.
        """
        if self._driver is None or self.is_complete:
            return
        begin = self.done_bytes
        nbytes = min(STEP_BYTES, self._nbytes - begin)
        whole_pages = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._driver.enter()
        self._driver.register(self._address + begin, whole_pages)
        self.chunks.append((self._address + begin, nbytes))

    def close(self) -> None:
        """Unpins all (0.1 s for 5 GiB) and unmaps with the last reference; from any thread, twice too."""
        if self._driver is not None and self.chunks:
            with contextlib.suppress(CudaError):  # the context ends: nothing is pinned then
                self._driver.enter()
            for address, _ in self.chunks:
                with contextlib.suppress(CudaError):
                    self._driver.unregister(address)
        self.chunks = []
        self.view = None


class Registrations:
    """All segments that one standby has registered.

    Args:
        device: full torch name; its context exists.
        layout: of the standby's arena; a segment that does not fit is refused.
    """

    def __init__(self, device: str, layout: Layout) -> None:
        self._device = torch.device(device)
        self._layout = layout
        self._driver: Driver | None = None
        self._held: dict[str, Registration] = {}

    def register(self, parameters: Parameters, segment_fd: int) -> Registration:
        """Maps a segment, or pins the next chunk of one that is mapped. The descriptor stays open.

        Raises:
            RegistrationError: it does not fit, or pinning is refused; nothing of it is kept.
        """
        identity = parameters.identity
        try:
            held = self._held.get(identity) or self._mapped(parameters, segment_fd)
            self._held[identity] = held
            held.step()
        except (BundleError, segment.SegmentError) as error:
            raise RegistrationError(f"{parameters.file} cannot be registered ahead: {error}") from error
        except CudaError as error:
            self.unregister(identity)
            raise RegistrationError(pinning.refusal(error, min(STEP_BYTES, parameters.nbytes))) from error
        return held

    def unregister(self, identity: str) -> None:
        """Unpins and unmaps a segment; nothing where there is none."""
        held = self._held.pop(identity, None)
        if held is not None:
            held.close()

    def take(self, identity: str) -> Registration | None:
        """Hands a registration over, complete or not; None: there is none."""
        return self._held.pop(identity, None)

    def close(self) -> None:
        """Unpins and unmaps all that nobody took."""
        for identity in list(self._held):
            self.unregister(identity)

    def _mapped(self, parameters: Parameters, segment_fd: int) -> Registration:
        driver = self._pinning_driver()
        segment.check_sealed(segment_fd)
        view = segment.map_readonly(segment_fd, parameters.nbytes)
        layout = layout_of(view, parameters.file)
        check_equal(self._layout, layout)
        return Registration(parameters.identity, view, layout, driver)

    def _pinning_driver(self) -> Driver | None:
        """None on the CPU.

        Raises:
            RegistrationError: this device pins no memory that is mapped read-only.
        """
        if self._device.type != "cuda":
            return None
        if self._driver is None:
            torch.cuda.set_device(self._device)
            driver = Driver()
            if not driver.can_register_read_only():
                raise RegistrationError(f"{self._device} cannot pin memory that is mapped read-only")
            self._driver = driver
        return self._driver
