"""A real daemon in a process of its own, bundles of random bytes, and what /proc says of it all."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from pathlib import Path
from typing import Any

from keystage.bundle import store
from keystage.bundle.api import BUNDLE_VERSION, Pipeline, StageSpec
from keystage.bundle.hashing import file_chunks, identity
from keystage.keysmanager.api import CacheEntry, Fork, Forked, NodeStatus, StageName
from keystage.keysmanager.client import KeysManagerClient, KeysManagerError
from keystage.local.adopted import subreaper

TESTS = Path(__file__).resolve().parent.parent
WAIT_S = 60.0
REPLICA = "support.keysmanager_replica"
MB = 1_000_000


def write_bundle(folder: Path, name: str, sizes: list[int], seed: int) -> Pipeline:
    """A bundle whose stages hold random bytes: enough for whoever does not build a model."""
    folder.mkdir(parents=True, exist_ok=True)
    stages = []
    for index, nbytes in enumerate(sizes):
        file = f"stage-{index:02d}.safetensors"
        draft = folder / f".{file}.new"
        draft.write_bytes(random.Random(f"{seed}/{index}").randbytes(nbytes))
        chunks = file_chunks(draft)
        draft.replace(folder / file)
        stages.append(
            StageSpec(
                index, file, (index, index + 1), nbytes // 4, nbytes, chunks, identity(chunks, "float32"), 64
            )
        )
    edges = [(i, i + 1) for i in range(len(sizes) - 1)]
    pipeline = Pipeline(
        version=BUNDLE_VERSION, name=name, family="llama", execution="looping", dtype="float32", config={},
        stages=stages, edges=[*edges, (len(sizes) - 1, 0)], context_length=64, vocab_size=97, hidden_size=16,
        eos=[],
    )  # fmt: skip
    store.write(folder, pipeline)
    return pipeline


def name_of(folder: Path, stage: int = 0) -> StageName:
    """A stage of a bundle in a folder."""
    return StageName(folder.absolute().as_uri(), stage)


class Replica:
    """A replica this test owns: its lifeline, and the first line of its output."""

    def __init__(self, forked: Forked, lifeline: int, output: int) -> None:
        self.forked = forked
        self.pid = forked.pid
        self._lifeline = lifeline
        self._output = output

    async def line(self) -> str:
        """Its first line of output."""
        return await asyncio.wait_for(asyncio.to_thread(self._read), WAIT_S)

    def _read(self) -> str:
        text = b""
        while not text.endswith(b"\n"):
            block = os.read(self._output, 4096)
            if not block:
                return text.decode()
            text += block
        return text.decode().strip()

    @property
    def alive(self) -> bool:
        """Whether it runs (a zombie does not)."""
        return state_of(self.pid) not in ("", "Z")

    def kill(self) -> None:
        """SIGKILL."""
        os.kill(self.pid, signal.SIGKILL)
        self.reap()

    def end(self) -> None:
        """Cuts its lifeline and reaps it."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
            os.close(self._output)
            self._lifeline = self._output = -1
        self.reap()

    def reap(self) -> None:
        """It is this process's child by now: its end is awaited."""
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


