"""A whole `keystage up` whose stage replicas are started and ended again and again, for `cycles`.

Before it: a bundle of a tiny random Llama. After it: `cycles`, which reads what the parts hold. `up` is a
process of its own, so that nothing of a benchmark is in the supervisor. Replicas are asked for as a person
does: by the gateway's scale-function, which the controller carries out. Each stage has two functions: one
whose replicas come and go (a minimum by label and a wish of 0 take turns), and one with a single replica that
stays, so that a worker is seen that meets all the others.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import psutil

from keystage.bench.cycles_watch import WorldWatch
from keystage.bench.frame import BenchError
from keystage.bundle.split import split
from keystage.bundle.store import load
from keystage.controller.domain.platform import PlatformError
from keystage.controller.platforms.unix_http import UnixConnection, exchange
from keystage.local import labels
from keystage.local.api import ReplicaRecord, View
from keystage.local.errors import LocalError
from keystage.local.home import control_socket, read_credentials
from keystage.local.pipeline import deployments_for
from keystage.router.api import RouterStats

STAGES = 2
READY_S = 180.0
WATCH_S = 30.0
TURN_S = 120.0
"""For all replicas of a turn to be ready, or gone."""
END_S = 60.0
ASKERS = 4
"""Requests at once where many are asked."""
DECISIONS_BYTES = 1 << 20
"""Of the controller's record: it turns over within a run, which says how much is kept."""
PROMPT = [3, 4, 5]
TOKENS = 4
_NUMBER = re.compile(r"-(\d+)$")


