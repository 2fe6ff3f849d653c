"""The gateway over roles as the chart renders them: all it does is allowed, and nothing else is."""

from __future__ import annotations

import asyncio
import time

import msgspec
from support.gateway_cluster import METRICS_CRD
from support.helm import of_kind, render
from support.kube.cluster import SYSTEM_NAMESPACE, Kube
from support.kube.fixtures import kube as kube

from keystage.gateway.kubernetes import KubernetesBackend
from keystage.kubernetes.api import FUNCTION_LABEL
from keystage.kubernetes.client import FUNCTIONS, PODS
from keystage.local.api import Deployment, Load

ACCOUNT = "keystage-gateway"
RBAC = ("Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding")


async def use_everything(kube: Kube, backend: KubernetesBackend) -> None:
    await backend.put_secret("s", b"1", create=True)
    await backend.put_secret("s", b"2", create=False)
    assert await backend.secrets() == ["s"]
    function = Deployment(service="f", image="i", secrets=["s"])
    await backend.put(function)
    await backend.wake("f")
    await backend.override("f", 2, time.time() + 60)
    admin = kube.cluster()
    admin.patch(FUNCTIONS, "f", {"spec": {"envProcess": "x"}}, manager="kubectl")
    await backend.put(msgspec.structs.replace(function, image="i:2"))
    meta = {"name": "f-0", "labels": {FUNCTION_LABEL: "f"}}
    admin.create(
        PODS, {"metadata": meta, "spec": {"containers": [{"name": "function", "image": "i"}]}}, manager="t"
    )
    kube.kubelet.ready("f-0")
    kube.kubelet.log("f-0", "hello")
    while not backend.get("f").ready:
        await backend.changed(5.0)
    assert [line.text for line in await backend.logs("f", tail=None, since_s=0.0)] == ["hello"]
    await backend.usage("f")
    await backend.tell_load("f", Load("g", 0, 0))
    await backend.delete("f")
    await backend.delete_secret("s")


def test_every_right_of_the_gateway_is_there_and_needed(kube: Kube) -> None:
    objects = render()
    kube.load(METRICS_CRD, *of_kind(objects, *RBAC))

    async def work() -> None:
        backend = KubernetesBackend(kube.cluster(service_account=ACCOUNT))
        await backend.start()
        try:
            async with asyncio.timeout(30):
                await use_everything(kube, backend)
        finally:
            await backend.stop()

    asyncio.run(work())
    assert kube.access.denied() == []
    assert kube.access.granted(ACCOUNT, SYSTEM_NAMESPACE)
    assert kube.access.unused(ACCOUNT, SYSTEM_NAMESPACE) == set()
