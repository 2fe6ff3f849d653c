"""The client facade: where it connects to, what it sends, how errors and broken answers come out."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest
from kubernetes.client import ApiClient, Configuration
from support.kube.cluster import FUNCTION_NAMESPACE, Kube

from keystage.kubernetes.answers import error_of, lines, parameters, query_text
from keystage.kubernetes.client import FUNCTIONS, NODES, PODS, SECRETS, Cluster, Kind, connect
from keystage.kubernetes.errors import (
    ClusterError,
    ClusterUnavailable,
    Conflict,
    Forbidden,
    Gone,
    Invalid,
    NotFound,
)


@pytest.fixture(scope="module")
def kube() -> Iterator[Kube]:
    made = Kube()
    made.face.bookmark_s = 0.05
    made.start()
    yield made
    made.stop()


class Scripted:
    """A server that answers every request with the same bytes, then closes; it keeps what it was sent."""

    def __init__(self, answer: bytes) -> None:
        self.asked: list[bytes] = []
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        port = self._listener.getsockname()[1]
        configuration = Configuration(host=f"http://127.0.0.1:{port}")
        configuration.retries = False
        self.api = ApiClient(configuration)
        self.cluster = Cluster(self.api, "ns", timeout_s=2.0)

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                self.asked.append(_whole(connection))
                connection.sendall(self._answer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        self.api.close()


def _whole(connection: socket.socket) -> bytes:
    """A request with all of its body."""
    text = b""
    while b"\r\n\r\n" not in text:
        text += connection.recv(65536)
    head, _, body = text.partition(b"\r\n\r\n")
    named = re.search(rb"content-length: (\d+)", head.lower())
    while named is not None and len(body) < int(named[1]):
        body += connection.recv(65536)
    return head + b"\r\n\r\n" + body


def http(status: int, body: bytes, length: int | None = None) -> bytes:
    told_bytes = len(body) if length is None else length
    head = f"HTTP/1.1 {status} X\r\nConnection: close\r\nContent-Length: {told_bytes}\r\n\r\n"
    return head.encode() + body


def chunked(*parts: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)


# --- where it connects to


def test_a_kubeconfig_says_where_and_as_whom(kube: Kube, tmp_path: Path) -> None:
    api = connect(kube.kubeconfig(tmp_path / "config"))
    try:
        assert api.configuration.host == kube.url
        assert Cluster(api, FUNCTION_NAMESPACE).list(FUNCTIONS).items == []
    finally:
        api.close()


def test_a_context_that_is_not_there_is_told(kube: Kube, tmp_path: Path) -> None:
    with pytest.raises(ClusterUnavailable, match="no cluster to talk to"):
        connect(kube.kubeconfig(tmp_path / "config"), context="other")


def test_without_any_configuration_there_is_no_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setattr(
        "kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "absent")
    )
    with pytest.raises(ClusterUnavailable, match="no cluster to talk to"):
        connect()
    with pytest.raises(ClusterUnavailable):
        connect(tmp_path / "absent")


def test_the_token_is_asked_for_before_every_exchange(kube: Kube) -> None:
    api = kube.api_client()
    cluster = Cluster(api, FUNCTION_NAMESPACE)
    tokens = iter(["stale", "stale", kube.api_client().configuration.api_key["authorization"][7:]])

    def renew(configuration: Configuration) -> None:
        configuration.api_key["authorization"] = f"Bearer {next(tokens)}"

    api.configuration.refresh_api_key_hook = renew
    for _ in range(2):
        with pytest.raises(Forbidden, match="401"):
            cluster.list(FUNCTIONS)
    assert cluster.list(FUNCTIONS).items == []


# --- what it sends


def test_names_are_quoted_and_the_namespace_is_in_the_path() -> None:
    with Scripted(http(200, b"{}")) as server:
        server.cluster.get(PODS, "a/../b")
        server.cluster.get(NODES, "n")
        server.cluster.within("other").get(FUNCTIONS, "f")
        server.cluster.list(SECRETS, labels="a=b,c in (d,e)")
        lines_asked = [asked.split(b"\r\n")[0].decode() for asked in server.asked]
    assert lines_asked == [
        "GET /api/v1/namespaces/ns/pods/a%2F..%2Fb HTTP/1.1",
        "GET /api/v1/nodes/n HTTP/1.1",
        "GET /apis/keystage.dev/v1/namespaces/other/functions/f HTTP/1.1",
        "GET /api/v1/namespaces/ns/secrets?labelSelector=a%3Db%2Cc%20in%20%28d%2Ce%29 HTTP/1.1",
    ]


def test_a_deletion_names_object_grace_and_background() -> None:
    with Scripted(http(200, b"{}")) as server:
        server.cluster.delete(PODS, "p", uid="u", grace_s=0)
        body = json.loads(server.asked[0].partition(b"\r\n\r\n")[2])
    assert body["preconditions"] == {"uid": "u"}
    assert body["gracePeriodSeconds"] == 0
    assert body["propagationPolicy"] == "Background"


@pytest.mark.parametrize(
    ("call", "content"),
    [
        ("patch", "merge-patch+json"),
        ("patch_strategic", "strategic-merge-patch+json"),
        ("apply", "apply-patch+yaml"),
    ],
)
def test_each_sort_of_patch_has_its_type_and_manager(call: str, content: str) -> None:
    with Scripted(http(200, b"{}")) as server:
        getattr(server.cluster, call)(PODS, "p", {}, manager="me", subresource="resize")
        head = server.asked[0].decode()
    assert head.startswith("PATCH /api/v1/namespaces/ns/pods/p/resize?fieldManager=me")
    assert f"application/{content}" in head


# --- errors


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, Invalid),
        (401, Forbidden),
        (403, Forbidden),
        (404, NotFound),
        (405, ClusterError),
        (409, Conflict),
        (410, Gone),
        (422, Invalid),
        (429, ClusterUnavailable),
        (500, ClusterUnavailable),
        (503, ClusterUnavailable),
        (504, ClusterUnavailable),
    ],
)
def test_every_status_has_its_error(status: int, kind: type[ClusterError]) -> None:
    error = error_of(status, {"message": "words"}, "GET /x")
    assert type(error) is kind
    assert (error.status, str(error)) == (status, f"GET /x answered {status}: words")


def test_another_object_of_that_name_is_a_conflict() -> None:
    told = {"message": "m", "details": {"causes": [{"field": "metadata.uid", "reason": "FieldValueInvalid"}]}}
    assert type(error_of(422, told, "x")) is Conflict
    assert type(error_of(422, {"details": {"causes": [{"field": "spec"}]}}, "x")) is Invalid
    assert "no reason given" in str(error_of(422, {}, "x"))


def test_what_the_server_says_is_told(kube: Kube) -> None:
    with pytest.raises(NotFound, match=r'functions\.keystage\.dev "absent" not found') as told:
        kube.cluster().get(FUNCTIONS, "absent")
    assert told.value.status == 404
    kube.faults.fail(code=503)
    with pytest.raises(ClusterUnavailable, match="503: fault asked for"):
        kube.cluster().list(FUNCTIONS)
    kube.faults.fail(code=429)
    with pytest.raises(ClusterUnavailable, match="429"):
        kube.cluster().list(FUNCTIONS)
    with pytest.raises(NotFound):
        kube.cluster().list(Kind("absent.dev/v1", "things"))


def test_nobody_there_is_unavailable(kube: Kube) -> None:
    cluster = kube.cluster()
    assert cluster.list(FUNCTIONS).version
    with kube.outage(), pytest.raises(ClusterUnavailable):
        cluster.list(FUNCTIONS)
    assert cluster.list(FUNCTIONS).version  # on a new connection


def test_silence_is_bounded(kube: Kube) -> None:
    kube.faults.delay(1.0)
    with pytest.raises(ClusterUnavailable, match="timed out"):
        Cluster(kube.api_client(), FUNCTION_NAMESPACE, timeout_s=0.1).list(FUNCTIONS)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (http(200, b"not json"), "no JSON"),
        (http(200, b"[]"), "no JSON"),
        (http(200, b"{}", length=50), "GET"),
        (b"", "GET"),
        (b"garbage\r\n\r\n", "GET"),
    ],
    ids=["text", "list", "cut", "nothing", "garbage"],
)
def test_an_answer_that_is_none_is_unavailable(answer: bytes, words: str) -> None:
    with Scripted(answer) as server, pytest.raises(ClusterUnavailable, match=words):
        server.cluster.get(PODS, "p")


def test_an_error_that_is_no_status_is_told_as_text() -> None:
    with Scripted(http(502, b"<html>bad gateway</html>")) as server:
        with pytest.raises(ClusterUnavailable, match="502: <html>bad gateway"):
            server.cluster.get(PODS, "p")
        with pytest.raises(ClusterUnavailable, match="502: <html>bad gateway"):
            list(server.cluster.watch(PODS, "1"))
    with Scripted(http(502, b"<html>", length=50)) as server, pytest.raises(ClusterUnavailable):
        list(server.cluster.watch(PODS, "1"))


# --- watches


def test_a_watch_gives_whole_lines_however_they_are_cut() -> None:
    event = b'{"type":"ADDED","object":{"metadata":{"name":"a"}}}'
    with Scripted(chunked(event[:10], event[10:] + b"\n\n" + event, b"\n") + b"0\r\n\r\n") as server:
        found = list(server.cluster.watch(PODS, "1"))
    assert [(e.type, e.object["metadata"]["name"]) for e in found] == [("ADDED", "a")] * 2


def test_a_watch_that_breaks_gives_what_came_before() -> None:
    event = b'{"type":"ADDED","object":{}}\n'
    with Scripted(chunked(event)) as server:
        stream = server.cluster.watch(PODS, "1")
        assert next(stream).type == "ADDED"
        with pytest.raises(ClusterUnavailable, match="watch of pods broke"):
            next(stream)


@pytest.mark.parametrize("line", [b"not json\n", b'{"kind": "x"}\n', b"[]\n"])
def test_a_watch_that_is_garbled_is_unavailable(line: bytes) -> None:
    answer = chunked(line) + b"0\r\n\r\n"
    with Scripted(answer) as server, pytest.raises(ClusterUnavailable, match="garbled"):
        list(server.cluster.watch(PODS, "1"))


def test_an_error_in_a_watch_is_that_error(kube: Kube) -> None:
    cluster = kube.cluster()
    version = cluster.list(FUNCTIONS).version
    kube.registry.store.compact()
    with pytest.raises(Gone, match="too old resource version"):
        list(cluster.watch(FUNCTIONS, version, timeout_s=1))


def test_a_watch_that_is_dropped_is_unavailable(kube: Kube) -> None:
    cluster = kube.cluster()
    stream = cluster.watch(FUNCTIONS, cluster.list(FUNCTIONS).version)
    assert next(stream).type == "BOOKMARK"
    kube.faults.drop_watches()
    with pytest.raises(ClusterUnavailable, match="watch of functions broke"):
        list(stream)


def test_another_thread_can_end_a_watch(kube: Kube) -> None:
    cluster = kube.cluster()
    ends = []
    stream = cluster.watch(FUNCTIONS, cluster.list(FUNCTIONS).version, opened=ends.append)
    assert next(stream).type == "BOOKMARK"
    ends[0]()
    began_s = time.monotonic()
    with contextlib.suppress(ClusterUnavailable):
        list(stream)
    assert time.monotonic() - began_s < 10  # by itself it would go on for 50 s


# --- the pieces


def test_lines_and_queries() -> None:
    assert list(lines([b"a\nb", b"c\n", b"\n  \n", b"d"])) == [b"a", b"bc", b"d"]
    assert list(lines([])) == []
    assert parameters(a="1", b="", c="x y") == {"a": "1", "c": "x y"}
    assert query_text({"a": "1", "c": "x y&"}) == "?a=1&c=x%20y%26"
    assert query_text({}) == ""
