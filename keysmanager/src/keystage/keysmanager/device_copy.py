"""From a sealed segment to a running stage on a device, as fast as the bus allows.

Called in a forked replica (`load_stage_from_segment`) and by `standby` (`fill`). The segment is mapped
shared and read-only; its bytes go straight into one arena on the device, of which the parameters are
views. Four ways, best first, measured on an H200 (PCIe 5, 16 cores) with 5 GiB against 51.6 GB/s of a
copy from memory that was pinned before:

    registered-ahead   by a standby, while it was idle                 that of pinned memory
    staged      lanes copy into a ring that was pinned ahead            45 to 48 GB/s, any size of pages
    registered  one thread pins 64 MiB in place while the last 64 MiB   37 to 42 GB/s on huge pages,
                are copied (more threads wait for one another: 37)      16 to 19 GB/s on 4 KiB pages
    pageable    where the system pins nothing                           7 GB/s, with a warning

A fork makes a ring on pages of 4 KiB only (`ring_ahead`), and initialises cuBLAS and the kernels of the
stage while it copies. Afterwards pages are unregistered and dropped from this process's page
table. Nothing here loads from disk or checks hashes: `loader` did.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import torch
from torch.nn import functional

from keystage.bundle.api import Pipeline
from keystage.keysmanager import peer_gpu
from keystage.keysmanager.arena import Arena, Layout, layout_of
from keystage.keysmanager.device_config import DeviceConfig
from keystage.keysmanager.pinning import Ring
from keystage.keysmanager.registration import Registration
from keystage.keysmanager.ring_ahead import RingAhead
from keystage.keysmanager.segment_copy import Copied, Copy
from keystage.models import cuda_support
from keystage.models.base import AnyStage, torch_dtype
from keystage.models.decoder import DecoderStage
from keystage.models.loading import build_stage, rehearse

log = logging.getLogger("keystage.keysmanager")

_REHEARSAL_SLOT = -1
"""Sessions have numbers from 0 on."""
COPIED_LINE = "copied %d bytes in %.6f s: %s %s"
"""How a replica's log tells of a copy: bytes, seconds, way, note. `keystage bench load` reads it."""


def load_stage_from_segment(
    pipeline: Pipeline,
    index: int,
    view: memoryview,
    device: str | torch.device,
    dtype: str | torch.dtype,
    *,
    unmapped: Callable[[], None] | None = None,
    ahead: RingAhead | None = None,
) -> AnyStage:
    """Makes a stage from a segment that holds its file.

    Args:
        pipeline: description of the bundle.
        index: the stage.
        view: the whole file, mapped shared and read-only.
        device: where to (`cpu`, `cuda:0`).
        dtype: type to run in; another than the bundle's costs a conversion on the device.
        unmapped: called, from a thread, when this process maps the segment's pages no longer.
        ahead: what was made for the copy before there was a context, None: nothing.

    Raises:
        BundleError: the segment is no stage of this bundle.
        torch.OutOfMemoryError: the device has no room.
    """
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    kind = dtype if isinstance(dtype, torch.dtype) else torch_dtype(dtype)
    layout = layout_of(view, f"segment of {pipeline.name} stage {index}")
    arena = Arena(layout.data_bytes, str(device))
    # Converted parameters lie elsewhere, and this arena is freed: nobody may copy from it.
    is_kept = device.type == "cuda" and all(
        place.dtype == str(kind).removeprefix("torch.") for place in layout.places
    )
    ring = None if ahead is None or device.type != "cuda" else ahead.ring()
    delivery = Delivery(view, layout, arena, pipeline.stages[index].identity, ring, is_kept=is_kept)
    if not is_kept:
        if device.type == "cuda":
            warm_libraries(arena.data.device, kind)
        delivery.wait()
    stage = build_stage(pipeline, index, arena.views(layout), arena.data.device, kind, in_place(device))
    if is_kept:
        _rehearse(stage)
        delivery.wait()
    if ring is not None:
        threading.Thread(target=ring.close, name="unpin", daemon=True).start()
    delivery.unmap(unmapped)
    return stage


