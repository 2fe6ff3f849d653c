"""A worker started ahead: everything exists but its parameters, which it gets with its name.

    fork server --fork--> standby: context, arena, KV pool, decode graph, pinned ring
    standby --Progress("ready")--> daemon      it is idle
    daemon --Register, Unregister--> standby   key stages are mapped and pinned ahead, and let go
    daemon --Fill + descriptors--> standby     it becomes a replica: fills its arena, and goes on as
                                               `keystage.worker.app` (or whatever program was
                                               wanted) with the stage in memory

Started through `child` with a supply that holds nothing but the claim, over which all this is said. The
daemon's end, or the owner's, ends an idle standby; a filled one hangs on its owner alone. On the CPU
the arena is private memory and the stage is built when it is full, since its matrices are packed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import time
from collections.abc import Sequence

import torch
from pydantic import ValidationError

from keystage.bundle.api import Pipeline
from keystage.bundle.errors import BundleError, SplitError
from keystage.bundle.store import bundle_path, load
from keystage.keysmanager import child, fork_child, pinning, segment
from keystage.keysmanager.api import Fill, Ok, Progress, Refused, Register, Registered, Spawned, Unregister
from keystage.keysmanager.arena import Arena, layout_for
from keystage.keysmanager.channel import Channel, ChannelError, Told
from keystage.keysmanager.device_copy import in_place, warm_libraries
from keystage.keysmanager.hold_supply import StockSupply
from keystage.keysmanager.pinning import Ring
from keystage.keysmanager.registration import RegistrationError, Registrations
from keystage.keysmanager.shape import shape_of
from keystage.keysmanager.standby_supply import FilledSupply
from keystage.models import cuda_support
from keystage.models.base import AnyStage, torch_dtype
from keystage.models.blocks import BLOCK_TOKENS
from keystage.models.decoder import DecoderStage
from keystage.models.families import family_named
from keystage.models.loading import build_stage, role_of, warm_up
from keystage.wire.cuda_driver import CudaError, Driver
from keystage.wire.endpoints import EndpointError, Lifeline, watch_lifeline
from keystage.worker.config import WorkerConfig, parse_stages
from keystage.worker.executor import StageError
from keystage.worker.torch_executor import check_device

log = logging.getLogger("keystage.keysmanager")

DESCRIPTORS = ("segment", "lifeline", "output", "HTTP socket", "claim")
"""What comes beside a `Fill`, in order."""
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "": ""}


class StandbyError(Exception):
    """A standby that cannot be made, or cannot become what it is told; names the two that differ."""


class Prepared:
    """Everything a worker of one shape class needs, but the parameters.

    Args:
        pipeline: description of a bundle with a stage of the class.
        index: that stage.
        device: full torch name.
        dtype: type to run in; must be the one the bundle is stored in.
        kv_bytes: bytes of KV state.

    Attributes:
        shape: the class.
        layout: of the parameters in the arena.
        arena: where they go.
        stage: reads the arena; None on the CPU until it is built.
        ring: pinned memory, None: the device has none, or nothing may be pinned.

    Raises:
        StandbyError: the type differs from the stored one.
        SplitError: unknown family.
    """

    def __init__(self, pipeline: Pipeline, index: int, device: str, dtype: str, kv_bytes: int) -> None:
        if dtype != pipeline.dtype:
            raise StandbyError(
                f"standby in {dtype}: {pipeline.name} is stored in {pipeline.dtype}, "
                "and an arena is used as it is filled"
            )
        self.device = device
        self.dtype = dtype
        self.shape = shape_of(pipeline, index, device, dtype)
        tensors = family_named(pipeline.family).stage_tensors(pipeline.config, role_of(pipeline, index))
        self.layout = layout_for({tensor.name: tensor.shape for tensor in tensors}, dtype)
        self.arena: Arena | None = Arena(self.layout.data_bytes, device)
        self.arena.data.zero_()  # pages exist, and warm-up computes with finite numbers
        self.stage: AnyStage | None = None
        self.ring: Ring | None = None
        if torch.device(device).type == "cuda":
            self._prepare_device(pipeline, index, self.arena, kv_bytes)

    def _prepare_device(self, pipeline: Pipeline, index: int, arena: Arena, kv_bytes: int) -> None:
        device = arena.data.device
        torch.cuda.set_device(device)
        stage = build_stage(pipeline, index, arena.views(self.layout), device, self.dtype, in_place(device))
        warm_libraries(device, torch_dtype(self.dtype))
        if isinstance(stage, DecoderStage) and cuda_support.is_available():
            from keystage.models.cuda_span import CudaSpan

            span = CudaSpan([stage], kv_bytes // (BLOCK_TOKENS * stage.kv_token_bytes))
            span.capture()
            stage = span
        warm_up(stage)
        self.stage = stage
        try:
            self.ring = Ring(Driver(), pinning.lanes())
        except CudaError as error:
            log.warning("standby without a ring: %s", pinning.refusal(error, pinning.RING_CHUNK_BYTES))


def main(supply: StockSupply) -> int:
    """Runs a standby, then the worker it becomes; returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        config = WorkerConfig()  # type: ignore[call-arg]  # filled from the environment
        first_owner = watch_lifeline(config.lifeline_fd)
        prepared = prepare(config)
    except (
        ValidationError, BundleError, SplitError, StageError, StandbyError, EndpointError, RuntimeError
    ) as error:  # fmt: skip
        print(f"keystage standby: {error}", file=sys.stderr)  # noqa: T201
        return 2
    control = supply.claim
    registrations = Registrations(prepared.device, prepared.layout)
    with contextlib.suppress(ChannelError):  # the daemon has ended: end of file follows
        control.send(Progress(phase="ready", at_s=time.monotonic(), note=prepared.shape))
    while (received := control.receive()) is not None:
        message, fds = received
        if isinstance(message, Fill):
            return _replica(prepared, registrations, control, message, fds, first_owner)
        answer = _answered(registrations, message, fds)
        for fd in fds:
            os.close(fd)
        with contextlib.suppress(ChannelError):
            control.send(answer)
    return 0