class Node:
    """A daemon, its socket and its state, under one folder."""

    def __init__(self, folder: Path, **env: str) -> None:
        self.folder = folder
        self.socket = folder / "k.sock"
        self.client = KeysManagerClient(self.socket)
        self.env = env
        self.pass_fds: tuple[int, ...] = ()
        self.process: subprocess.Popen[bytes] | None = None
        self.replicas: list[Replica] = []
        self._number = 0
        self.log = folder / "daemon.log"

    async def start(self) -> None:
        """Starts the daemon and waits until it answers."""
        with self.log.open("ab") as log:
            self.process = self._popen(log, log)
        await self.wait(self._answers, "the daemon answers")

    def run_to_end(self) -> tuple[int, str]:
        """Starts a daemon that cannot go on; its exit code and standard error."""
        process = self._popen(subprocess.DEVNULL, subprocess.PIPE)
        _, error = process.communicate(timeout=WAIT_S)
        return process.returncode, error.decode()

    def _popen(self, output: Any, error: Any) -> subprocess.Popen[bytes]:
        paths = [str(TESTS), os.environ.get("PYTHONPATH", "")]
        return subprocess.Popen(
            [sys.executable, "-m", "keystage.keysmanager.app"],
            env={
                **os.environ,
                "PYTHONPATH": ":".join(filter(None, paths)),
                "KEYSTAGE_KEYSMANAGER": str(self.socket),
                "KEYSTAGE_KEYSMANAGER_STATE": str(self.folder / "state"),
                "KEYSTAGE_NODE": "node-a",
                **self.env,
            },
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=error,
            pass_fds=self.pass_fds,
        )

    async def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log.read_text()
        with contextlib.suppress(KeysManagerError):
            await self.client.status()
            return True
        return False

    async def wait(self, condition: Callable[[], Any], what: str, timeout_s: float = WAIT_S) -> Any:
        """The first true value of a (coroutine) function, within a bound."""
        until_s = time.monotonic() + timeout_s
        while True:
            value = condition()
            if asyncio.iscoroutine(value):
                value = await value
            if value:
                return value
            assert time.monotonic() < until_s, (
                f"not within {timeout_s} s: {what}\n{self.log.read_text()[-4000:]}"
            )
            await asyncio.sleep(0.01)

    async def fork(
        self, folder: Path | None, stages: str = "0", device: str = "cuda", module: str = REPLICA,
        sharing: Any = "shared", **env: str,
    ) -> Replica:  # fmt: skip
        """Forks a replica; without a folder one that needs no parameters."""
        self._number += 1
        replica = f"r{self._number}"
        own = {"KEYSTAGE_REPLICA": replica, "PATH": os.environ["PATH"], **env}
        if folder is not None:
            own |= {
                "KEYSTAGE_BUNDLE": folder.absolute().as_uri(),
                "KEYSTAGE_STAGES": stages,
                "KEYSTAGE_DEVICE": device,
            }
        life_read, life_write = os.pipe()
        out_read, out_write = os.pipe()
        http = socket.create_server(("127.0.0.1", 0))
        try:
            wanted = Fork(
                replica=replica, module=module, env=own, wanted_at_s=time.monotonic(), sharing=sharing
            )
            forked = await self.client.fork(wanted, life_read, out_write, http.fileno())
        except BaseException:
            os.close(life_write)
            os.close(out_read)
            raise
        finally:
            os.close(life_read)
            os.close(out_write)
            http.close()
        started = Replica(forked, life_write, out_read)
        self.replicas.append(started)
        return started

    async def holder(self, identity: str) -> CacheEntry | None:
        """The entry of these parameters."""
        status: NodeStatus = await self.client.status()
        return next((h for h in status.holders if h.identity == identity), None)

    async def ready(self, identity: str) -> CacheEntry:
        """Waits until a holder of these parameters is ready."""

        async def found() -> CacheEntry | None:
            entry = await self.holder(identity)
            return entry if entry is not None and entry.state == "ready" and entry.pid else None

        entry: CacheEntry = await self.wait(found, f"holder of {identity[:12]} ready")
        return entry

    def processes(self) -> set[int]:
        """Daemon, fork server and holders: everything of ours that is no replica."""
        own = {r.pid for r in self.replicas}
        assert self.process is not None
        found = {self.process.pid} | {pid for pid in descendants(self.process.pid) if pid not in own}
        return {pid for pid in found if state_of(pid) not in ("", "Z")}

    def forkserver(self) -> int:
        """Process id of the fork server, 0: none just now."""
        assert self.process is not None
        found = [pid for pid in children(self.process.pid) if state_of(pid) not in ("", "Z")]
        return found[0] if found else 0

    def kill(self) -> None:
        """SIGKILL to the daemon."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(WAIT_S)

    def stop(self) -> int:
        """SIGTERM, and its exit code."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(WAIT_S)

    def close(self) -> None:
        """Ends everything."""
        if self.process is not None and self.process.poll() is None:
            self.stop()
        for replica in self.replicas:
            replica.end()
        reap_strangers()


Run = Callable[[Callable[[Node], Coroutine[Any, Any, None]]], None]


@contextlib.contextmanager
def node_of(folder: Path, prepare: Callable[[Node], object] = id, **env: str) -> Iterator[Node]:
    """A daemon that answers; this process is the subreaper its replicas are handed to."""
    found = Node(folder, **env)
    prepare(found)
    with subreaper():
        try:
            asyncio.run(found.start())
            yield found
        finally:
            found.close()


def running(daemon: Node) -> Iterator[Run]:
    """For a fixture: runs coroutines with a daemon that several tests share, and ends what they left."""

    def go(body: Callable[[Node], Coroutine[Any, Any, None]]) -> None:
        asyncio.run(asyncio.wait_for(body(daemon), WAIT_S))

    yield go
    for replica in daemon.replicas:
        replica.end()
    daemon.replicas.clear()


def digest(folder: Path, stage: int = 0) -> str:
    """SHA-256 of a stage's file."""
    return hashlib.sha256((folder / f"stage-{stage:02d}.safetensors").read_bytes()).hexdigest()


# ------------------------------------------------------------------ /proc


def state_of(pid: int) -> str:
    """State letter of a process, empty: there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def children(pid: int) -> list[int]:
    """Direct children of a process."""
    try:
        return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def descendants(pid: int) -> list[int]:
    """Children, their children, and so on."""
    found = children(pid)
    return [*found, *(grandchild for child in found for grandchild in descendants(child))]


def reap_strangers() -> None:
    """Orphans that were handed to this process and have ended."""
    for pid in children(os.getpid()):
        if state_of(pid) == "Z" and not _is_popen(pid):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def _is_popen(pid: int) -> bool:
    return any(p.pid == pid for p in getattr(subprocess, "_active", []))


def descriptors(pid: int) -> list[str]:
    """What the descriptors of a process lead to."""
    found = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                found.append(str(fd.readlink()))
    return found


def memfds(pids: Iterable[int]) -> dict[int, int]:
    """Bytes of every segment that these processes have open or mapped, by inode, each once.

    What is open tells what is really allocated, what is only mapped is taken as full.
    """
    found: dict[int, int] = {}
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                if "/memfd:keystage-" in line:
                    span, _, offset, _, number, *_ = line.split()
                    first, end = (int(part, 16) for part in span.split("-"))
                    nbytes = int(offset, 16) + end - first
                    found[int(number)] = max(found.get(int(number), 0), nbytes)
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if str(fd.readlink()).startswith("/memfd:keystage-"):
                        facts = fd.stat()
                        found[facts.st_ino] = facts.st_blocks * 512
    return found
