"""Memory for a fork's ring, made while its CUDA context is, which takes 0.35 s and waits for nobody.

Begun by `hold_supply` as soon as the child knows its device, used by `device_copy`. Pages of 4 KiB are
pinned at a third of the speed of large ones: where a segment has such, its copy is staged through a ring
(12 lanes: 25 GB/s beside a rehearsal, H200, 16 cores, where pinning in place reached 9 to 17).
"""

from __future__ import annotations

import logging
import threading

from keystage.keysmanager import pinning
from keystage.keysmanager.mapped_pages import has_huge_pages
from keystage.keysmanager.pinning import Ring, RingMemory
from keystage.keysmanager.segment import as_tensor
from keystage.keysmanager.segment_copy import STAGED_LANES, STAGED_LANES_SMALL_PAGES
from keystage.wire.cuda_driver import CudaError, Driver

log = logging.getLogger("keystage.keysmanager")


class RingAhead:
    """Begins at once, in a thread.

    Args:
        view: the segment, mapped shared and read-only.
    """

    def __init__(self, view: memoryview) -> None:
        self._lanes = min(pinning.lanes(), STAGED_LANES)
        self._memory: RingMemory | None = None
        self._thread = threading.Thread(target=self._run, args=(view,), name="ring-ahead", daemon=True)
        self._thread.start()

    def ring(self) -> Ring | None:
        """A ring, owned by the caller; None: copying in place is faster here, or there was one already.

        The context is current in the calling thread.
        """
        self._thread.join()
        memory, self._memory = self._memory, None
        if memory is None:
            return None
        try:
            return Ring(Driver(), self._lanes, memory)
        except CudaError as error:
            log.warning("a fork without a ring: %s", pinning.refusal(error, memory.nbytes))
            return None

    def _run(self, view: memoryview) -> None:
        if self._lanes < STAGED_LANES_SMALL_PAGES or has_huge_pages(as_tensor(view)):
            return
        try:
            self._memory = RingMemory(self._lanes)
        except CudaError as error:
            log.warning("a fork without a ring: %s", error)
