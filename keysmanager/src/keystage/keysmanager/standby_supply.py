"""What a filled standby gives the worker it becomes: a stage in an arena that is being filled.

Made by `standby` from a `Fill`; implements `keystage.worker.supply.Supply`. Whatever is mapped or pinned
is given back once the replica can work, since that takes 0.1 s and the process's memory map; the claim,
and the channel over which the standby registered segments, close after it and not before: until then
the daemon counts their memory as in use.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from typing import TYPE_CHECKING

from keystage.bundle.api import Pipeline
from keystage.keysmanager import segment
from keystage.keysmanager.api import Fill, Phase, Progress
from keystage.keysmanager.arena import Layout, check_equal, layout_of
from keystage.keysmanager.channel import Channel
from keystage.keysmanager.device_copy import Delivery
from keystage.keysmanager.registration import Registration, Registrations
from keystage.models.base import AnyStage
from keystage.models.loading import build_stage
from keystage.wire.cuda_driver import CudaError

if TYPE_CHECKING:
    from keystage.keysmanager.standby import Prepared

log = logging.getLogger("keystage.keysmanager")


class FilledSupply:
    """`keystage.worker.supply.Supply` of a standby that was told what to become.

    The arena is filled from the moment this is made; `stage` waits for the end of it.

    Args:
        prepared: what there is.
        fill: what to become.
        segment_fd: the segment; closed here.
        claim: owned from now on.
        registrations: what was registered ahead; owned from now on.
        control: closed when nothing is mapped any more.

    Raises:
        BundleError: the segment does not fit the arena.
        SegmentError: it is not sealed, or too small.
    """

    def __init__(
        self,
        prepared: Prepared,
        fill: Fill,
        segment_fd: int,
        claim: Channel,
        registrations: Registrations,
        control: Channel,
    ) -> None:
        self._prepared = prepared
        self._identity = fill.parameters.identity
        self._claim = claim
        self._control = control
        self._others = registrations
        self._ahead = registrations.take(self._identity)
        view, self._layout = _mapped(prepared, fill, segment_fd, self._ahead)
        assert prepared.arena is not None
        self._delivery = Delivery(
            view, self._layout, prepared.arena, self._identity, prepared.ring, ahead=self._ahead
        )
        self._is_handed_out = self._is_clearing = self._is_clear = self._is_released = False
        self._lock = threading.Lock()

    def settle(self) -> None:
        """Waits for lanes: they need the interpreter's lock, and a worker's start would hold it.

        What was registered ahead arrives without anybody's doing.
        """
        if self._ahead is None or not self._ahead.is_complete:
            self._delivery.join()

    def stage(self, pipeline: Pipeline, index: int, device: str, dtype: str) -> AnyStage | None:
        """See `Supply.stage`; once."""
        prepared = self._prepared
        if self._is_handed_out or pipeline.stages[index].identity != self._identity:
            return None
        if (device, dtype) != (prepared.device, prepared.dtype):
            return None
        self._is_handed_out = True
        try:
            self._delivery.wait()
        except CudaError as error:
            log.error("the arena could not be filled, the bundle is read instead: %s", error)
            return None
        stage = prepared.stage
        if stage is None:
            assert prepared.arena is not None
            stage = build_stage(pipeline, index, prepared.arena.views(self._layout), device, dtype)
            prepared.arena = None  # it was packed, or copied, into the stage
        return stage

    def report(self, phase: Phase, note: str = "") -> None:
        """See `Supply.report`; once work can come, all that the start needed is given back."""
        if phase == "ready" and not self._is_clearing:
            self._is_clearing = True
            threading.Thread(target=self._clear, name="clear", daemon=True).start()
        self._claim.try_send(Progress(phase=phase, at_s=time.monotonic(), note=note))

    def release(self) -> None:
        """See `Supply.release`; the claim goes when nothing is mapped any more."""
        with self._lock:
            self._is_released = True
            if self._is_clear:
                self._claim.close()

    def _clear(self) -> None:
        """Unpins what was registered ahead, then unmaps it, then gives back the others and the ring."""
        self._delivery.join()
        if self._ahead is not None:
            self._ahead.close()
        self._delivery.unmap(self._unmapped)

    def _unmapped(self) -> None:
        """The segment is not mapped any more."""
        self._others.close()
        self._control.close()
        with self._lock:
            self._is_clear = True
            if self._is_released:
                self._claim.close()
        ring, self._prepared.ring = self._prepared.ring, None
        if ring is not None:
            with contextlib.suppress(CudaError):  # the process ends, and its context with it
                ring.close()


def _mapped(
    prepared: Prepared, fill: Fill, segment_fd: int, ahead: Registration | None
) -> tuple[memoryview, Layout]:
    """The segment as it was mapped ahead, or now; closes the descriptor."""
    try:
        if ahead is not None and ahead.view is not None:
            return ahead.view, ahead.layout
        segment.check_sealed(segment_fd)
        view = segment.map_readonly(segment_fd, fill.parameters.nbytes)
    finally:
        os.close(segment_fd)
    layout = layout_of(view, fill.parameters.file)
    check_equal(prepared.layout, layout)
    return view, layout
