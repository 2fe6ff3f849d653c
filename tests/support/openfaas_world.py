"""Worlds for clients of the OpenFaaS API: a stand-in for a stock gateway, and Keystage's own gateway."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import msgspec
from support.openfaas_standin import PASSWORD, USER, Imagined, Runner, StandIn
from support.platform_worlds import SupervisedWorld

from keystage.controller.platforms.openfaas import OpenFaasPlatform
from keystage.local.api import Deployment, FunctionRecord, Intent
from keystage.local.world import LocalWorld
from keystage.openfaas.client import Client
from keystage.openfaas.exchange import Credentials, Wire

IMAGE = "ghcr.io/example/function:1"


class Processes:
    """Functions as real processes under a real supervisor, without a gateway or controller of ours."""

    def __init__(self, folder: Path) -> None:
        self.world = SupervisedWorld(folder)
        self.local: LocalWorld = self.world._local

    def start(self, deployment: Deployment, replicas: int) -> None:
        # The stand-in keeps the secrets; this supervisor knows none.
        self.world.deploy(msgspec.structs.replace(deployment, secrets=[]))
        self.scale(deployment.service, replicas)

    def scale(self, name: str, replicas: int) -> None:
        self.world._call(self.local.scale(name, replicas))

    def remove(self, name: str) -> None:
        self.world._call(self.local.remove(name))

    def available(self, name: str) -> int:
        return len(self.addresses(name))

    def addresses(self, name: str) -> list[str]:
        return [r.address for r in self.local.replicas(name) if r.state == "ready"]

    def logs(self, name: str) -> list[str]:
        file = self.local.home.logs / f"{name}-0.log"
        return file.read_text().splitlines() if file.exists() else []

    def end(self) -> None:
        self.world.end()
        self.world.platform.close()


class OpenFaasWorld:
    """A world for the platform contract: everything is deployed through the gateway's API."""

    has_intents = False

    def __init__(self, kind: str, runner: Runner) -> None:
        self.runner = runner
        self.gateway = StandIn(kind, runner)
        self.client = Client(Wire(self.gateway.url, Credentials(USER, PASSWORD), 5.0))
        self.platform = OpenFaasPlatform(self.client, stats_timeout_s=5.0)

    def deploy(self, deployment: Deployment) -> None:
        self.client.deploy(msgspec.structs.replace(deployment, image=deployment.image or IMAGE))

    def intend(self, function: str, intent: Intent) -> None:
        raise AssertionError(f"a stock gateway has no intents: {function} {intent}")

    def record(self, function: str) -> FunctionRecord:
        with self.gateway.lock:
            return FunctionRecord(
                deployment=self.gateway.deployed[function],
                created_at_s=0.0,
                desired=self.gateway.replicas[function],
            )

    def end(self) -> None:
        self.gateway.end()
        if isinstance(self.runner, Processes):
            self.runner.end()


def ce_with_processes(folder: Path) -> OpenFaasWorld:
    """The community edition, with real processes."""
    return OpenFaasWorld("openfaas-ce", Processes(folder))


def pro_imagined(_folder: Path) -> OpenFaasWorld:
    """A gateway without bounds, with imagined replicas, whose lists are a little old."""
    world = OpenFaasWorld("openfaas-pro", Imagined())
    world.gateway.cache_s = 0.2
    return world


async def _ended() -> None:
    """Lets handlers of connections that were open at the end finish."""
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    if others:
        await asyncio.wait(others, timeout=5)


class OwnGateway:
    """Keystage's own gateway, supervisor and controller, run by an event loop in a thread."""

    def __init__(self, folder: Path) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.local = LocalWorld(folder / "home", gateway_port=0)
        self._call(self.local.__aenter__())
        user, password = self.local.credentials
        self.url = self.local.gateway_url
        self.client = Client(Wire(self.url, Credentials(user, password), 10.0))

    def end(self) -> None:
        self._call(self.local.__aexit__(None, None, None))
        self._call(_ended())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()

    def _call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)
