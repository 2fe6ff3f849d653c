"""Where a worker in a pod gets its parameters: from the node's KeysManager, else from its bundle.

Made by `pod` and given to `worker.app.main`; implements `keystage.worker.supply.Supply`. The KeysManager
hands out a sealed memfd over the pods' socket, which is mapped read-only: on a CPU the stage is built from
it, on a GPU it goes through a prepared arena where its shape fits. Whatever stands against it (no socket, a
refusal, silence, other parameters) is a note, never an end: the worker then reads the bundle, and a stage of
an HTTP home is fetched for it first.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

from keystage.bundle import home
from keystage.bundle.api import Pipeline
from keystage.bundle.errors import BundleError
from keystage.keysmanager import packed_segment, segment
from keystage.keysmanager.api import Phase, Progress, Source, StageName
from keystage.keysmanager.client import Got, KeysManagerError, get_segment
from keystage.keysmanager.daemon_needs import home_of
from keystage.keysmanager.pod_api import PackedForm

if TYPE_CHECKING:
    from keystage.keysmanager.standby import Prepared
    from keystage.keysmanager.standby_supply import FilledSupply
    from keystage.models.base import AnyStage

log = logging.getLogger("keystage.keysmanager")

ANSWER_S = 10.0
"""From question to answer, for parameters that are in the KeysManager's memory."""
SLOWEST_LOAD_BYTES_S = 100e6
"""It gets a second more for each so many bytes: it may have to load them first."""


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where a pod's parameters may come from.

    Attributes:
        bundle: address of the bundle, as it is granted.
        folder: the bundle on this machine, or where its files are fetched to.
        socket: the KeysManager's, None: this node has none.
        is_warm: whether the kernels of this pipeline's stages ran already.
        is_cpu: whether the stages run on the CPU, where a packed form serves.
    """

    bundle: str
    folder: Path
    socket: Path | None
    is_warm: bool = False
    is_cpu: bool = False


class PodSupply:
    """Implements `Supply`.

    Args:
        place: where parameters may come from.
        prepared: what a parked pod made ready on its GPU, None: nothing.
        ready: called once, when the worker is.

    Attributes:
        source: where the parameters came from, empty: the worker read them itself.
        note: why not from the KeysManager.
    """

    def __init__(self, place: Place, prepared: Prepared | None, ready: Callable[[], None]) -> None:
        self._place = place
        self._prepared = prepared
        self._ready = ready
        self._asked: dict[int, Future[Got]] = {}
        self._open: list[Got] = []
        self._filled: FilledSupply | None = None
        self._fetched: list[Path] = []
        self.source: Source | str = ""
        self.note = ""

    def ask(self, pipeline: Pipeline, stages: Sequence[int], *, takes_packed: bool = True) -> None:
        """Asks the KeysManager ahead, in threads: imports go on meanwhile."""
        socket = self._place.socket
        if socket is None or pipeline.family == "emulated":
            return
        for index in stages:
            if index < len(pipeline.stages) and index not in self._asked:
                found: Future[Got] = Future()
                self._asked[index] = found
                packed = packed_segment.tag() if takes_packed and self._place.is_cpu else ""
                name = StageName(home_of(self._place.bundle), index)
                work = (socket, name, pipeline.stages[index].nbytes, packed, found)
                threading.Thread(target=_get, args=work, name=f"get-{index}", daemon=True).start()

    def stage(self, pipeline: Pipeline, index: int, device: str, dtype: str) -> AnyStage | None:
        """See `Supply.stage`."""
        got = self._given(pipeline, index)
        while got is not None:
            try:
                model = self._built(got, pipeline, index, device, dtype)
                if model is not None:
                    return model
                self._say(f"the arena of stage {index} could not be filled")
                break
            except (BundleError, segment.SegmentError) as error:
                got.claim.close()
                if got.segment.packed is None:
                    self._say(f"the KeysManager's segment of stage {index} cannot be used: {error}")
                    break
                log.warning("stage %d is made of raw bytes: %s", index, error)
                self.ask(pipeline, (index,), takes_packed=False)
                got = self._given(pipeline, index)
        self._drop_prepared()
        if home.is_http(self._place.bundle):
            try:
                path = home.fetch_stage(self._place.bundle, self._place.folder, pipeline, index)
            except BundleError as error:
                raise BundleError(f"{error} ({self.note})" if self.note else str(error)) from error
            self._fetched.append(path)
        return None

    def report(self, phase: Phase, note: str = "") -> None:
        """See `Supply.report`."""
        if self._filled is not None:
            self._filled.report(phase, note)
        for got in self._open:
            got.claim.channel.try_send(Progress(phase=phase, at_s=time.monotonic(), note=note))
        if phase == "mapped":
            while self._fetched:
                self._fetched.pop().unlink(missing_ok=True)  # it may lie in memory, which the stage has now
        elif phase == "ready":
            self._ready()

    def release(self) -> None:
        """See `Supply.release`; what still reads a segment closes its claim later."""
        if self._filled is not None:
            self._filled.release()

    # ------------------------------------------------------------ the KeysManager

    def _given(self, pipeline: Pipeline, index: int) -> Got | None:
        """The stage's segment; None, with a note: it is read from the bundle."""
        if self._place.socket is None:
            self._say("no KeysManager on this node (KEYSTAGE_KEYSMANAGER_PODS is not set)")
            return None
        self.ask(pipeline, (index,))
        try:
            got = self._asked.pop(index).result()
        except KeysManagerError as error:
            self._say(str(error))
            return None
        expected, given = pipeline.stages[index].identity, got.segment.parameters.identity
        if expected != given:
            os.close(got.fd)
            got.claim.close()
            self._say(f"stage {index} is {expected[:12]}, the KeysManager has {given[:12]}")
            return None
        return got

    def _built(self, got: Got, pipeline: Pipeline, index: int, device: str, dtype: str) -> AnyStage | None:
        if self._prepared is not None and self._fits(pipeline, index, device, dtype):
            model = self._filled_stage(got, pipeline, index, device, dtype)
        else:
            self._drop_prepared()
            model = self._mapped_stage(got, pipeline, index, device, dtype)
        if model is not None:
            self.source = got.segment.source
        return model

    def _fits(self, pipeline: Pipeline, index: int, device: str, dtype: str) -> bool:
        from keystage.keysmanager.shape import shape_of

        assert self._prepared is not None
        return self._prepared.shape == shape_of(pipeline, index, device, dtype)

    def _filled_stage(
        self, got: Got, pipeline: Pipeline, index: int, device: str, dtype: str
    ) -> AnyStage | None:
        """Through the arena that was prepared; it then belongs to the stage."""
        from keystage.keysmanager.api import Fill
        from keystage.keysmanager.channel import Channel, pair
        from keystage.keysmanager.registration import Registrations
        from keystage.keysmanager.standby_supply import FilledSupply

        prepared, self._prepared = self._prepared, None
        assert prepared is not None
        ours, theirs = pair()
        theirs.close()  # nobody registers segments ahead in a pod
        fill = Fill(replica="", module="keystage.worker.app", env={}, parameters=got.segment.parameters)
        filled = FilledSupply(
            prepared,
            fill,
            got.fd,
            got.claim.channel,
            Registrations(prepared.device, prepared.layout),
            Channel(ours),
        )
        filled.settle()
        self._filled = filled
        return filled.stage(pipeline, index, device, dtype)

    def _mapped_stage(self, got: Got, pipeline: Pipeline, index: int, device: str, dtype: str) -> AnyStage:
        """From the mapped segment; the claim closes when nothing here reads it any more."""
        from keystage.keysmanager.hold_stock import raw_tensors
        from keystage.models.loading import build_stage, warm_up

        parameters = got.segment.parameters
        if got.segment.packed is not None:
            return self._packed_stage(got, got.segment.packed, pipeline, index, dtype)
        try:
            segment.check_sealed(got.fd)
            raw = segment.map_readonly(got.fd, parameters.nbytes)
        finally:
            os.close(got.fd)
        if device != "cpu":
            from keystage.keysmanager.device_copy import load_stage_from_segment

            model = load_stage_from_segment(pipeline, index, raw, device, dtype, unmapped=got.claim.close)
        else:
            mapped = weakref.ref(raw.obj)
            model = build_stage(pipeline, index, raw_tensors(parameters, raw), device, dtype)
            del raw
            gc.collect()  # views of the mapping may hang in cycles
            if mapped() is None:
                got.claim.close()
            else:
                self._open.append(got)
        if not self._place.is_warm:
            warm_up(model)
        return model

    def _packed_stage(
        self, got: Got, form: PackedForm, pipeline: Pipeline, index: int, dtype: str
    ) -> AnyStage:
        """On the pages that a holder has packed, which all processes of the node share; kept for life."""
        from keystage.models.loading import warm_up

        try:
            model = packed_segment.PackedStage(got.fd, form).build(pipeline, index, dtype)
        finally:
            os.close(got.fd)
        self._open.append(got)
        if not self._place.is_warm:
            warm_up(model)
        return model

    def _drop_prepared(self) -> None:
        """Gives back what was made ready for another shape class."""
        if self._prepared is None:
            return
        self._prepared = None
        gc.collect()
        import torch

        torch.cuda.empty_cache()

    def _say(self, note: str) -> None:
        log.warning("parameters are read from the bundle: %s", note)
        self.note = self.note or note


def _get(socket: Path, name: StageName, nbytes: int, packed: str, found: Future[Got]) -> None:
    """Asks for one segment, in a thread."""
    limit_s = ANSWER_S + nbytes / SLOWEST_LOAD_BYTES_S
    try:
        found.set_result(get_segment(socket, name, limit_s, packed))
    except BaseException as error:  # noqa: BLE001  # whoever waits for it raises it
        found.set_exception(error)
