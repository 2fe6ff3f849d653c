"""A KeysManager and replicas of it, as `keystage bench load` starts them: real processes throughout.

The benchmark stands where the local supervisor does: it owns the lifelines, is the subreaper to which
forked replicas are handed, and asks the daemon over its socket. A replica tells its own timeline
(`GET /_/start`, the machine's monotonic clock); `work` makes it compute and gives the output's hash.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import http.client
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from keystage.bench.frame import BenchError
from keystage.bench.load_bundles import STAGE
from keystage.bundle.dtypes import short_name
from keystage.bundle.store import load
from keystage.keysmanager.api import Fork, Forked, NodeStatus, StageName, StandbyEntry, Standbys
from keystage.keysmanager.client import KeysManagerClient, KeysManagerError
from keystage.local.adopted import subreaper
from keystage.wire.starts import START_PATH, StartReport

START_S = 300.0
"""Longest start: a fresh process, 5 GiB, a cold disk."""
REGISTER_BYTES = "KEYSTAGE_STANDBY_REGISTER_BYTES"
ALL_BUNDLES_BYTES = 64 << 30
"""A standby registers all bundles in rotation, however large they are asked for."""
POLL_S = 0.02
"""Times come from the replica's own clock; asking seldom leaves it alone."""
_COPIED = re.compile(r"copied (\d+) bytes in ([0-9.]+) s: (\S+)")


@dataclasses.dataclass(frozen=True, slots=True)
class Timeline:
    """Seconds from "wanted" to each point of a start.

    Attributes:
        forked_s: the process ran (and the daemon had answered).
        mapped_s: parameters were in its memory, or on its device.
        listening_s: its socket was up as well.
        forward_s: its first forward pass was done.
        ready_s: it took work.
    """

    forked_s: float
    mapped_s: float
    listening_s: float
    forward_s: float
    ready_s: float


class Replica:
    """One replica and the ends of it that its owner holds."""

    def __init__(self, pid: int, wanted_s: float, port: int, lifeline: int, log: Path, via: str) -> None:
        self.pid = pid
        self.via = via
        self.wanted_s = wanted_s
        self._forked_s = time.monotonic() - wanted_s
        self._port = port
        self._lifeline = lifeline
        self._log = log

    def timeline(self) -> Timeline:
        """Waits until it is ready.

        Raises:
            BenchError: it ended, or took too long; with the end of its log.
        """
        until_s = time.monotonic() + START_S
        while time.monotonic() < until_s:
            try:
                report = msgspec.json.decode(self._ask("GET", START_PATH), type=StartReport)
            except OSError:
                report = StartReport()
            if report.ready_s:
                ends = (report.mapped_s, report.listening_s, report.forward_s, report.ready_s)
                return Timeline(self._forked_s, *(end - self.wanted_s for end in ends))
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                break
            time.sleep(POLL_S)
        raise BenchError(f"replica {self.pid} ({self.via}) did not become ready:\n{self.output()[-2000:]}")

    def work(self, body: bytes) -> str:
        """Hash of what it answers to `POST /`."""
        return hashlib.sha256(self._ask("POST", "/", body)).hexdigest()

    def copied(self) -> tuple[int, float, str]:
        """(bytes, seconds, way) of its copy to the device; zeros where it made none."""
        found = _COPIED.search(self.output())
        return (int(found[1]), float(found[2]), found[3]) if found else (0, 0.0, "")

    def output(self) -> str:
        """What it has written."""
        return self._log.read_text(errors="replace")

    def end(self) -> None:
        """Ends it and waits for its end."""
        os.close(self._lifeline)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)

    def _ask(self, method: str, path: str, body: bytes | None = None) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=START_S)
        try:
            connection.request(method, path, body)
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        if answer.status != 200:
            raise BenchError(f"{method} {path} of replica {self.pid}: {answer.status} {content[:500]!r}")
        return content


