"""A stage function's process: configuration, HTTP thread, loading, then the engine loop.

Started as a program, it reads its bundle. Forked by a KeysManager, it gets a `Supply` with stages that
are in memory already and tells it how far the start is. Exit codes: 0 drained, 2 bad configuration,
bundle or address, 1 a bug.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import time
from pathlib import Path

import zmq
from pydantic import ValidationError

from keystage.bundle import home
from keystage.bundle.api import Pipeline
from keystage.bundle.errors import BundleError, SplitError
from keystage.bundle.store import load
from keystage.models.blocks import BLOCK_TOKENS
from keystage.wire.bearer import bearer_from
from keystage.wire.endpoints import EndpointError, listen, watch_lifeline
from keystage.wire.errors import WireError
from keystage.wire.events import EventLog
from keystage.wire.faults import faults_of
from keystage.wire.mailbox import Mailbox
from keystage.wire.opening import node_identity, open_worker
from keystage.wire.upkeep import one_heap
from keystage.worker.config import WorkerConfig, parse_stages, wave_tokens_on
from keystage.worker.engine import Engine
from keystage.worker.executor import (
    BatchBound,
    EmulatedExecutor,
    Executor,
    HasLane,
    StageError,
    parse_emulated,
)
from keystage.worker.http import WorkerHttp, serve
from keystage.worker.settings import EngineSettings, Status
from keystage.worker.states import WorkerState, advance
from keystage.worker.supply import Front, Phase, Supply

log = logging.getLogger("keystage.worker")

CPU_SLOTS = 16
"""Sessions of a looping worker: a CPU wave of 16 rows still takes well under a second."""
GPU_SLOTS = 64
"""Decode on a GPU is bound by reading the weights: 64 rows cost little more than one."""
_DTYPE_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "": ""}


class WorkerError(Exception):
    """A worker that cannot start as asked; names the setting and its value."""


class _Start:
    """Says how far the start is: to whoever asks over HTTP, and to the supply if there is one."""

    def __init__(self, status: Status, supply: Supply | None) -> None:
        self.status = status
        self.supply = supply
        status.start["begun"] = time.monotonic()

    def reached(self, phase: Phase) -> None:
        self.status.start[phase] = time.monotonic()
        if self.supply is not None:
            self.supply.report(phase)


def main(supply: Supply | None = None, front: Front | None = None) -> int:
    """Runs one worker until it is drained; returns the exit code.

    Args:
        supply: what is in memory already when the process was forked, None in a fresh one.
        front: answers HTTP already; None: the worker listens itself.
    """
    one_heap()
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        force=supply is not None,  # the output is another one since the fork
    )
    faulthandler.enable()  # where a signal ends it, the log has the place
    try:
        config = WorkerConfig()  # type: ignore[call-arg]  # filled from the environment
        watch_lifeline(config.lifeline_fd)
        status = Status()
        start = _Start(status, supply)
        bearer = bearer_from(config.internal_token_file, config.wire_key_file)
        face = WorkerHttp(status, config.pipeline, config.replica, bearer)
        if front is None:
            serve(face, listen(config.http))
        else:
            front.show(face, status)
    except (ValidationError, WireError, EndpointError) as error:
        faults = faults_of(error) if isinstance(error, ValidationError) else [str(error)]
        for fault in faults:
            print(f"keystage worker: {fault}", file=sys.stderr)  # noqa: T201
        if front is not None:
            front.failed("; ".join(faults))
        return 2
    signal.signal(signal.SIGTERM, lambda *_: _ask_drain(status))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        engine, mailbox = _load(config, start)
    except (BundleError, SplitError, WorkerError, StageError, ValueError, OSError, zmq.ZMQError) as error:
        status.state, status.reason = WorkerState.FAILED, str(error)
        print(f"keystage worker {config.replica}: {error}", file=sys.stderr)  # noqa: T201
        if front is not None:
            front.failed(str(error))
        return 2
    log.info("%s is ready: stages %s on %s", config.replica, config.stages, config.device)
    try:
        engine.run()
    except Exception as error:
        engine.say_last(f"{type(error).__name__}: {error}")
        mailbox.close(linger_s=0.5)
        raise
    mailbox.close(linger_s=0.5)
    return 0


def _ask_drain(status: Status) -> None:
    if status.state in (WorkerState.LOADING, WorkerState.WARMING):
        os._exit(0)  # nothing is held yet, and loading may take long
    status.drain = True


def _load(config: WorkerConfig, start: _Start) -> tuple[Engine, Mailbox]:
    started_s, status = time.monotonic(), start.status
    folder = home.local_folder(config.bundle, home.folder_in(config.run, config.bundle))
    pipeline = load(folder)
    stages = parse_stages(config.stages)
    if stages[-1] >= len(pipeline.stages):
        raise WorkerError(
            f"KEYSTAGE_STAGES={config.stages}: {pipeline.name} has stages 0..{len(pipeline.stages) - 1}"
        )
    if home.is_http(config.bundle):
        for stage in stages:
            home.fetch_stage(config.bundle, folder, pipeline, stage)
    executor, device = _executor(config, folder, pipeline, stages, start.supply)
    if pipeline.execution == "looping" and not executor.kv_blocks[1]:
        raise WorkerError(
            f"KEYSTAGE_KV_BYTES={config.kv_budget_bytes}: stages {config.stages} of {pipeline.name} need "
            f"more for one block of {BLOCK_TOKENS} positions"
        )
    start.reached("mapped")
    start.reached("listening")  # the socket is open since before; it counts with the parameters
    status.state = advance(status.state, WorkerState.WARMING)
    executor.first_forward()
    start.reached("forward")
    executor.warm_up()
    looping = pipeline.execution == "looping"
    max_batch = min(config.max_batch, executor.most_items if isinstance(executor, BatchBound) else 4096)
    events = EventLog(config.events, config.replica)
    wire = open_worker(f"ipc://{config.run}/{config.replica}.w", config.ring_bytes)
    settings = EngineSettings(
        replica=config.replica,
        stages=stages,
        routers=tuple(config.router.split(",")),
        bundle=pipeline.stages[stages[0]].identity,
        device=device,
        slots=config.slots or (_slots(device) if looping else 2 * max_batch),
        kv_tokens=executor.kv_blocks[1] * BLOCK_TOKENS if looping else 0,
        max_batch=max_batch,
        wave_tokens=wave_tokens_on(device, config.wave_tokens),
        drain_s=config.drain_s,
        node=node_identity(),
        pid=os.getpid(),
        is_copying=config.kv_copy,
    )
    lane = executor.open_lane(config.ring_bytes, config.handoff) if isinstance(executor, HasLane) else None
    if lane is not None:
        lane.ring_mapped(wire.ring.whole)
        wire.sources.watch_rings(lane)
    status.threads = config.threads
    engine = Engine(settings, pipeline, executor, wire.mailbox, wire.ring, events, status, wire.sources, lane)
    status.state = advance(status.state, WorkerState.READY)
    start.reached("ready")
    events.write(
        "ready", replica=config.replica, stages=stages, start_s=round(time.monotonic() - started_s, 4)
    )
    return engine, wire.mailbox


def _slots(device: str) -> int:
    return GPU_SLOTS if device.startswith("cuda") else CPU_SLOTS


def _executor(
    config: WorkerConfig, folder: Path, pipeline: Pipeline, stages: tuple[int, ...], supply: Supply | None
) -> tuple[Executor, str]:
    if config.device.startswith("emulated") and pipeline.execution != "program":
        device = parse_emulated(config.device)
        width = max(pipeline.stages[stage].activation_bytes for stage in stages)
        return EmulatedExecutor(device, len(pipeline.stages), width, pipeline.vocab_size), "emulated"
    if pipeline.family == "emulated":
        raise WorkerError(
            f"KEYSTAGE_DEVICE={config.device}: bundle {pipeline.name} holds no parameters and runs on "
            "emulated devices only"
        )
    if config.dtype not in _DTYPE_NAMES:
        raise WorkerError(f"KEYSTAGE_DTYPE={config.dtype}: expected one of fp32, bf16, fp16")
    if config.deterministic and (config.device.startswith("cuda") or pipeline.execution == "program"):
        raise WorkerError(
            f"KEYSTAGE_DETERMINISTIC=1 with KEYSTAGE_DEVICE={config.device} and {pipeline.name} "
            f"({pipeline.execution}): only looping and single-pass models on a CPU compute so"
        )
    if pipeline.execution == "single-pass":
        return _single_pass(config, folder, pipeline, stages, supply)
    if pipeline.execution == "program":
        return _program(config, folder, pipeline, stages, supply)
    from keystage.models.families import runs_as_span
    from keystage.worker.torch_executor import TorchExecutor, check_device

    device_name = check_device(config.device)
    dtype = _DTYPE_NAMES[config.dtype] or pipeline.dtype
    kv_bytes = config.kv_budget_bytes
    if device_name.startswith("cuda") and runs_as_span(pipeline.family):
        from keystage.worker.cuda_executor import CudaExecutor

        slots = config.slots or GPU_SLOTS
        return CudaExecutor(
            folder, pipeline, stages, device_name, dtype, config.threads, supply, kv_bytes, slots
        ), device_name
    executor = TorchExecutor(
        folder, pipeline, stages, device_name, dtype, config.threads, supply, kv_bytes,
        deterministic=config.deterministic,
    )  # fmt: skip
    return executor, device_name


def _single_pass(
    config: WorkerConfig, folder: Path, pipeline: Pipeline, stages: tuple[int, ...], supply: Supply | None
) -> tuple[Executor, str]:
    from keystage.worker.torch_executor import check_device
    from keystage.worker.torch_single import TorchSinglePass

    device = check_device(config.device)
    dtype = _DTYPE_NAMES[config.dtype] or pipeline.dtype
    return TorchSinglePass(
        folder, pipeline, stages, device, dtype, config.threads, supply, deterministic=config.deterministic
    ), device


def _program(
    config: WorkerConfig, folder: Path, pipeline: Pipeline, stages: tuple[int, ...], supply: Supply | None
) -> tuple[Executor, str]:
    if config.device.startswith("emulated"):
        raise WorkerError(
            f"KEYSTAGE_DEVICE={config.device}: {pipeline.name} is a stream program, whose modules run on "
            "cpu or cuda (one that sleeps in compute emulates a device)"
        )
    from keystage.streams.api import ProgramError
    from keystage.streams.graph_checks import GraphError
    from keystage.worker.torch_executor import check_device
    from keystage.worker.torch_program import TorchProgram

    device = check_device(config.device)
    try:
        executor = TorchProgram(folder, pipeline, stages, device, config.threads, supply, config.handler)
    except (ProgramError, GraphError) as error:
        raise WorkerError(f"program of {pipeline.name}: {error}") from error
    return executor, device


if __name__ == "__main__":
    sys.exit(main())
