"""The gateway's backend over the fake API server, and what its tests look at there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from support.kube.cluster import Kube

from keystage.gateway.kubernetes import KubernetesBackend
from keystage.kubernetes.api import FUNCTION_LABEL
from keystage.kubernetes.client import PODS
from keystage.local.api import Deployment

F = Deployment(service="f", image="i:1", envVars={"A": "1"}, labels={"team": "x"})


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def inside() -> None:
        async with asyncio.timeout(40):
            await work()

    asyncio.run(inside())


@asynccontextmanager
async def gateway(kube: Kube, account: str = "") -> Any:
    backend = KubernetesBackend(kube.cluster(service_account=account))
    await backend.start()
    try:
        yield backend
    finally:
        await backend.stop()


async def until(backend: KubernetesBackend, condition: Callable[[], bool]) -> None:
    while not condition():
        await backend.changed(5.0)


def spec(kube: Kube, name: str = "f") -> dict[str, Any]:
    found: dict[str, Any] = kube.get("functions", name)["spec"]
    return found


def owners(kube: Kube, field: str) -> set[str]:
    """Managers of a field of the function's spec."""
    entries = kube.get("functions", "f")["metadata"]["managedFields"]
    return {e["manager"] for e in entries if f"f:{field}" in e["fieldsV1"].get("f:spec", {})}


def serve(kube: Kube, name: str, function: str = "f") -> None:
    """A pod that is ready."""
    container = {"name": "function", "image": "i"}
    meta = {"name": name, "labels": {FUNCTION_LABEL: function}}
    kube.cluster().create(PODS, {"metadata": meta, "spec": {"containers": [container]}}, manager="t")
    kube.kubelet.ready(name)
