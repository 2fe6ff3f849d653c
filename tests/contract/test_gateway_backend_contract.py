"""What every gateway backend must do, run over each of them.

A backend joins by a harness: a running world, and how a controller there sets replica numbers.
"""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec
import pytest
from support.gateway_cluster import PlayedCluster, fake_cluster, real_cluster
from support.local_function import PYTHON, function

from keystage.gateway.backend import (
    AlreadyDeployed,
    Backend,
    BackendUnavailable,
    BadRequest,
    UnknownFunction,
    UnknownSecret,
)
from keystage.gateway.kubernetes import KubernetesBackend
from keystage.gateway.local import LocalBackend
from keystage.local.api import Deployment, Load
from keystage.local.world import LocalWorld

Scale = Callable[[str, int], Awaitable[None]]


@asynccontextmanager
async def local(folder: Path) -> AsyncIterator[tuple[Backend, Scale]]:
    async with LocalWorld(folder / "state", gateway_port=None, controller=False) as world:
        backend = LocalBackend(world.home.control)
        await backend.start()
        try:
            yield backend, world.scale
        finally:
            await backend.stop()


@asynccontextmanager
async def kubernetes(_: Path) -> AsyncIterator[tuple[Backend, Scale]]:
    async with over(fake_cluster()) as found:
        yield found


@asynccontextmanager
async def kubernetes_real(_: Path) -> AsyncIterator[tuple[Backend, Scale]]:
    async with over(real_cluster()) as found:
        yield found


@asynccontextmanager
async def over(cluster: AbstractContextManager[PlayedCluster]) -> AsyncIterator[tuple[Backend, Scale]]:
    played = await asyncio.to_thread(cluster.__enter__)
    try:
        backend = KubernetesBackend(played.cluster)
        await backend.start()

        async def scale(name: str, replicas: int) -> None:
            await asyncio.to_thread(played.scale, name, replicas)

        try:
            yield backend, scale
        finally:
            await backend.stop()
    finally:
        await asyncio.to_thread(cluster.__exit__, None, None, None)


HARNESSES = {"local": local, "kubernetes": kubernetes, "kubernetes_real": kubernetes_real}
WITHOUT_KUBELET = "what a pod prints and uses is told by its kubelet, and there is none"

NEEDS_KUBELET: list[Callable[..., None]] = []


def needs_kubelet(test: Callable[..., None]) -> Callable[..., None]:
    NEEDS_KUBELET.append(test)
    return test


@pytest.fixture(params=["local", "kubernetes", pytest.param("kubernetes_real", marks=pytest.mark.e2e)])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., None]:
    def go(work: Callable[[Backend, Scale], Awaitable[None]]) -> None:
        async def inside() -> None:
            async with asyncio.timeout(60), HARNESSES[request.param](tmp_path) as (backend, scale):
                await work(backend, scale)

        if request.param == "kubernetes_real" and request.function in NEEDS_KUBELET:
            pytest.skip(WITHOUT_KUBELET)
        asyncio.run(inside())

    return go


async def until(backend: Backend, condition: Callable[[], bool]) -> None:
    while not condition():
        await backend.changed(5.0)


def test_writes_are_seen_by_the_next_read(run: Callable[..., None]) -> None:
    async def work(backend: Backend, scale: Scale) -> None:
        assert backend.functions() == []
        await backend.put(function("b"))
        await backend.put(function("a"))
        assert [s.deployment.service for s in backend.functions()] == ["a", "b"]
        assert backend.get("a").deployment == function("a")
        await backend.put(function("a", COLOUR="blue"))
        assert backend.get("a").deployment.envVars == {"COLOUR": "blue"}
        await backend.delete("a")
        assert [s.deployment.service for s in backend.functions()] == ["b"]

    run(work)


def test_ready_replicas_can_be_called_and_their_number_follows(run: Callable[..., None]) -> None:
    async def work(backend: Backend, scale: Scale) -> None:
        await backend.put(function())
        await until(backend, lambda: len(backend.get("echo").ready) == 1)
        await scale("echo", 2)
        await until(backend, lambda: len(backend.get("echo").ready) == 2)
        assert backend.get("echo").replicas == 2
        async with aiohttp.ClientSession() as session:
            for endpoint in backend.get("echo").ready:
                async with session.get(f"http://{endpoint.address}/") as answer:
                    assert (await answer.json())["replica"] == endpoint.replica
        await scale("echo", 0)
        await until(backend, lambda: not backend.get("echo").ready)
        assert backend.get("echo").replicas == 0

    run(work)


def test_intents_show(run: Callable[..., None]) -> None:
    async def work(backend: Backend, scale: Scale) -> None:
        await backend.put(function())
        await scale("echo", 0)
        await backend.wake("echo")
        await until(backend, lambda: backend.get("echo").waking)
        await backend.override("echo", 3, time.time() + 60)
        assert backend.get("echo").replicas == 3
        await backend.override("echo", 3, time.time() - 1)
        assert backend.get("echo").replicas == 0

    run(work)


