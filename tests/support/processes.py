"""Starts real router and worker processes of an emulated pipeline, and waits for what they answer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from keystage.bundle.api import emulated
from keystage.wire.endpoints import listen

WAIT_S = 60.0


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    """The first true value of `condition`, within a bound."""
    until_s = time.monotonic() + WAIT_S
    while time.monotonic() < until_s:
        value = condition()
        if value:
            return value
        time.sleep(0.01)
    raise AssertionError(f"{what}: not within {WAIT_S} s")


def get(url: str, body: bytes | None = None) -> tuple[int, bytes]:
    """(status, body); status 0 when nobody listens."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data=body), timeout=WAIT_S) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()
    except (urllib.error.URLError, ConnectionError):
        return 0, b""


class EmulatedFunction:
    """The processes of one emulated pipeline under a folder.

    Args:
        folder: short path for bundle, sockets and event logs.
        execution: `looping` or `single-pass`.
        stages: number of stages.
    """

    def __init__(self, folder: Path, execution: Any, stages: int) -> None:
        self.folder = folder
        (folder / "b").mkdir()
        (folder / "run").mkdir()
        (folder / "b" / "pipeline.json").write_bytes(
            msgspec.json.encode(emulated("em", stages, execution=execution))
        )
        self.started: list[subprocess.Popen[bytes]] = []

    def start(
        self, module: str, replica: str, *, wait: bool = True, pass_fds: tuple[int, ...] = (),
        prefix: tuple[str, ...] = (), **env: str,
    ) -> tuple[subprocess.Popen[bytes], str]:  # fmt: skip
        """Starts `keystage.<module>.app` with a listening socket; (process, its HTTP address).

        `prefix`: a command that takes this one, `prlimit` say.
        """
        listening = listen("127.0.0.1:0")
        port = listening.getsockname()[1]
        process = subprocess.Popen(
            [*prefix, sys.executable, "-m", f"keystage.{module}.app"],
            env={
                **os.environ,
                "KEYSTAGE_PIPELINE": "em",
                "KEYSTAGE_BUNDLE": f"file://{self.folder}/b",
                "KEYSTAGE_ROUTER": f"ipc://{self.folder}/run/router",
                "KEYSTAGE_RUN": f"{self.folder}/run",
                "KEYSTAGE_DEVICE": "emulated",
                "KEYSTAGE_REPLICA": replica,
                "KEYSTAGE_HTTP": f"fd://{listening.fileno()}",
                **env,
            },
            pass_fds=(listening.fileno(), *pass_fds),
            stderr=subprocess.PIPE if not wait else None,
        )
        listening.close()
        self.started.append(process)
        url = f"http://127.0.0.1:{port}"
        if wait:
            wait_for(lambda: get(f"{url}/_/ready")[0] == 200, f"{replica} ready")
        return process, url

    def stop(self) -> None:
        """Ends what still runs."""
        for process in self.started:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait(WAIT_S)
            if process.stderr is not None:
                process.stderr.close()
