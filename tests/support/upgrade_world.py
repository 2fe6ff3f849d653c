"""Installations of Keystage, a `keystage up` that runs one of them, clients that check every answer."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil

from keystage.bundle.split import split
from keystage.bundle.store import load
from keystage.controller.platforms.unix_http import UnixConnection, exchange
from keystage.local.api import Deployment, ReplicaRecord, View
from keystage.local.pipeline import deployments_for

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("benchmarks/src", "controller/src", "keysmanager/src", "loadgen/src", "stage-function/src")
NAME = "rolling"
STAGES = 2
WAIT_S = 120.0
CLIENTS = 4
TOKENS = 12
PROMPTS = tuple([3 + n, 5 + 7 * n % 90, 11, 4 + n] for n in range(6))
RETRY_S = 0.2


def until(condition: Callable[[], Any], what: str, within_s: float = WAIT_S) -> Any:
    """The first true value of `condition`, within a bound."""
    deadline_s = time.monotonic() + within_s
    while not (value := condition()):
        assert time.monotonic() < deadline_s, f"not within {within_s:g} s: {what}"
        time.sleep(0.05)
    return value


def previous_commit() -> str:
    """What to upgrade from: the last commit where the working tree differs from it, else the one before.

    Returns:
        Empty where there is no history: an archive, or a clone of one commit.
    """
    if named := os.environ.get("KEYSTAGE_UPGRADE_FROM"):
        return named
    git = ["git", "-C", str(ROOT)]
    paths = [f"{source}/" for source in SOURCES]
    changed = subprocess.run([*git, "status", "--porcelain", "--", *paths], capture_output=True, text=True)
    commit = "HEAD" if changed.stdout.strip() else "HEAD~1"
    found = subprocess.run([*git, "rev-parse", "-q", "--verify", f"{commit}^{{commit}}"], capture_output=True)
    return commit if changed.returncode == found.returncode == 0 else ""


def install(folder: Path, commit: str = "") -> Path:
    """Builds a commit's wheel, or the working tree's, and unpacks it into a folder of its own."""
    source = folder.with_name(folder.name + "-source")
    source.mkdir(parents=True)
    names = ["pyproject.toml", "README.md", "LICENSE", *SOURCES]
    if commit:
        archive = subprocess.run(
            ["git", "archive", commit, "--", *names], cwd=ROOT, check=True, capture_output=True
        )
        subprocess.run(["tar", "-x", "-C", str(source)], input=archive.stdout, check=True)
    else:
        for name in names:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run([*pip, "--target", str(folder), str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


class Up:
    """A `keystage up` as a process.

    Args:
        home: state folder.
        path: PYTHONPATH, an installation.
        port: of the gateway, 0 picks a free one.
        env: more variables.
    """

    def __init__(self, home: Path, path: Path, port: int = 0, **env: str) -> None:
        self.home = home
        self._log = home.with_name(home.name + ".log")
        before = self._log.stat().st_size if self._log.exists() else 0
        variables = {k: v for k, v in os.environ.items() if not k.startswith("KEYSTAGE_")}
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "keystage.cli.main", "up", "--home", str(home), "--port", str(port)],
                env=variables | {"PYTHONPATH": str(path)} | env,
                cwd=home.parent,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        found = until(lambda: self._serving(before), f"`up` serves: {self.log()}")
        self.gateway = str(found)

    def _serving(self, before: int) -> str:
        assert self.process.poll() is None, self.log()
        found = re.search(r"serving at (\S+)", self._log.read_text(errors="replace")[before:])
        return found[1] if found else ""

    def log(self) -> str:
        """The end of what it printed."""
        return self._log.read_text(errors="replace")[-3000:] if self._log.exists() else ""

    def ask(self, method: str, path: str, body: bytes | None = None) -> bytes:
        """One request on the control socket."""
        control = Path((self.home / "run").read_text().strip()) / "up.sock"
        status, told = exchange(UnixConnection(str(control), 30.0), method, path, body)
        assert status < 300, (status, told, self.log())
        return told

    def deploy(self, *deployments: Deployment) -> None:
        """Creates or replaces functions."""
        for deployment in deployments:
            self.ask("PUT", f"/functions/{deployment.service}", msgspec.json.encode(deployment))

    def view(self) -> View:
        """Everything at this moment."""
        return msgspec.json.decode(self.ask("GET", "/watch"), type=View)

    def ready(self, function: str, generation: int = 0) -> list[ReplicaRecord]:
        """Ready replicas of a function, of this generation or later."""
        mine = (r for r in self.view().replicas if r.function == function and r.state == "ready")
        return [r for r in mine if r.generation >= generation]

    def parts(self) -> dict[str, int]:
        """Process ids of gateway, controller and KeysManager."""
        found = {}
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):
                line = " ".join(child.cmdline())
                for part in ("gateway", "controller", "keysmanager"):
                    if f"keystage.{part}.app" in line:
                        found[part] = child.pid
        return found

    def stop(self) -> None:
        """Ends it."""
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def pipeline(folder: Path, replicas: int = 1) -> list[Deployment]:
    """Functions of a tiny random Llama, the router first."""
    bundle = split("random:llama-tiny", STAGES, "uniform", folder / "bundle", NAME)
    return deployments_for(bundle, load(bundle), replicas=[replicas] * STAGES)


@dataclasses.dataclass(slots=True)
class Tally:
    """What clients saw.

    Attributes:
        sent: requests.
        right: answered with the tokens they should have.
        wrong: answered with others, in words.
        failed: not answered, in words.
        retried: asked again under the same key.
        slowest_s: longest from the request to its answer.
    """

    sent: int = 0
    right: int = 0
    wrong: list[str] = dataclasses.field(default_factory=list)
    failed: list[str] = dataclasses.field(default_factory=list)
    retried: int = 0
    slowest_s: float = 0.0


class Clients:
    """Clients that ask again and again, one request each at a time.

    Args:
        gateway: address.
        patience_s: how long a request that broke off is asked again under its key; 0: not at all.
    """

    def __init__(self, gateway: str, patience_s: float = 0.0) -> None:
        self.tally = Tally()
        self.patience_s = patience_s
        self._gateway = gateway
        self._right: dict[int, list[int]] = {}
        self._is_over = False

    async def learn(self) -> None:
        """Asks for the right answers, before anything is disturbed."""
        async with self._session() as session:
            for number in range(len(PROMPTS)):
                self._right[number] = await self._answer(session, number, f"learn-{number}")

    @contextlib.asynccontextmanager
    async def asking(self) -> AsyncIterator[Tally]:
        """Asks meanwhile; at the end every request has its answer."""
        tasks = [asyncio.create_task(self._ask_on(n)) for n in range(CLIENTS)]
        try:
            yield self.tally
        finally:
            self._is_over = True
            await asyncio.gather(*tasks)

    async def _ask_on(self, client: int) -> None:
        async with self._session() as session:
            turn = client
            while not self._is_over:
                await self._ask(session, turn % len(PROMPTS), f"{os.getpid()}-{client}-{turn}")
                turn += 1

    async def _ask(self, session: aiohttp.ClientSession, number: int, key: str) -> None:
        self.tally.sent += 1
        begun_s = time.monotonic()
        while True:
            try:
                tokens = await self._answer(session, number, key)
                break
            except (aiohttp.ClientError, OSError, TimeoutError, AssertionError) as error:
                if time.monotonic() - begun_s >= self.patience_s:
                    self.tally.failed.append(f"{key}: {type(error).__name__} {error}"[:300])
                    return
                self.tally.retried += 1
                await asyncio.sleep(RETRY_S)
        self.tally.slowest_s = max(self.tally.slowest_s, time.monotonic() - begun_s)
        if tokens == self._right[number]:
            self.tally.right += 1
        else:
            self.tally.wrong.append(f"{key}: {tokens}, not {self._right[number]}")

    async def _answer(self, session: aiohttp.ClientSession, number: int, key: str) -> list[int]:
        body = {
            "model": NAME, "prompt": PROMPTS[number], "max_tokens": TOKENS, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        url = f"{self._gateway}/function/{NAME}/v1/completions"
        async with session.post(url, json=body, headers={"Idempotency-Key": key}) as answer:
            told = await answer.text()
            assert answer.status == 200, f"{answer.status} {told[:200]}"
            tokens: list[int] = msgspec.json.decode(told)["choices"][0]["token_ids"]
            return tokens

    @staticmethod
    def _session() -> aiohttp.ClientSession:
        return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=WAIT_S))


def code_of(pid: int) -> str:
    """PYTHONPATH of the interpreter that a process is, or was forked from."""
    environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    found = (one.partition(b"=")[2].decode() for one in environment if one.startswith(b"PYTHONPATH="))
    return next(found, "")


@contextlib.contextmanager
def running(home: Path, path: Path, **env: str) -> Iterator[Up]:
    """A `keystage up` that is ended in any case."""
    up = Up(home, path, **env)
    try:
        yield up
    finally:
        up.stop()