@needs_kubelet
def test_logs_come_in_order_and_are_cut_from_the_front(run: Callable[..., None]) -> None:
    async def work(backend: Backend, scale: Scale) -> None:
        talk = PYTHON + " -c \"print('one'); print('two|2'); print('three'); import time; time.sleep(60)\""
        await backend.put(
            Deployment(service="talk", image="none", envProcess="env PYTHONUNBUFFERED=1 " + talk)
        )
        lines = await backend.logs("talk", tail=None, since_s=0.0)
        while len(lines) < 3:
            await asyncio.sleep(0.02)
            lines = await backend.logs("talk", tail=None, since_s=0.0)
        assert [line.text for line in lines] == ["one", "two|2", "three"]
        assert {line.replica for line in lines} == {"talk-0"}
        assert await backend.logs("talk", tail=1, since_s=0.0) == lines[-1:]
        assert await backend.logs("talk", tail=None, since_s=lines[-1].at_s) == []

    run(work)


def test_what_cannot_be_is_refused_by_name(run: Callable[..., None]) -> None:
    async def work(backend: Backend, scale: Scale) -> None:
        await backend.put(function())
        with pytest.raises(BadRequest, match="Upper"):
            await backend.put(function("Upper"))
        with pytest.raises(BadRequest, match="not -1"):
            await backend.override("echo", -1, time.time() + 60)
        for call in (
            backend.delete("no"),
            backend.wake("no"),
            backend.override("no", 1, time.time() + 60),
            backend.logs("no", tail=None, since_s=0.0),
            backend.usage("no"),
            backend.tell_load("no", Load("g", 0, 0)),
        ):
            with pytest.raises(UnknownFunction, match="function no "):
                await call
        with pytest.raises(UnknownFunction, match="function no "):
            backend.get("no")

    run(work)


def test_secrets_are_created_replaced_listed_and_removed(run: Callable[..., None]) -> None:
    async def work(backend: Backend, scale: Scale) -> None:
        assert await backend.secrets() == []
        await backend.put_secret("b.c-1", b"\x00\xff", create=True)
        await backend.put_secret("a", b"x" * (1 << 20), create=True)
        assert await backend.secrets() == ["a", "b.c-1"]
        with pytest.raises(AlreadyDeployed, match="secret a exists"):
            await backend.put_secret("a", b"y", create=True)
        await backend.put_secret("a", b"y", create=False)
        with pytest.raises(UnknownSecret, match="secret no "):
            await backend.put_secret("no", b"y", create=False)
        await backend.delete_secret("a")
        assert await backend.secrets() == ["b.c-1"]
        with pytest.raises(UnknownSecret, match="secret a "):
            await backend.delete_secret("a")

    run(work)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("Upper", 1),
        ("..", 1),
        ("../x", 1),
        ("a/b", 1),
        ("", 1),
        ("a" * 254, 1),
        ("ok", 0),
        ("ok", (1 << 20) + 1),
    ],
)
def test_secrets_out_of_bounds_are_refused(run: Callable[..., None], name: str, size: int) -> None:
    async def work(backend: Backend, scale: Scale) -> None:
        with pytest.raises(BadRequest, match=f"not {size}" if name == "ok" else r"secret name '.*' must"):
            await backend.put_secret(name, b"s" * size, create=True)
        assert await backend.secrets() == []

    run(work)


def test_a_deployment_with_a_secret_that_is_not_there_is_refused_by_name(run: Callable[..., None]) -> None:
    async def work(backend: Backend, scale: Scale) -> None:
        await backend.put_secret("key", b"1", create=True)
        deployment = msgspec.structs.replace(function(), secrets=["key", "other"])
        with pytest.raises(BadRequest, match="function echo: secret other does not exist"):
            await backend.put(deployment)
        await backend.put_secret("other", b"2", create=True)
        await backend.put(deployment)
        assert backend.get("echo").deployment.secrets == ["key", "other"]

    run(work)


def test_labels_that_are_not_honoured_are_refused_with_the_reason(run: Callable[..., None]) -> None:
    async def work(backend: Backend, scale: Scale) -> None:
        labels = {"com.openfaas.scale.type": "cpu"}
        with pytest.raises(BadRequest, match=r"function echo: label com\.openfaas\.scale\.type must be"):
            await backend.put(msgspec.structs.replace(function(), labels=labels))
        assert backend.functions() == []

    run(work)


@needs_kubelet
def test_usage_counts_every_process_of_a_function(run: Callable[..., None]) -> None:
    async def work(backend: Backend, scale: Scale) -> None:
        child = "import time; held = bytes(64 << 20) + b'1'; time.sleep(60)"
        spin = f'{PYTHON} -c "{child}" & while :; do :; done'
        await backend.put(Deployment(service="spin", image="none", envProcess=f"sh -c {shlex.quote(spin)}"))
        usage = await backend.usage("spin")
        while usage.cpu_cores < 0.1 or usage.memory_bytes < 64 << 20:  # until it runs and holds its memory
            usage = await backend.usage("spin")
        assert usage.cpu_cores < 2
        assert usage.memory_bytes < 1 << 30
        await scale("spin", 0)
        while usage.memory_bytes:
            usage = await backend.usage("spin")
        assert usage.cpu_cores == 0

    run(work)


def test_a_report_is_taken(run: Callable[..., None]) -> None:
    async def work(backend: Backend, scale: Scale) -> None:
        await backend.put(function())
        await backend.tell_load("echo", Load("gateway-1", 3, 5))
        with pytest.raises(BadRequest, match="in_flight must be at least 0, not -1"):
            await backend.tell_load("echo", Load("gateway-1", -1, 5))

    run(work)


def test_a_backend_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keystage.gateway.local.START_S", 0.1)

    async def inside() -> None:
        with pytest.raises(BackendUnavailable, match=r"no\.sock"):
            await LocalBackend(tmp_path / "no.sock").start()

    asyncio.run(inside())