class CyclesWorld:
    """`keystage up` with one pipeline, from entering to leaving.

    Args:
        folder: made by the caller; takes bundle, state and log.
        at_once: replicas of each stage.
        device: `KEYSTAGE_DEVICE` of the stages.

    Attributes:
        watch: reads what it holds.
        pipeline: name of the pipeline.
        stages: names of the stage functions whose replicas come and go.
        lasting: names of those with one replica that stays.

    Raises:
        BenchError: something did not become ready, or an answer is wrong.
    """

    def __init__(self, folder: Path, at_once: int, device: str) -> None:
        self.pipeline = "cycles"
        self.stages = tuple(f"{self.pipeline}-stage-{k}" for k in range(STAGES))
        self.lasting = tuple(f"{self.pipeline}-lasting-{k}" for k in range(STAGES))
        self.at_once = at_once
        self.watch: WorldWatch
        self._folder = folder
        self._device = device
        self._home = folder / "home"
        self._version = 0
        self._right: list[int] = []

    def __enter__(self) -> Self:
        bundle = split("random:llama-tiny", STAGES, "uniform", self._folder / "bundle", self.pipeline)
        log = (self._folder / "up.log").open("wb")
        argv = ["-m", "keystage.cli.main", "up", "--home", str(self._home), "--port", "0"]
        env = {name: value for name, value in os.environ.items() if not name.startswith("KEYSTAGE_")}
        env["KEYSTAGE_DECISIONS_BYTES"] = str(DECISIONS_BYTES)
        with log:
            self._up = subprocess.Popen(
                [sys.executable, *argv], env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        try:
            self._begin(bundle)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def parts(self) -> dict[str, list[int]]:
        """Process ids of what lasts, by role."""
        ready = [r for r in self._view().replicas if r.state == "ready"]
        routers = [r.pid for r in ready if r.function == self.pipeline]
        return self.watch.parts(routers, [r.pid for r in ready if r.function in self.lasting])

    def settle(self) -> RouterStats:
        """Waits until the router knows the lasting workers only; answers its statistics."""
        deadline_s = time.monotonic() + TURN_S
        while True:
            status, body = self._call("GET", f"/function/{self.pipeline}/_/stats")
            stats = msgspec.json.decode(body, type=RouterStats) if status == 200 else None
            if stats is not None and len(stats.replicas) == STAGES:
                return stats
            if time.monotonic() > deadline_s:
                known = [r.replica for r in stats.replicas] if stats is not None else status
                raise BenchError(f"after {TURN_S:g} s the router knows {known}, not the lasting ones alone")
            time.sleep(0.02)

    def replicas(self) -> list[ReplicaRecord]:
        """Those of the stages, in whatever state."""
        return [r for r in self._view().replicas if r.function in self.stages]

    def started(self) -> int:
        """Replicas of stages started so far, as far as records name them: names are numbered."""
        highest = dict.fromkeys(self.stages, -1)
        for replica in self.replicas():
            found = _NUMBER.search(replica.replica)
            assert found is not None
            highest[replica.function] = max(highest[replica.function], int(found[1]))
        return sum(number + 1 for number in highest.values())

    def up(self) -> list[ReplicaRecord]:
        """Asks for all replicas and waits until each is ready."""
        self._scale(self.at_once)
        return self._until(
            lambda mine: len(mine) == self.at_once * STAGES and all(r.state == "ready" for r in mine),
            f"{self.at_once} ready replicas of each stage",
        )

    def down(self) -> None:
        """Asks for none and waits until each is gone."""
        self._scale(0)
        self._until(lambda mine: not mine, "no replica of any stage")

    def fill(self, requests: int) -> None:
        """Serves so many requests by the lasting replicas alone, then has the others again."""
        self.down()
        self.settle()
        self.ask()  # the first one says what is right
        with ThreadPoolExecutor(ASKERS) as pool:
            for asked in [pool.submit(self.ask) for _ in range(requests)]:
                asked.result()
        self.up()

    def ask(self) -> None:
        """Serves one request through the gateway; its tokens must be those of the first one."""
        body = {
            "model": self.pipeline, "prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True,
            "return_token_ids": True, "temperature": 0,
        }  # fmt: skip
        status, told = self._post(f"/function/{self.pipeline}/v1/completions", body)
        try:
            tokens = json.loads(told)["choices"][0]["token_ids"] if status == 200 else None
        except (ValueError, LookupError):
            tokens = None
        if not tokens or len(tokens) != TOKENS:
            raise BenchError(f"a request was not served: {status} {told[:300].decode(errors='replace')}")
        self._right = self._right or tokens
        if tokens != self._right:
            raise BenchError(f"a request was answered with tokens {tokens}, the first one with {self._right}")

    def _begin(self, bundle: Path) -> None:
        deadline_s = time.monotonic() + READY_S
        while True:
            try:
                self._control = control_socket(self._home)
                status, _ = exchange(UnixConnection(str(self._control), WATCH_S), "GET", "/healthz")
                if status == 200 and (address := self._address()):
                    break
            except (LocalError, PlatformError):
                pass
            if self._up.poll() is not None or time.monotonic() > deadline_s:
                raise BenchError(f"`keystage up` is not ready after {READY_S:g} s: {self._log()}")
            time.sleep(0.05)
        self._gateway = address
        user, password = read_credentials(self._home / "credentials")
        self._login = "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()
        self.watch = WorldWatch(psutil.Process(self._up.pid), self._home, self._control.parent)
        replicas = [self.at_once] * STAGES
        env = {"KEYSTAGE_RING_BYTES": str(1 << 20)}
        router, *stages = deployments_for(
            bundle, load(bundle), device=self._device, replicas=replicas, env=env
        )
        one = {labels.MIN: "1", labels.MAX: "1"}
        lasting = [
            msgspec.structs.replace(stage, service=name, labels=stage.labels | one)
            for name, stage in zip(self.lasting, stages, strict=True)
        ]
        for function in (router, *lasting, *stages):
            body = msgspec.json.encode(function)
            status, told = exchange(self._connection(), "PUT", f"/functions/{function.service}", body)
            if status != 200:
                raise BenchError(f"{function.service} cannot be deployed: {told.decode(errors='replace')}")
        self._until_ready((self.pipeline, *self.lasting))
        self.up()

    def _end(self) -> None:
        self._up.terminate()
        try:
            self._up.wait(END_S)
        except subprocess.TimeoutExpired:
            self._up.kill()
            self._up.wait()

    def _address(self) -> str:
        found = re.search(r"gateway http://(\S+?),", self._log())
        return found[1] if found else ""

    def _log(self) -> str:
        return (self._folder / "up.log").read_text(errors="replace")[-2000:]

    def _connection(self) -> UnixConnection:
        return UnixConnection(str(self._control), WATCH_S)

    def _view(self, since: int = -1) -> View:
        path = "/watch" if since < 0 else f"/watch?since={since}"
        try:
            status, body = exchange(self._connection(), "GET", path)
        except PlatformError as error:
            raise BenchError(f"the supervisor does not answer: {error}; {self._log()}") from error
        if status != 200:
            raise BenchError(f"GET {path}: {status} {body[:300].decode(errors='replace')}")
        return msgspec.json.decode(body, type=View)

    def _until_ready(self, functions: tuple[str, ...]) -> None:
        deadline_s = time.monotonic() + READY_S
        while True:
            ready = {r.function for r in self._view().replicas if r.state == "ready"}
            if ready.issuperset(functions):
                return
            if time.monotonic() > deadline_s:
                missing = ", ".join(sorted(set(functions) - ready))
                raise BenchError(f"not ready after {READY_S:g} s: {missing}; logs in {self._home / 'logs'}")
            time.sleep(0.05)

    def _until(self, is_so: Any, what: str) -> list[ReplicaRecord]:
        deadline_s = time.monotonic() + TURN_S
        view = self._view()
        while True:
            mine = [r for r in view.replicas if r.function in self.stages]
            if is_so(mine):
                return mine
            if time.monotonic() > deadline_s:
                states = ", ".join(f"{r.replica} {r.state} {r.reason}".strip() for r in mine)
                raise BenchError(f"not within {TURN_S:g} s: {what}; there are {states or 'none'}")
            view = self._view(view.version)

    def _scale(self, replicas: int) -> None:
        for stage in self.stages:
            status, told = self._post(f"/system/scale-function/{stage}", {"replicas": replicas})
            if status not in (200, 202):
                raise BenchError(f"{stage} cannot be scaled: {status} {told[:300].decode(errors='replace')}")

    def _post(self, path: str, body: object) -> tuple[int, bytes]:
        return self._call("POST", path, json.dumps(body))

    def _call(self, method: str, path: str, body: str | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self._gateway, timeout=WATCH_S)
        headers = {"Content-Type": "application/json", "Authorization": self._login}
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise BenchError(f"{method} {path}: {error or type(error).__name__}") from error
        finally:
            connection.close()
