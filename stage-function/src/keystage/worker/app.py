"""A stage function's process: configuration, HTTP thread, loading, then the engine loop.

Started as a program, it reads its bundle. Forked by a KeysManager, it gets a `Supply` with stages that
are in memory already and tells it how far the start is. Exit codes: 0 drained, 2 bad configuration,
bundle or address, 1 a bug.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from pathlib import Path

import zmq
from pydantic import ValidationError

from keystage.bundle.api import Pipeline
from keystage.bundle.errors import BundleError, SplitError
from keystage.bundle.store import bundle_path, load
from keystage.wire.endpoints import EndpointError, listen, watch_lifeline
from keystage.wire.events import EventLog
from keystage.wire.mailbox import Mailbox
from keystage.wire.opening import node_identity, open_worker
from keystage.worker.config import WorkerConfig, parse_stages
from keystage.worker.engine import Engine
from keystage.worker.executor import EmulatedExecutor, Executor, StageError, parse_emulated
from keystage.worker.http import WorkerHttp, serve
from keystage.worker.settings import EngineSettings, Status
from keystage.worker.states import WorkerState, advance
from keystage.worker.supply import Phase, Supply

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


def main(supply: Supply | None = None) -> int:
    """Runs one worker until it is drained; returns the exit code.

    Args:
        supply: what is in memory already when the process was forked, None in a fresh one.
    """
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        force=supply is not None,  # the output is another one since the fork
    )
    try:
        config = WorkerConfig()  # type: ignore[call-arg]  # filled from the environment
        watch_lifeline(config.lifeline_fd)
        status = Status()
        start = _Start(status, supply)
        listening = listen(config.http)
    except (ValidationError, EndpointError) as error:
        print(f"keystage worker: {error}", file=sys.stderr)  # noqa: T201
        return 2
    serve(WorkerHttp(status, config.pipeline, config.replica), listening)
    signal.signal(signal.SIGTERM, lambda *_: _ask_drain(status))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        engine, mailbox = _load(config, start)
    except (BundleError, SplitError, WorkerError, StageError, ValueError, OSError, zmq.ZMQError) as error:
        status.state, status.reason = WorkerState.FAILED, str(error)
        print(f"keystage worker {config.replica}: {error}", file=sys.stderr)  # noqa: T201
        return 2
    log.info("%s is ready: stages %s on %s", config.replica, config.stages, config.device)
    engine.run()
    mailbox.close(linger_s=0.5)
    return 0


def _ask_drain(status: Status) -> None:
    if status.state in (WorkerState.LOADING, WorkerState.WARMING):
        os._exit(0)  # nothing is held yet, and loading may take long
    status.drain = True


def _load(config: WorkerConfig, start: _Start) -> tuple[Engine, Mailbox]:
    started_s, status = time.monotonic(), start.status
    folder = bundle_path(config.bundle)
    pipeline = load(folder)
    stages = parse_stages(config.stages)
    if stages[-1] >= len(pipeline.stages):
        raise WorkerError(
            f"KEYSTAGE_STAGES={config.stages}: {pipeline.name} has stages 0..{len(pipeline.stages) - 1}"
        )
    executor, device, kv_tokens = _executor(config, folder, pipeline, stages, start.supply)
    start.reached("mapped")
    start.reached("listening")  # the socket is open since before; it counts with the parameters
    status.state = advance(status.state, WorkerState.WARMING)
    executor.first_forward()
    start.reached("forward")
    executor.warm_up()
    looping = pipeline.execution == "looping"
    events = EventLog(config.events, config.replica)
    wire = open_worker(f"ipc://{config.run}/{config.replica}.w", config.ring_bytes)
    settings = EngineSettings(
        replica=config.replica,
        stages=stages,
        routers=tuple(config.router.split(",")),
        bundle=pipeline.stages[stages[0]].identity,
        device=device,
        slots=config.slots or (_slots(device) if looping else 2 * config.max_batch),
        kv_tokens=kv_tokens if looping else 0,
        max_batch=config.max_batch,
        wave_tokens=config.wave_tokens,
        drain_s=config.drain_s,
        node=node_identity(),
        pid=os.getpid(),
    )
    status.threads = config.threads
    engine = Engine(settings, pipeline, executor, wire.mailbox, wire.ring, events, status, wire.sources)
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
) -> tuple[Executor, str, int]:
    if config.device.startswith("emulated"):
        device = parse_emulated(config.device)
        width = max(pipeline.stages[stage].activation_bytes for stage in stages)
        return EmulatedExecutor(device, len(pipeline.stages), width, pipeline.vocab_size), "emulated", 1 << 24
    if pipeline.family == "emulated":
        raise WorkerError(
            f"KEYSTAGE_DEVICE={config.device}: bundle {pipeline.name} holds no parameters and runs on "
            "emulated devices only"
        )
    if config.dtype not in _DTYPE_NAMES:
        raise WorkerError(f"KEYSTAGE_DTYPE={config.dtype}: expected one of fp32, bf16, fp16")
    from keystage.worker.torch_executor import TorchExecutor, check_device

    device_name = check_device(config.device)
    dtype = _DTYPE_NAMES[config.dtype] or pipeline.dtype
    executor = TorchExecutor(folder, pipeline, stages, device_name, dtype, config.threads, supply)
    return executor, device_name, config.kv_bytes // max(1, executor.kv_token_bytes)


if __name__ == "__main__":
    sys.exit(main())
