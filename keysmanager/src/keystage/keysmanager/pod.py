"""The program of a stage pod: a worker from the start, or parked until it is told which.

    python -m keystage.keysmanager.pod

    KEYSTAGE_STAGES given:  imports while the KeysManager is asked, then runs the worker
    KEYSTAGE_PARKED=1:      imports, prepares, answers probes; POST /_/activate makes it the worker,
                            in this process and on the same port

It may be process 1 of a container: it reaps what is handed to it, and has a handler for SIGTERM from its
first line on, since the kernel gives process 1 no default one. While there is nothing to lose SIGTERM ends
it at once, whatever it computes; a worker drains. Exit codes: 0 ended by SIGTERM or drained, 2 bad
configuration, bundle or address, 1 a bug.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING

from pydantic import ValidationError

from keystage.bundle import home, store
from keystage.bundle.errors import BundleError, SplitError
from keystage.keysmanager import pod_prepare
from keystage.keysmanager.pod_api import Activated, Activation
from keystage.keysmanager.pod_config import PodConfig
from keystage.keysmanager.pod_face import PodFace
from keystage.wire.bearer import bearer_from
from keystage.wire.endpoints import EndpointError, listen
from keystage.wire.errors import WireError
from keystage.worker import http
from keystage.worker.config import parse_stages
from keystage.worker.executor import StageError

if TYPE_CHECKING:
    from pathlib import Path

    from keystage.bundle.api import Pipeline
    from keystage.keysmanager.pod_supply import PodSupply
    from keystage.keysmanager.standby import Prepared

log = logging.getLogger("keystage.keysmanager")


class _End:
    """Ends this process on SIGTERM, even while it computes, until there is something to lose."""

    def __init__(self) -> None:
        self._is_over = False
        read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._handle)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # Nothing here waits for a child; orphans that are handed to process 1 are reaped by the kernel.
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        threading.Thread(target=self._watch, args=(read,), name="signals", daemon=True).start()

    def disarm(self) -> None:
        """From now on the worker's own handler decides."""
        self._is_over = True

    def _handle(self, *_: object) -> None:
        os._exit(0)

    def _watch(self, fd: int) -> None:
        """The interpreter runs a handler between two of its own steps only: a long call would hold it up."""
        while numbers := os.read(fd, 64):
            if signal.SIGTERM in numbers and not self._is_over:
                os._exit(0)


def main() -> int:
    """Runs one stage pod until it is drained or told to end; returns the exit code."""
    end = _End()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        config = PodConfig()  # type: ignore[call-arg]  # filled from the environment
        face = PodFace(bearer_from(None, config.wire_key_file if config.parked else None))
        http.serve(face, listen(config.http))
        folder, pipeline = _described(config)
        run = _parked if config.parked else _fresh
        return run(config, face, end, folder, pipeline)
    except (
        ValidationError,
        ValueError,
        WireError,
        EndpointError,
        BundleError,
        SplitError,
        StageError,
    ) as error:
        print(f"keystage pod: {error}", file=sys.stderr)  # noqa: T201
        return 2


def _described(config: PodConfig) -> tuple[Path, Pipeline]:
    """The bundle's folder on this machine, and its description."""
    folder = home.local_folder(config.bundle, home.folder_in(config.run, config.bundle))
    return folder, store.load(folder)


def _fresh(config: PodConfig, face: PodFace, end: _End, folder: Path, pipeline: Pipeline) -> int:
    """A pod whose stages were given: nothing is prepared that it would not use."""
    from keystage.keysmanager.pod_supply import Place, PodSupply

    place = Place(config.bundle, folder, config.keysmanager_pods, is_cpu=config.device == "cpu")
    supply = PodSupply(place, None, end.disarm)
    if config.has_torch:
        supply.ask(pipeline, parse_stages(config.stages))
    pod_prepare.load_program(config)
    return _work(folder, supply, face)


def _parked(config: PodConfig, face: PodFace, end: _End, folder: Path, pipeline: Pipeline) -> int:
    """Prepares and waits; then becomes what it is told."""
    pod_prepare.load_program(config)
    prepared = pod_prepare.prepare(config, pipeline)
    face.prepared()
    log.info("parked for %s on %s", pipeline.name, config.device)
    activation = face.wait()
    try:
        return _activated(activation, config, face, end, (folder, pipeline), prepared)
    except (ValidationError, ValueError, BundleError) as error:
        face.failed(str(error))
        raise


def _activated(
    activation: Activation,
    parked: PodConfig,
    face: PodFace,
    end: _End,
    described: tuple[Path, Pipeline],
    prepared: Prepared | None,
) -> int:
    from keystage.keysmanager.pod_supply import Place, PodSupply

    os.environ.pop("KEYSTAGE_PARKED", None)
    os.environ.update(activation.env)
    config = PodConfig()  # type: ignore[call-arg]  # the environment is the worker's by now
    folder, pipeline = described if config.bundle == parked.bundle else _described(config)

    def ready() -> None:
        end.disarm()
        phases = face.phases(time.time() - time.monotonic())
        face.activated(Activated(via="standby", source=supply.source, note=supply.note, phases=phases))

    is_warm = (config.dtype, config.device, config.bundle) == (parked.dtype, parked.device, parked.bundle)
    place = Place(config.bundle, folder, config.keysmanager_pods, is_warm, config.device == "cpu")
    supply = PodSupply(place, prepared, ready)
    if config.has_torch:
        supply.ask(pipeline, parse_stages(config.stages))
    log.info("becomes %s: stages %s", activation.function, config.stages)
    return _work(folder, supply, face)


def _work(folder: Path, supply: PodSupply, face: PodFace) -> int:
    """Runs the worker; its bundle is the one on this machine from now on."""
    from keystage.worker import app

    os.environ["KEYSTAGE_BUNDLE"] = folder.absolute().as_uri()
    return app.main(supply, face)


if __name__ == "__main__":
    code = main()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # its reader is gone
            stream.flush()
    os._exit(code)  # everything is closed that matters; tearing down torch and a device takes seconds
