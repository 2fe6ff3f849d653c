"""`keystage.worker.supply.Supply` over what a holder left in this process's memory.

Made in `child` and given to the worker. It hands out the stage once, tells phases over the claim, and
lets go of the host copy when the device has its own. What the memory lacks is asked of the daemon
(`fetch`): stages of a worker that has several, raw bytes that the holder has packed and closed.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable

from keystage.bundle.api import Pipeline
from keystage.keysmanager import segment
from keystage.keysmanager.api import Phase, Progress, StageName
from keystage.keysmanager.channel import Channel
from keystage.keysmanager.client import Claim, KeysManagerError, get_segment
from keystage.keysmanager.hold_stock import Stock, raw_tensors
from keystage.keysmanager.ring_ahead import RingAhead
from keystage.models.base import AnyStage, torch_dtype
from keystage.models.loading import build_stage

log = logging.getLogger("keystage.keysmanager")

_DEVICE_COPY = "keystage.keysmanager.device_copy"

Fetch = Callable[[int], tuple[Stock, Claim] | None]
"""Gets a stage's raw bytes and a claim on them."""


class StockSupply:
    """Implements `Supply`.

    Args:
        claim: the claim's consumer end; owned from now on.
        stock: None: nothing is in memory.
        is_private: whether the stage must have memory of its own.
        copies_to_device: False: parameters stay on the host, whatever the device.
        fetch: None: what is not in memory is left to the worker, which reads its bundle.
        device: where the worker will compute.
    """

    def __init__(
        self,
        claim: Channel,
        stock: Stock | None,
        *,
        is_private: bool = False,
        copies_to_device: bool = True,
        fetch: Fetch | None = None,
        device: str = "cpu",
    ) -> None:
        self.claim = claim
        self._stock = stock
        self._is_private = is_private
        self._copies_to_device = copies_to_device
        self._fetch = fetch
        self._told: set[str] = set()
        self._lock = threading.Lock()
        self._uses = 1 if stock is not None else 0
        self._is_released = False
        self._kept: list[Claim] = []
        self._ahead: RingAhead | None = None
        if stock is not None and stock.raw is not None and copies_to_device and device.startswith("cuda"):
            self._ahead = RingAhead(stock.raw)

    def stage(self, pipeline: Pipeline, index: int, device: str, dtype: str) -> AnyStage | None:
        """See `Supply.stage`."""
        if not 0 <= index < len(pipeline.stages):
            return None
        identity = pipeline.stages[index].identity
        model = None
        if self._stock is not None and self._stock.parameters.identity == identity:
            stock, self._stock = self._stock, None
            model = self._made(stock, pipeline, index, device, dtype, self._unmapped)
        if model is None and self._fetch is not None and (got := self._fetch(index)) is not None:
            stock, claim = got
            if stock.parameters.identity == identity:
                self._kept.append(claim)
                model = self._made(stock, pipeline, index, device, dtype, claim.close)
            else:
                claim.close()
        if model is not None:
            self.report("mapped")
        return model

    def report(self, phase: Phase, note: str = "") -> None:
        """See `Supply.report`; a phase is told once."""
        if phase not in self._told:
            self._told.add(phase)
            self.claim.try_send(Progress(phase=phase, at_s=time.monotonic(), note=note))

    def release(self) -> None:
        """See `Supply.release`; the claim goes when nothing is mapped any more, maybe never."""
        self._ahead = None  # its memory goes with it where no copy took it
        with self._lock:
            self._is_released = True
            if self._uses == 0:
                self.claim.close()

    def _unmapped(self) -> None:
        """The holder's memory is not in use here any more; called from any thread."""
        with self._lock:
            self._uses = 0
            if self._is_released:
                self.claim.close()

    def _made(
        self,
        stock: Stock,
        pipeline: Pipeline,
        index: int,
        device: str,
        dtype: str,
        unmapped: Callable[[], None],
    ) -> AnyStage | None:
        """The stage; calls `unmapped` once it uses nothing of the stock."""
        kind = torch_dtype(dtype)
        raw, built, memory = stock.raw, stock.built, stock.memory
        stock.raw = stock.built = stock.memory = None  # the forker's frames still know the stock
        mapped = None if raw is None else weakref.ref(raw.obj)
        is_host = device == "cpu" or not self._copies_to_device
        if (
            is_host
            and built is not None
            and built.dtype == kind
            and stock.is_built_for(pipeline, index)
            and not (self._is_private and memory is None)
        ):
            if not self._is_private or memory is None:
                return built
            memory.make_private()
            unmapped()
            return built
        if memory is not None:
            memory.leave()
        built = None
        model = None
        if raw is not None and is_host:
            model = self._from_raw(stock, raw, pipeline, index, dtype)
        elif raw is not None and importlib.util.find_spec(_DEVICE_COPY) is not None:
            load = importlib.import_module(_DEVICE_COPY).load_stage_from_segment
            found: AnyStage = load(pipeline, index, raw, device, kind, unmapped=unmapped, ahead=self._ahead)
            return found
        elif raw is not None:
            model = build_stage(pipeline, index, raw_tensors(stock.parameters, raw), device, kind)
        raw = None
        gc.collect()  # views of the mapping may hang in cycles
        if mapped is None or mapped() is None:
            unmapped()
        return model

    def _from_raw(
        self, stock: Stock, raw: memoryview, pipeline: Pipeline, index: int, dtype: str
    ) -> AnyStage:
        tensors = raw_tensors(stock.parameters, raw)
        if self._is_private:
            tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        return build_stage(pipeline, index, tensors, "cpu", dtype)


def fetch_from(socket_path: str, bundle: str) -> Fetch:
    """Asks the daemon of this node for raw bytes; what it refuses, the worker reads itself."""

    def fetch(index: int) -> tuple[Stock, Claim] | None:
        try:
            got = get_segment(socket_path, StageName(bundle, index))
        except KeysManagerError as error:
            log.warning("stage %d is read from the bundle: %s", index, error)
            return None
        try:
            segment.check_sealed(got.fd)
            raw = segment.map_readonly(got.fd, got.segment.parameters.nbytes)
        except segment.SegmentError as error:
            got.claim.close()
            log.warning("stage %d is read from the bundle: %s", index, error)
            return None
        finally:
            os.close(got.fd)
        return Stock(got.segment.parameters, raw), got.claim

    return fetch