def _rehearse(stage: AnyStage) -> None:
    """Computes a token with whatever lies in the arena while it is being filled, and throws it away.

    A context loads a kernel when it is first used, 0.2 s for those of a layer: that time passes here
    beside the copy. A decoder computes as the span that a worker will make of it, but nothing is
    recorded, which no other thread may disturb. A prompt would take longer than the copy does.
    """
    if isinstance(stage, DecoderStage) and cuda_support.is_available():
        from keystage.models.cuda_span import CudaSpan

        CudaSpan([stage], 1).rehearse()
    else:
        rehearse(stage, _REHEARSAL_SLOT, 1)


def in_place(device: torch.device) -> Callable[[torch.Tensor], None] | None:
    """What `build_stage` is given so that it uses parameters on a device where they lie."""
    return None if device.type == "cpu" else _left_alone


def _left_alone(tensor: torch.Tensor) -> None:
    """A stage on a device makes nothing of its own that would have to be shared."""


class Delivery:
    """Parameters on their way into an arena, from another replica's GPU or else from the segment.

    Begins at once, in threads of its own; see `Copy`.

    Args:
        view: the file, mapped shared and read-only.
        layout: of the file.
        arena: the target.
        identity: of the parameters.
        ring: pinned memory made ahead, None: there is none.
        config: None: this process's environment.
        is_kept: whether the arena lives as long as this process, so that others may copy from it.
        ahead: what of this mapping was registered before, None: nothing.
    """

    def __init__(
        self,
        view: memoryview,
        layout: Layout,
        arena: Arena,
        identity: str,
        ring: Ring | None,
        config: DeviceConfig | None = None,
        *,
        is_kept: bool = True,
        ahead: Registration | None = None,
    ) -> None:
        self._config = config or DeviceConfig()
        self._identity = identity
        self._is_kept = is_kept
        self._arena = arena
        self._copy: Copy | None = None
        self._from_peer = self._peer_copy()
        if self._from_peer is None:
            self._copy = Copy(view, layout.data_start, arena, ring, ahead)

    def wait(self) -> Copied:
        """Returns when the device has all bytes, and offers them to others; see `Copy.wait`."""
        copied = self._from_peer or (self._copy.wait() if self._copy else None)
        assert copied is not None
        log.info(COPIED_LINE, copied.nbytes, copied.seconds, copied.way, copied.note)
        if self._arena.data.is_cuda and self._is_kept:
            self._offer()
        return copied

    def _offer(self) -> None:
        config = self._config
        if not (config.peer_gpu and config.run is not None and config.replica):
            return
        try:
            exported = peer_gpu.export(self._identity, self._arena.data[: self._arena.data_bytes])
            peer_gpu.publish(config.run, config.replica, exported)
        except (peer_gpu.PeerGpuError, OSError) as error:
            log.info("parameters are not offered to other replicas: %s", error)

    def join(self) -> None:
        """Waits until nothing is on its way any more."""
        if self._copy is not None:
            self._copy.join()

    def unmap(self, unmapped: Callable[[], None] | None = None) -> None:
        """See `Copy.unmap`."""
        if self._copy is not None:
            self._copy.unmap(unmapped)
        elif unmapped is not None:
            unmapped()

    def _peer_copy(self) -> Copied | None:
        config, data = self._config, self._arena.data
        if not (data.is_cuda and config.peer_gpu and config.run is not None):
            return None
        begin_s = time.perf_counter()
        found = peer_gpu.fill(config.run, self._identity, data)
        if found is None:
            return None
        note = f"from process {found[0].pid}"
        return Copied(found[0].nbytes, time.perf_counter() - begin_s, "peer-gpu", 1, note)


def warm_libraries(device: torch.device, dtype: torch.dtype) -> None:
    """Makes cuBLAS and the kernels of a layer ready, which takes 0.2 s in a new context."""
    square = torch.ones(128, 128, device=device, dtype=dtype)
    heads = square.view(1, 2, 64, 128)
    with torch.inference_mode():
        functional.silu(functional.linear(square, square))
        functional.linear(square[:1], square)
        functional.rms_norm(square, (128,), square[0], 1e-5)
        functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        functional.scaled_dot_product_attention(heads[:, :, :1], heads, heads)
    torch.cuda.current_stream(device).synchronize()