def _answered(registrations: Registrations, message: Told, fds: Sequence[int]) -> Registered | Ok | Refused:
    """Registers a step further, or lets go; anything else is refused. The descriptors stay open."""
    if isinstance(message, Unregister):
        registrations.unregister(message.identity)
        return Ok()
    if not isinstance(message, Register) or len(fds) != 1:
        what = f"{type(message).__name__} with {len(fds)} descriptors"
        return Refused(f"{what}: a standby takes Register with a segment, Unregister, and Fill")
    try:
        held = registrations.register(message.parameters, fds[0])
    except RegistrationError as error:
        return Refused(str(error), 409)
    return Registered(held.identity, held.done_bytes)


def _replica(
    prepared: Prepared,
    registrations: Registrations,
    control: Channel,
    fill: Fill,
    fds: Sequence[int],
    first_owner: Lifeline,
) -> int:
    """Lives on as what it was told to become; returns the exit code."""
    try:
        if len(fds) != len(DESCRIPTORS):
            raise StandbyError(f"Fill with {len(fds)} descriptors, needed are " + ", ".join(DESCRIPTORS))
        program = child.main_of(fill.module)
        filled = become(prepared, fill, fds, registrations, control)
        first_owner.release()  # the program watches the lifeline that came with the Fill
    except (StandbyError, BundleError, segment.SegmentError, CudaError, ImportError) as error:
        control.send(Refused(str(error), 409))
        return 1
    with contextlib.suppress(ChannelError):
        control.send(Spawned(os.getpid()))
    filled.settle()
    code: int = program(filled)
    return code


def prepare(config: WorkerConfig) -> Prepared:
    """Makes ready for the shape class of the stage that the environment names.

    Raises:
        StandbyError: it names several stages, or another type than the bundle's.
        BundleError, SplitError, StageError: the bundle or device cannot be used.
    """
    stages = parse_stages(config.stages)
    if len(stages) != 1:
        raise StandbyError(f"KEYSTAGE_STAGES={config.stages}: a standby is for one stage")
    if config.dtype not in _DTYPES:
        raise StandbyError(f"KEYSTAGE_DTYPE={config.dtype}: expected one of fp32, bf16, fp16")
    pipeline = load(bundle_path(config.bundle))
    dtype = _DTYPES[config.dtype] or pipeline.dtype
    return Prepared(pipeline, stages[0], check_device(config.device), dtype, config.kv_budget_bytes)


def become(
    prepared: Prepared, fill: Fill, fds: Sequence[int], registrations: Registrations, control: Channel
) -> FilledSupply:
    """Takes on a replica's name, environment and output, and begins to fill the arena.

    Args:
        prepared: what there is.
        fill: what to become.
        fds: see `DESCRIPTORS`; owned from now on.
        registrations: what was registered ahead; owned from now on.
        control: channel to the daemon, closed when no segment is mapped any more.

    Raises:
        BundleError, SegmentError: the segment does not fit.
    """
    segment_fd, lifeline, output, http, claim = fds
    env = {**fill.env, "KEYSTAGE_LIFELINE_FD": str(lifeline), "KEYSTAGE_HTTP": f"fd://{http}"}
    fork_child.replace_environment(env)
    fork_child.attach_output(output)
    os.close(output)
    fork_child.rename(f"ks:{fill.replica}")
    own = Channel(socket.socket(fileno=claim))
    return FilledSupply(prepared, fill, segment_fd, own, registrations, control)