class LoadWorld:
    """A daemon under a folder of its own; a context.

    Args:
        device: where replicas run.
        dtype: of the bundles.
        threads: of replicas on the CPU.
    """

    def __init__(self, device: str, dtype: str, threads: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ks-load-"))
        self.device = device
        self._dtype = dtype
        self._threads = threads
        self._run = self.folder / "run"
        self._run.mkdir(mode=0o700)
        self.client = KeysManagerClient(self._run / "k.sock")
        self._daemon: subprocess.Popen[bytes] | None = None
        self._life = os.pipe()
        self._number = 0

    def __enter__(self) -> Self:
        self._adopting = subreaper()
        self._adopting.__enter__()
        hidden = {} if self.device.startswith("cuda") else {"CUDA_VISIBLE_DEVICES": ""}
        with (self.folder / "daemon.log").open("wb") as log:
            self._daemon = subprocess.Popen(
                [sys.executable, "-m", "keystage.keysmanager.app"],
                env={
                    REGISTER_BYTES: str(ALL_BUNDLES_BYTES),
                    "KEYSTAGE_STANDBYS_PER_KEY_STAGE": "0",  # those that are measured are asked for
                    **os.environ,
                    **hidden,
                    "KEYSTAGE_KEYSMANAGER": str(self.client.path),
                    "KEYSTAGE_KEYSMANAGER_STATE": str(self.folder / "state"),
                    "KEYSTAGE_LIFELINE_FD": str(self._life[0]),
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(self._life[0],),
            )
        self._wait(lambda status: True, "the daemon answers")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._life[1])
        if self._daemon is not None:
            self._daemon.terminate()
            try:
                self._daemon.wait(30)
            except subprocess.TimeoutExpired:
                self._daemon.kill()
                self._daemon.wait()
        os.close(self._life[0])
        self._adopting.__exit__(None, None, None)
        shutil.rmtree(self.folder, ignore_errors=True)

    def fresh(self, bundle: Path) -> Replica:
        """A new process that reads its bundle."""

        def start(env: Mapping[str, str], lifeline: int, output: int, listening: int) -> tuple[int, str]:
            process = subprocess.Popen(
                [sys.executable, "-m", "keystage.worker.app"],
                env={**env, "KEYSTAGE_LIFELINE_FD": str(lifeline), "KEYSTAGE_HTTP": f"fd://{listening}"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(lifeline, listening),
            )
            process.returncode = 0  # reaped by `Replica.end`, not by the object
            return process.pid, "fresh"

        return self._start(bundle, start)

    def forked(self, bundle: Path, *, device: str = "", peer_gpu: bool = False) -> Replica:
        """A replica by the daemon, from whatever it has: a standby, a holder, else the fork server."""

        def start(env: Mapping[str, str], lifeline: int, output: int, listening: int) -> tuple[int, str]:
            own = {**env, "KEYSTAGE_DEVICE": device or self.device, "KEYSTAGE_PEER_GPU": str(int(peer_gpu))}
            wanted = Fork(
                replica=own["KEYSTAGE_REPLICA"],
                module="keystage.worker.app",
                env=own,
                wanted_at_s=time.monotonic(),
            )
            forked: Forked = asyncio.run(self.client.fork(wanted, lifeline, output, listening))
            return forked.pid, forked.via

        try:
            return self._start(bundle, start)
        except KeysManagerError as error:
            raise BenchError(f"{error}\n{self._log()}") from error

    def keep_standbys(
        self,
        bundle: Path,
        count: int,
        registered: Sequence[Path] | None = (),
        *,
        lifeline_fd: int | None = None,
    ) -> None:
        """Waits until so many are idle and warm.

        Args:
            bundle: with a stage of their class.
            count: how many.
            registered: bundles whose stages they must have registered ahead, or must have been refused;
                None: they register nothing.
            lifeline_fd: read end of their owner's pipe, None for this world's.
        """
        env = self._env(bundle, "standby")
        if registered is None:
            env[REGISTER_BYTES] = "0"
        wanted = Standbys(name=self.name(bundle), env=env, count=count)
        asyncio.run(self.client.standbys(wanted, self._life[0] if lifeline_fd is None else lifeline_fd))
        identities = {load(folder).stages[STAGE].identity for folder in registered or ()}

        def is_warm(standby: StandbyEntry) -> bool:
            return standby.state == "idle" and bool(standby.note or identities <= set(standby.registered))

        self._wait(
            lambda status: len(status.standbys) == count and all(map(is_warm, status.standbys)),
            f"{count} idle standbys with {len(identities)} segments registered",
        )

    def keep_standbys_on(self, bundle: Path, devices: Sequence[str], count: int = 1) -> None:
        """Waits until so many are idle on each of the devices; they register nothing."""
        for device in devices:
            env = {**self._env(bundle, "standby"), "KEYSTAGE_DEVICE": device, REGISTER_BYTES: "0"}
            wish = Standbys(name=self.name(bundle), env=env, count=count)
            asyncio.run(self.client.standbys(wish, self._life[0]))
        wanted = count * len(devices)
        self._wait(
            lambda status: (
                len(status.standbys) == wanted and all(one.state == "idle" for one in status.standbys)
            ),
            f"{wanted} idle standbys on {', '.join(devices)}",
        )

    def hold(self, bundles: list[Path]) -> None:
        """Keeps parameters of these bundles in host memory, and waits until they are there."""
        asyncio.run(self.client.key_stages([self.name(bundle) for bundle in bundles]))
        self._wait(
            lambda status: sum(holder.state == "ready" for holder in status.holders) >= len(bundles),
            f"{len(bundles)} holders",
        )

    @staticmethod
    def name(bundle: Path) -> StageName:
        """The stage with parameters."""
        return StageName(bundle.as_uri(), STAGE)

    def status(self) -> NodeStatus:
        """The daemon's."""
        return asyncio.run(self.client.status())

    def keepers(self) -> list[int]:
        """Process ids of the fork server and of the holders: what replicas are forked from."""
        assert self._daemon is not None
        (forkserver,) = _children(self._daemon.pid)
        return [forkserver, *_children(forkserver)]

    def _start(self, bundle: Path, start: object) -> Replica:
        assert callable(start)
        self._number += 1
        replica = f"load-{self._number}"
        log = self.folder / f"{replica}.log"
        read, write = os.pipe()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        listening = socket.create_server(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        env = self._env(bundle, replica)
        wanted_s = time.monotonic()
        try:
            pid, via = start(env, read, output, listening.fileno())
        except BaseException:
            os.close(write)
            raise
        finally:
            os.close(read)
            os.close(output)
            listening.close()
        return Replica(pid, wanted_s, port, write, log, via)

    def _env(self, bundle: Path, replica: str) -> dict[str, str]:
        env = {name: value for name, value in os.environ.items() if not name.startswith("KEYSTAGE_")}
        return env | {
            "KEYSTAGE_ROLE": "stage",
            "KEYSTAGE_PIPELINE": bundle.name,
            "KEYSTAGE_STAGES": str(STAGE),
            "KEYSTAGE_BUNDLE": bundle.as_uri(),
            "KEYSTAGE_ROUTER": f"ipc://{self._run}/router",
            "KEYSTAGE_DEVICE": self.device,
            "KEYSTAGE_DTYPE": short_name(self._dtype),
            "KEYSTAGE_THREADS": str(self._threads),
            "KEYSTAGE_REPLICA": replica,
            "KEYSTAGE_RUN": str(self._run),
            "KEYSTAGE_PEER_GPU": "0",
        }

    def _wait(self, is_so: object, what: str) -> None:
        assert callable(is_so)
        until_s = time.monotonic() + START_S
        while time.monotonic() < until_s:
            assert self._daemon is not None
            if self._daemon.poll() is not None:
                break
            with contextlib.suppress(KeysManagerError):
                if is_so(self.status()):
                    return
            time.sleep(POLL_S)
        raise BenchError(f"not within {START_S:.0f} s: {what}\n{self._log()}")

    def _log(self) -> str:
        return (self.folder / "daemon.log").read_text(errors="replace")[-3000:]


def _children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found]
