"""Pods without Kubernetes: processes in cgroups that are named as a kubelet names them."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

from support.processes import WAIT_S, get, wait_for

from keystage.keysmanager.pod_api import TOKEN_PURPOSE
from keystage.wire.secret import create_secret, read_secret

TESTS = Path(__file__).resolve().parent.parent
_HIERARCHIES = ("unified", "pids", "freezer", "")
_numbers = itertools.count()


def cgroup_root() -> Path | None:
    """A cgroup hierarchy in which this process may make groups, None: there is none."""
    for name in _HIERARCHIES:
        root = Path("/sys/fs/cgroup") / name
        if (root / "cgroup.procs").exists() and os.access(root, os.W_OK):
            return root
    return None


class Cgroups:
    """Cgroups of pods below one `kubepods` of this test's own; removed by `close`."""

    def __init__(self) -> None:
        root = cgroup_root()
        assert root is not None
        self._top = root / f"test-{os.getpid()}-{next(_numbers)}"
        self._made: list[Path] = []

    def pod(self, uid: str = "") -> tuple[str, Path]:
        """A pod's UID and the cgroup of its container."""
        uid = uid or str(uuid.uuid4())
        folder = self._top / "kubepods" / "burstable" / f"pod{uid}" / "container"
        folder.mkdir(parents=True)
        self._made.append(folder)
        return uid, folder

    def close(self) -> None:
        """Removes them; their processes must have ended."""
        for folder in self._made:
            path = folder
            while path != self._top.parent:
                until_s = time.monotonic() + WAIT_S
                while path.exists() and not any(p.is_dir() for p in path.iterdir()):
                    try:
                        path.rmdir()
                    except OSError:  # the kernel lets go of ended processes a moment later
                        assert time.monotonic() < until_s, path
                        time.sleep(0.005)
                if path.exists():
                    break
                path = path.parent


def within(cgroup: Path, command: list[str]) -> list[str]:
    """The command, run by a process that has moved into a cgroup first."""
    return ["sh", "-c", f'echo $$ > {cgroup}/cgroup.procs; exec "$@"', "sh", *command]


def free_port() -> int:
    """A port of the loopback that nobody has now."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port


class Pod:
    """One stage pod as a process.

    Args:
        folder: gets its run folder and log.
        env: of the pod, over this process's own.
        cgroup: None: this process's.
        prefix: put before the command.
    """

    def __init__(
        self, folder: Path, env: Mapping[str, str], cgroup: Path | None = None, prefix: tuple[str, ...] = ()
    ) -> None:
        number = next(_numbers)
        self.url = f"http://127.0.0.1:{free_port()}"
        self.log = folder / f"pod-{number}.log"
        run = folder / f"r{number}"
        run.mkdir()
        command = [*prefix, sys.executable, "-m", "keystage.keysmanager.pod"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command if cgroup is None else within(cgroup, command),
                env={
                    **os.environ,
                    "KEYSTAGE_HTTP": self.url.removeprefix("http://"),
                    "KEYSTAGE_RUN": str(run),
                    "KEYSTAGE_REPLICA": f"pod-{number}",
                    "KEYSTAGE_NODE": f"node-{number}",
                    **env,
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def wait_ready(self) -> None:
        """Until its readiness probe succeeds."""
        wait_for(lambda: self.is_ready(), f"ready: {self.log.read_text()[-2000:]}")

    def is_ready(self) -> bool:
        """What the readiness probe says."""
        assert self.process.poll() is None, self.log.read_text()[-3000:]
        return get(f"{self.url}/_/ready")[0] == 200

    def end(self) -> tuple[int, float]:
        """SIGTERM; exit code and seconds until it ended."""
        begun_s = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(WAIT_S), time.monotonic() - begun_s

    def close(self) -> None:
        """Ends it, whatever it does."""
        self.process.kill()
        self.process.wait(WAIT_S)


class Key:
    """A deployment's secret in a folder, and the token that is derived from it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "key"
        create_secret(self.path)
        self.token = read_secret(self.path).derive(TOKEN_PURPOSE).hex()

    @property
    def headers(self) -> dict[str, str]:
        """Of internal HTTP."""
        return {"Authorization": f"Bearer {self.token}"}
