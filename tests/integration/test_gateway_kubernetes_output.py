"""What the gateway's backend does with secrets and output of pods, over the fake API server."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator

import msgspec
import pytest
from support.gateway_backends import F, gateway, run, serve, until
from support.kube.cluster import Kube
from support.kube.fixtures import kube as kube

from keystage.gateway.backend import (
    AlreadyDeployed,
    BackendUnavailable,
    BadRequest,
    UnknownSecret,
)
from keystage.gateway.queries import LogQuery
from keystage.gateway.rest_logs import LogLines
from keystage.kubernetes.api import (
    FUNCTION_LABEL,
    SECRET_LABEL,
)
from keystage.kubernetes.client import PODS, SECRETS


def test_secrets_of_others_are_neither_seen_nor_touched(kube: Kube) -> None:
    async def work() -> None:
        async with gateway(kube) as backend:
            theirs = {"metadata": {"name": "theirs"}, "data": {"k": "eA=="}}
            kube.cluster().create(SECRETS, theirs, manager="kubectl")
            assert await backend.secrets() == []
            with pytest.raises(AlreadyDeployed, match="secret theirs exists already"):
                await backend.put_secret("theirs", b"y", create=True)
            with pytest.raises(UnknownSecret, match=f"secret theirs .* lacks the label {SECRET_LABEL}"):
                await backend.put_secret("theirs", b"y", create=False)
            with pytest.raises(UnknownSecret, match="secret theirs "):
                await backend.delete_secret("theirs")
            with pytest.raises(BadRequest, match="function f: secret theirs does not exist"):
                await backend.put(msgspec.structs.replace(F, secrets=["theirs"]))
            assert kube.get("secrets", "theirs")["data"] == {"k": "eA=="}
            kube.patch("secrets", "theirs", {"metadata": {"labels": {SECRET_LABEL: "true"}}})
            assert await backend.secrets() == ["theirs"]
            await backend.put(msgspec.structs.replace(F, secrets=["theirs"]))

    run(work)


def test_a_secret_is_one_key_of_its_own_name_and_what_is_locked_stays(kube: Kube) -> None:
    async def work() -> None:
        async with gateway(kube) as backend:
            await backend.put_secret("a.b", b"\x00\xff", create=True)
            made = kube.get("secrets", "a.b")
            assert {key: base64.b64decode(value) for key, value in made["data"].items()} == {
                "a.b": b"\x00\xff"
            }
            await asyncio.gather(
                *(backend.put_secret("a.b", bytes([n]), create=False) for n in range(1, 9)),
                return_exceptions=True,
            )
            assert base64.b64decode(kube.get("secrets", "a.b")["data"]["a.b"]) in {
                bytes([n]) for n in range(1, 9)
            }
            kube.patch("secrets", "a.b", {"immutable": True})
            with pytest.raises(BadRequest, match="immutable") as caught:
                await backend.put_secret("a.b", b"password", create=False)
            assert "password" not in str(caught.value)
            assert base64.b64encode(b"password").decode() not in str(caught.value)

    run(work)


def test_output_of_several_pods_is_in_order_of_time_and_a_lost_pod_has_none(
    kube: Kube, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        async with gateway(kube) as backend:
            await backend.put(F)
            for name in ("f-0", "f-1", "f-2"):
                serve(kube, name)
            container = {"name": "function", "image": "i"}
            pending = {"metadata": {"name": "f-3", "labels": {FUNCTION_LABEL: "f"}}}
            kube.cluster().create(PODS, {**pending, "spec": {"containers": [container]}}, manager="t")
            await until(backend, lambda: len(backend._view.pods.get("f", [])) == 4)
            for turn in range(6):
                pod = kube.get("pods", f"f-{turn % 3}")
                kube.logs.write(pod, f"line {turn}", at_s=1_800_000_000 + turn)
            kube.cluster().delete(PODS, "f-1")  # leaves, and still prints
            kube.kubelet.waiting("f-3", "ImagePullBackOff", "no such image")
            lines = await backend.logs("f", tail=None, since_s=0.0)
            assert [(line.replica, line.text) for line in lines] == [
                (f"f-{n % 3}", f"line {n}") for n in range(6)
            ]
            assert [line.at_s for line in lines] == [1_800_000_000.0 + n for n in range(6)]
            assert [line.text for line in await backend.logs("f", tail=2, since_s=0.0)] == [
                "line 4",
                "line 5",
            ]
            late = await backend.logs("f", tail=None, since_s=1_800_000_003.0)
            assert [line.text for line in late] == ["line 4", "line 5"]
            kube.faults.is_mute = True  # the view does not hear that it goes
            kube.kubelet.ended("f-1")
            left = await backend.logs("f", tail=None, since_s=0.0)
            assert {line.replica for line in left} == {"f-0", "f-2"}
            kube.faults.fail(1, code=503, verb="get", resource="pods/log")
            assert await backend.logs("f", tail=None, since_s=0.0)
            assert "cannot be read: GET /api/v1/namespaces/keystage-fn/pods/f-" in caplog.text
            kube.faults.fail(9, code=503, verb="get", resource="pods/log")
            with pytest.raises(BackendUnavailable, match="pods/f-"):
                await backend.logs("f", tail=None, since_s=0.0)

    run(work)


def test_followed_output_misses_no_line_that_comes_late_and_repeats_none(kube: Kube) -> None:
    async def work() -> None:
        async with gateway(kube) as backend:
            await backend.put(F)
            for name in ("f-0", "f-1"):
                serve(kube, name)
            await until(backend, lambda: len(backend._view.pods.get("f", [])) == 2)
            one, two = kube.get("pods", "f-0"), kube.get("pods", "f-1")
            start_s = 1_800_000_000.0
            kube.logs.write(one, "a", at_s=start_s)
            lines = LogLines(backend, "f", LogQuery.parse({"name": "f", "follow": "1"}))
            await lines.begin()
            assert [line.text for line in lines._first] == ["a"]
            kube.logs.write(one, "c", at_s=start_s + 0.9)
            assert [line.text for line in await lines._read(None)] == ["c"]
            kube.logs.write(two, "b", at_s=start_s + 0.5)  # older than what was sent of the other
            kube.logs.write(one, "d", at_s=start_s + 1.0)
            assert [line.text for line in await lines._read(None)] == ["b", "d"]
            assert await lines._read(None) == []
            newest = LogLines(backend, "f", LogQuery.parse({"name": "f", "follow": "1", "tail": "1"}))
            await newest.begin()
            assert [line.text for line in newest._first] == ["d"]
            assert await newest._read(None) == []  # what was cut off stays so

    run(work)


def test_usage_without_metrics_is_zero_and_the_log_says_why(
    kube: Kube, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        async with gateway(kube) as backend:
            await backend.put(F)
            usage = await backend.usage("f")
            assert (usage.cpu_cores, usage.memory_bytes) == (0.0, 0)
            assert "usage of function f is not known, 0 is shown: GET /apis/metrics.k8s.io" in caplog.text

    run(work)


@pytest.fixture(autouse=True)
def _well(kube: Kube) -> Iterator[None]:
    """Faults that a test left end before its cluster does."""
    yield
    kube.faults.clear()


@pytest.mark.slow
def test_output_that_a_node_does_not_give_holds_up_no_request_that_waits(kube: Kube) -> None:
    async def work() -> None:
        async with gateway(kube) as backend:
            await backend.put(F)
            serve(kube, "f-0")
            await until(backend, lambda: len(backend._view.pods.get("f", [])) == 1)
            kube.faults.delay(3.0, 16, verb="get", resource="pods/log")
            reads = [asyncio.create_task(backend.logs("f", tail=1, since_s=0.0)) for _ in range(16)]
            await asyncio.sleep(0)  # all of them are begun
            await backend.wake("f")
            assert not any(read.done() for read in reads)
            await asyncio.gather(*reads)

    run(work)
