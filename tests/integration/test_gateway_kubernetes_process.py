"""The gateway as the process that a cluster runs: probes, loads, and leaving under load."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import msgspec
import pytest
from support.gateway_cluster import PlayedCluster, fake_cluster
from support.kube.cluster import FUNCTION_NAMESPACE, SYSTEM_NAMESPACE
from support.local_function import authorization, function
from support.processes import get, wait_for

from keystage.gateway.kubernetes import KubernetesBackend
from keystage.kubernetes.api import FUNCTION_LABEL, WAKE_ANNOTATION
from keystage.kubernetes.asking import internal_token
from keystage.kubernetes.client import FUNCTIONS, PODS
from keystage.local.api import Load
from keystage.wire.endpoints import listen
from keystage.wire.secret import create_secret

LOGIN = authorization("admin", "password")


class Gateways:
    """Gateway processes over one fake cluster.

    Attributes:
        played: the cluster.
        token: the internal token.
    """

    def __init__(self, folder: Path, played: PlayedCluster) -> None:
        self.folder, self.played = folder, played
        (folder / "basic-auth-user").write_text("admin")
        (folder / "basic-auth-password").write_text("password")
        create_secret(folder / "key")
        self.token = internal_token(folder / "key")
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self, **env: str) -> tuple[subprocess.Popen[bytes], str]:
        """One gateway that is ready: (process, its address)."""
        assert self.played.kube is not None
        listening = listen("127.0.0.1:0")
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        process = subprocess.Popen(
            [sys.executable, "-m", "keystage.gateway.app"],
            env={
                **os.environ,
                "KEYSTAGE_BACKEND": "kubernetes",
                "KEYSTAGE_NAMESPACE": SYSTEM_NAMESPACE,
                "KEYSTAGE_FUNCTION_NAMESPACE": FUNCTION_NAMESPACE,
                "KEYSTAGE_KUBECONFIG": str(self.played.kube.kubeconfig(self.folder / "config")),
                "KEYSTAGE_WIRE_KEY_FILE": str(self.folder / "key"),
                "KEYSTAGE_CREDENTIALS": str(self.folder),
                "KEYSTAGE_HTTP": f"fd://{listening.fileno()}",
                **env,
            },
            pass_fds=(listening.fileno(),),
        )
        listening.close()
        self.running.append(process)
        wait_for(lambda: process.poll() is not None or get(f"{url}/readyz")[0] == 200, "gateway ready")
        assert process.poll() is None
        return process, url

    def stop(self) -> None:
        """Ends what still runs."""
        for process in self.running:
            process.kill()
            process.wait()


@contextmanager
def gateways(folder: Path) -> Iterator[Gateways]:
    with fake_cluster() as played:
        found = Gateways(folder, played)
        try:
            yield found
        finally:
            found.stop()


async def deploy(session: aiohttp.ClientSession, url: str, **env: str) -> None:
    body = msgspec.json.encode(function("echo", **env))
    async with session.post(f"{url}/system/functions", data=body, headers=LOGIN) as answer:
        assert answer.status == 202, await answer.text()


async def heard_of(session: aiohttp.ClientSession, url: str) -> None:
    """Waits until a gateway that was not asked to deploy has seen the function in its watch."""
    async with asyncio.timeout(20):
        while True:
            async with session.get(f"{url}/system/function/echo", headers=LOGIN) as answer:
                if answer.status == 200:
                    return
                assert answer.status == 404
            await asyncio.sleep(0.01)


async def loads(session: aiohttp.ClientSession, url: str, token: str) -> dict[str, Load]:
    async with session.get(f"{url}/_/loads", headers={"Authorization": f"Bearer {token}"}) as answer:
        assert answer.status == 200
        return dict(msgspec.json.decode(await answer.read(), type=list[tuple[str, Load]]))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.slow
def test_any_gateway_serves_what_any_was_told_and_tells_its_own_loads(tmp_path: Path) -> None:
    async def work(found: Gateways) -> None:
        _, one = found.start()
        _, two = found.start()
        async with aiohttp.ClientSession() as session:
            await deploy(session, one)
            await heard_of(session, two)
            async with session.get(f"{two}/function/echo") as answer:  # waits for the first replica
                assert answer.status == 200
                assert (await answer.json())["replica"] == "echo-0"
            slow = [asyncio.create_task(_slow(session, two)) for _ in range(3)]
            told = await loads(session, two, found.token)
            while told["echo"].in_flight < 3:
                told = await loads(session, two, found.token)
            assert told["echo"].replicas == {"echo-0": 3}
            assert (await loads(session, one, found.token))["echo"].in_flight == 0
            assert await asyncio.gather(*slow) == [200] * 3
            assert (await loads(session, two, found.token))["echo"].started == 4
            gone = {"metadata": {"annotations": {WAKE_ANNOTATION: None}}}  # of the first request
            found.played.cluster.patch(FUNCTIONS, "echo", gone, manager="t")
            await asyncio.to_thread(found.played.scale, "echo", 0)
            waiting = asyncio.create_task(_until_woken(session, one, found.played))
            while WAKE_ANNOTATION not in _annotations(found.played):
                await asyncio.sleep(0.01)
            await asyncio.to_thread(found.played.scale, "echo", 1)
            assert await waiting == 200
            for token in ("", found.token[:-1]):
                header = {"Authorization": f"Bearer {token}"}
                async with session.get(f"{two}/_/loads", headers=header) as answer:
                    assert answer.status == 401
            async with session.get(f"{one}/livez") as answer:
                assert answer.status == 200

    with gateways(tmp_path) as found:
        asyncio.run(asyncio.wait_for(work(found), 60))


async def _slow(session: aiohttp.ClientSession, url: str) -> int:
    async with session.get(f"{url}/function/echo/slow?s=3") as answer:
        return answer.status


async def _until_woken(session: aiohttp.ClientSession, url: str, played: PlayedCluster) -> int:
    """A request at zero replicas: it waits, and has the function woken."""
    while await asyncio.to_thread(lambda: played.cluster.list(PODS, labels=FUNCTION_LABEL).items):
        await asyncio.sleep(0.01)
    async with session.get(f"{url}/function/echo") as answer:
        return answer.status


def _annotations(played: PlayedCluster) -> dict[str, str]:
    return played.cluster.get(FUNCTIONS, "echo")["metadata"].get("annotations") or {}


@pytest.mark.slow
def test_a_gateway_that_leaves_under_load_breaks_no_request(tmp_path: Path) -> None:
    async def work(found: Gateways) -> None:
        process, url = found.start(KEYSTAGE_LEAVE_S="1.5", KEYSTAGE_STOP_S="20")
        answered: list[int] = []
        closing: list[str] = []
        async with aiohttp.ClientSession() as session:
            await deploy(session, url)
            long = asyncio.create_task(_slow_for(session, url, 2.5))

            async def client() -> None:
                """Keeps its connection, one request after the other, until it is told to go elsewhere."""
                async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) as own:
                    while True:
                        async with own.get(f"{url}/function/echo/slow?s=0.01") as answer:
                            answered.append(answer.status)
                            if answer.headers.get("connection") == "close":
                                closing.append("close")
                                return

            clients = [asyncio.create_task(client()) for _ in range(8)]
            await until(lambda: len(answered) > 100)
            process.send_signal(signal.SIGTERM)
            await asyncio.gather(*clients)
            assert process.poll() is None
            async with session.get(f"{url}/readyz") as answer:
                assert (answer.status, await answer.text()) == (503, "the gateway is leaving\n")
            async with session.get(f"{url}/livez") as answer:
                assert answer.status == 200
            assert await long == 200
        assert set(answered) == {200}
        assert len(closing) == 8
        await until(lambda: process.poll() is not None)
        assert process.returncode == 0

    with gateways(tmp_path) as found:
        asyncio.run(asyncio.wait_for(work(found), 60))


async def _slow_for(session: aiohttp.ClientSession, url: str, seconds: float) -> int:
    async with session.get(f"{url}/function/echo/slow?s={seconds}") as answer:
        return answer.status


def test_a_view_that_is_too_old_makes_it_unready_and_requests_still_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from keystage.gateway.internal import Internal

    monkeypatch.setattr("keystage.gateway.internal.STALE_S", 1.0)
    monkeypatch.setattr("keystage.gateway.kubernetes.START_S", 5.0)

    async def ready(internal: Internal) -> tuple[int, str]:
        sent: list[dict[str, object]] = []

        async def send(message: object) -> None:
            sent.append(message)  # type: ignore[arg-type]

        scope = {"type": "http", "method": "GET", "path": "/readyz", "headers": []}
        await internal(scope, None, send)  # type: ignore[arg-type]
        return int(str(sent[0]["status"])), str(sent[1]["body"])

    async def work(played: PlayedCluster) -> None:
        assert played.kube is not None
        backend = KubernetesBackend(played.cluster)
        await backend.start()
        try:
            await backend.put(function("echo"))
            await until(lambda: bool(backend.get("echo").ready))
            internal = Internal(backend, list, backend.reports, "t", lambda: False)
            played.pause()
            with played.kube.outage():
                await until(lambda: bool(backend.trouble) and backend.view_age_s() > 1.1)
                status, text = await ready(internal)
                assert status == 503
                assert "at most 1 s are well" in text
                assert backend.get("echo").ready
            played.go_on()
            await backend.put(function("after"))
            await until(lambda: backend.view_age_s() < 0.5)
            assert (await ready(internal))[0] == 200
        finally:
            await backend.stop()

    with fake_cluster() as played:
        asyncio.run(asyncio.wait_for(work(played), 60))
