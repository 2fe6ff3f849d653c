"""The gateway's backend over the fake API server: fields and their owners, others' secrets, lost pods."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import msgspec
import pytest
from support.gateway_backends import F, gateway, owners, run, serve, spec, until
from support.kube.cluster import FUNCTION_NAMESPACE, Kube
from support.kube.fixtures import kube as kube

from keystage.gateway.backend import (
    BackendUnavailable,
    BadRequest,
    TooLarge,
    UnknownFunction,
)
from keystage.gateway.kubernetes import KubernetesBackend
from keystage.kubernetes.api import (
    GATEWAY_MANAGER,
    OVERRIDE_UNTIL_ANNOTATION,
    SCALE_MANAGER,
    WAKE_ANNOTATION,
)
from keystage.kubernetes.client import FUNCTIONS


def test_a_deployment_neither_resets_nor_owns_replicas(kube: Kube) -> None:
    async def work() -> None:
        async with gateway(kube) as backend:
            await backend.put(F)
            await backend.override("f", 3, time.time() + 60)
            await backend.put(msgspec.structs.replace(F, image="i:2"))
            assert spec(kube) == {
                "image": "i:2",
                "envVars": {"A": "1"},
                "labels": {"team": "x"},
                "replicas": 3,
            }
            assert owners(kube, "replicas") == {SCALE_MANAGER}
            assert owners(kube, "image") == {GATEWAY_MANAGER}
            assert backend.get("f").replicas == 3
            until_s = float(kube.get("functions", "f")["metadata"]["annotations"][OVERRIDE_UNTIL_ANNOTATION])
            assert 50 < until_s - time.time() < 61
            await backend.override("f", 0, time.time() + 60)
            assert spec(kube)["replicas"] == 0

    run(work)


def test_kubectl_scale_holds_through_a_deployment(kube: Kube) -> None:
    async def work() -> None:
        async with gateway(kube) as backend:
            await backend.put(F)
            kube.cluster().patch(
                FUNCTIONS, "f", {"spec": {"replicas": 5}}, manager="kubectl", subresource="scale"
            )
            await until(backend, lambda: backend.get("f").replicas == 5)
            await backend.put(msgspec.structs.replace(F, image="i:2"))
            assert spec(kube)["replicas"] == 5

    run(work)


def test_what_is_deployed_replaces_all_that_kubectl_made_but_replicas(kube: Kube) -> None:
    async def work() -> None:
        async with gateway(kube) as backend:
            old = {
                "image": "old",
                "envVars": {"A": "0", "OLD": "1"},
                "limits": {"cpu": "1"},
                "constraints": ["a=b"],
                "replicas": 2,
            }
            body = {"kind": "Function", "metadata": {"name": "f", "labels": {"mine": "1"}}, "spec": old}
            kube.cluster().create(FUNCTIONS, {"apiVersion": FUNCTIONS.version, **body}, manager="kubectl")
            await until(backend, lambda: bool(backend.functions()))
            assert backend.get("f").deployment.envVars == {"A": "0", "OLD": "1"}
            await backend.put(F)
            assert spec(kube) == {
                "image": "i:1",
                "envVars": {"A": "1"},
                "labels": {"team": "x"},
                "replicas": 2,
            }
            assert backend.get("f").deployment == F
            assert kube.get("functions", "f")["metadata"]["labels"] == {"mine": "1"}
            await backend.put(msgspec.structs.replace(F, envVars={}, labels={}))
            left = {key: value for key, value in spec(kube).items() if value}
            assert left == {"image": "i:1", "replicas": 2}
            kube.delete("functions", "f")
            await until(backend, lambda: not backend.functions())

    run(work)


def test_several_gateways_at_once(kube: Kube) -> None:
    async def work() -> None:
        async with gateway(kube) as one, gateway(kube) as two, gateway(kube) as three:
            images = [f"i:{number}" for number in range(12)]
            every = [one, two, three] * 4
            await asyncio.gather(
                *(b.put(msgspec.structs.replace(F, image=i)) for b, i in zip(every, images, strict=True))
            )
            await asyncio.gather(*(b.wake("f") for b in every))
            last = spec(kube)["image"]
            assert last in images
            for backend in (one, two, three):
                await until(backend, lambda b=backend: b.get("f").deployment.image == last)  # type: ignore[misc]
                await until(backend, lambda b=backend: b.get("f").waking)  # type: ignore[misc]
            results = await asyncio.gather(*(b.delete("f") for b in every), return_exceptions=True)
            assert {type(r) for r in results} <= {type(None), UnknownFunction}
            assert None in results
            for backend in (one, two, three):
                await until(backend, lambda b=backend: not b.functions())  # type: ignore[misc]

    run(work)


def test_wake_is_marked_once(kube: Kube) -> None:
    async def work() -> None:
        async with gateway(kube) as backend:
            await backend.put(F)
            await backend.wake("f")
            await until(backend, lambda: backend.get("f").waking)
            version = kube.get("functions", "f")["metadata"]["resourceVersion"]
            assert (
                abs(
                    float(kube.get("functions", "f")["metadata"]["annotations"][WAKE_ANNOTATION])
                    - time.time()
                )
                < 5
            )
            await backend.wake("f")
            assert kube.get("functions", "f")["metadata"]["resourceVersion"] == version

    run(work)


def test_a_function_that_is_being_removed_is_none_and_is_not_deployed_upon(kube: Kube) -> None:
    async def work() -> None:
        async with gateway(kube) as backend:
            await backend.put(F)
            kube.patch("functions", "f", {"metadata": {"finalizers": ["example.org/wait"]}})
            await backend.delete("f")
            with pytest.raises(UnknownFunction, match="function f is not deployed"):
                backend.get("f")
            with pytest.raises(BackendUnavailable, match="function f is being removed"):
                await backend.put(F)
            kube.patch("functions", "f", {"metadata": {"finalizers": None}})
            async with asyncio.timeout(30):
                while True:
                    try:
                        await backend.put(F)
                        break
                    except BackendUnavailable:
                        await asyncio.sleep(0.01)
            assert backend.get("f").deployment == F

    run(work)


def test_an_outage_refuses_writes_keeps_routing_and_ends_by_itself(kube: Kube) -> None:
    async def work() -> None:
        async with gateway(kube) as backend:
            await backend.put(F)
            serve(kube, "f-0")
            await until(backend, lambda: bool(backend.get("f").ready))
            with kube.outage():
                for call in (
                    backend.put(F),
                    backend.delete("f"),
                    backend.override("f", 1, time.time() + 9),
                    backend.secrets(),
                ):
                    with pytest.raises(BackendUnavailable):
                        await call
                assert [e.replica for e in backend.get("f").ready] == ["f-0"]
                kube.delete("functions", "f")
            await until(backend, lambda: not backend.functions())
            while backend.trouble:
                await asyncio.sleep(0.01)

    run(work)


def test_a_write_that_does_not_come_back_is_still_written(
    kube: Kube, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("keystage.gateway.kubernetes.SEEN_S", 0.2)

    async def work() -> None:
        async with gateway(kube) as backend:
            kube.faults.is_mute = True
            await backend.put(F)
            assert "function f was written, but the view lags behind" in caplog.text
            assert spec(kube)["image"] == "i:1"
            kube.faults.is_mute = False
            await until(backend, lambda: bool(backend.functions()))

    run(work)


ROLE_RULES = [
    {"apiGroups": ["keystage.dev"], "resources": ["functions"], "verbs": ["list", "watch"]},
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]},
]


def test_missing_rights_are_told_by_account_verb_and_resource(
    kube: Kube, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keystage.gateway.kubernetes.START_S", 0.3)
    who = "system:serviceaccount:keystage:gw"

    async def work() -> None:
        with pytest.raises(
            BackendUnavailable, match=f'within 0.3 s: functions: .*{who}" cannot list'
        ) as caught:
            await KubernetesBackend(kube.cluster(service_account="gw")).start()
        assert 'resource "functions" in API group "keystage.dev"' in str(caught.value)
        role = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role"}
        meta = {"name": "gw", "namespace": FUNCTION_NAMESPACE}
        ref = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "gw"}
        subject = {"kind": "ServiceAccount", "name": "gw", "namespace": "keystage"}
        kube.load(
            {**role, "metadata": meta, "rules": ROLE_RULES},
            {**role, "kind": "RoleBinding", "metadata": meta, "roleRef": ref, "subjects": [subject]},
        )
        async with gateway(kube, "gw") as backend:
            for call, verb, resource in (
                (backend.put(F), "patch", "functions"),
                (backend.secrets(), "list", "secrets"),
                (backend.put_secret("s", b"x", create=True), "create", "secrets"),
            ):
                with pytest.raises(BackendUnavailable, match=f'{who}" cannot {verb} resource "{resource}"'):
                    await call

    run(work)


def test_a_server_that_is_not_there_is_named(kube: Kube, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keystage.gateway.kubernetes.START_S", 0.3)

    async def work() -> None:
        cluster = kube.cluster()
        with kube.outage(), pytest.raises(BackendUnavailable, match=r"no view of the cluster .*127\.0\.0\.1"):
            await KubernetesBackend(cluster).start()

    run(work)


def test_what_the_server_refuses_keeps_its_kind(kube: Kube) -> None:
    async def work() -> None:
        async with gateway(kube) as backend:
            for code, kind in (
                (422, BadRequest),
                (413, TooLarge),
                (429, BackendUnavailable),
                (500, BackendUnavailable),
            ):
                kube.faults.fail(1, code=code, verb="patch", resource="functions")
                with pytest.raises(kind, match="fault asked for by the test"):
                    await backend.put(F)
            kube.faults.fail(3, code=409, verb="patch", resource="functions")
            await backend.put(F)
            kube.faults.fail(9, code=409, verb="patch", resource="functions")
            with pytest.raises(BackendUnavailable, match="changed by others 5 times"):
                await backend.put(F)

    run(work)


@pytest.fixture(autouse=True)
def _well(kube: Kube) -> Iterator[None]:
    """Faults that a test left end before its cluster does."""
    yield
    kube.faults.clear()
