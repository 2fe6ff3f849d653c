"""A stage function's process: configuration, loading, HTTP thread, then the engine loop.

Exit codes: 0 drained, 2 bad configuration, bundle or address, 1 a bug.
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
from keystage.wire.mailbox import Mailbox, node_identity
from keystage.wire.ring import Ring
from keystage.worker.config import WorkerConfig, parse_stages
from keystage.worker.engine import Engine
from keystage.worker.executor import EmulatedExecutor, Executor, StageError, parse_emulated
from keystage.worker.http import WorkerHttp, serve
from keystage.worker.settings import EngineSettings, Status
from keystage.worker.states import WorkerState, advance

log = logging.getLogger("keystage.worker")

CPU_SLOTS = 16
"""Sessions of a looping worker: a CPU wave of 16 rows still takes well under a second."""
GPU_SLOTS = 64
"""Decode on a GPU is bound by reading the weights: 64 rows cost little more than one."""
_DTYPE_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "": ""}


class WorkerError(Exception):
    """A worker that cannot start as asked; names the setting and its value."""


def main() -> int:
    """Runs one worker until it is drained; returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        config = WorkerConfig()  # type: ignore[call-arg]  # filled from the environment
        watch_lifeline(config.lifeline_fd)
        status = Status()
        listening = listen(config.http)
    except (ValidationError, EndpointError) as error:
        print(f"keystage worker: {error}", file=sys.stderr)  # noqa: T201
        return 2
    serve(WorkerHttp(status, config.pipeline, config.replica), listening)
    signal.signal(signal.SIGTERM, lambda *_: _ask_drain(status))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        engine, mailbox = _load(config, status)
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


def _load(config: WorkerConfig, status: Status) -> tuple[Engine, Mailbox]:
    started_s = time.monotonic()
    folder = bundle_path(config.bundle)
    pipeline = load(folder)
    stages = parse_stages(config.stages)
    if stages[-1] >= len(pipeline.stages):
        raise WorkerError(
            f"KEYSTAGE_STAGES={config.stages}: {pipeline.name} has stages 0..{len(pipeline.stages) - 1}"
        )
    executor, device, kv_tokens = _executor(config, folder, pipeline, stages)
    status.state = advance(status.state, WorkerState.WARMING)
    executor.warm_up()
    looping = pipeline.execution == "looping"
    events = EventLog(config.events, config.replica)
    mailbox = Mailbox(f"ipc://{config.run}/{config.replica}.w")
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
    engine = Engine(settings, pipeline, executor, mailbox, Ring(config.ring_bytes), events, status)
    status.state = advance(status.state, WorkerState.READY)
    events.write(
        "ready", replica=config.replica, stages=stages, start_s=round(time.monotonic() - started_s, 4)
    )
    return engine, mailbox


def _slots(device: str) -> int:
    return GPU_SLOTS if device.startswith("cuda") else CPU_SLOTS


def _executor(
    config: WorkerConfig, folder: Path, pipeline: Pipeline, stages: tuple[int, ...]
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
    executor = TorchExecutor(folder, pipeline, stages, device_name, dtype, config.threads)
    return executor, device_name, config.kv_bytes // max(1, executor.kv_token_bytes)


if __name__ == "__main__":
    sys.exit(main())
