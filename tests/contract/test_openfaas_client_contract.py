"""The client of the OpenFaaS API, over Keystage's own gateway and stand-ins for stock ones.

`keystage` is the real gateway with supervisor and controller. `openfaas-ce`, `faasd` and `openfaas-pro` are
stand-ins that answer as those are documented to; the first has real processes, too.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import shutil
import socket
import ssl
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from support.local_function import PYTHON, function
from support.openfaas_standin import PASSWORD, PRIVATE, USER, Imagined, StandIn
from support.openfaas_world import IMAGE, OwnGateway, Processes

from keystage.local.api import Deployment
from keystage.openfaas import client as client_module
from keystage.openfaas.client import Client
from keystage.openfaas.errors import (
    BadAnswer,
    Failed,
    NotFound,
    OpenFaasError,
    Refused,
    Unauthorised,
    Unreachable,
    Unverified,
)
from keystage.openfaas.exchange import Credentials, Wire
from keystage.openfaas.provider import kind_of
from keystage.openfaas.types import FunctionStatus

KINDS = ["keystage", "openfaas-ce", "openfaas-pro", "faasd"]
REAL = ["keystage", "openfaas-ce"]


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="kso-", dir="/tmp"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(params=KINDS)
def client(request: pytest.FixtureRequest, folder: Path) -> Iterator[Client]:
    yield from made(request.param, folder)


@pytest.fixture(params=REAL)
def real(request: pytest.FixtureRequest, folder: Path) -> Iterator[Client]:
    yield from made(request.param, folder)


def made(kind: str, folder: Path) -> Iterator[Client]:
    if kind == "keystage":
        own = OwnGateway(folder)
        yield own.client
        own.end()
        return
    processes = Processes(folder) if kind == "openfaas-ce" else None
    gateway = StandIn(kind, processes or Imagined())
    yield client_of(gateway)
    gateway.end()
    if processes is not None:
        processes.end()


@pytest.fixture
def ce() -> Iterator[StandIn]:
    gateway = StandIn("openfaas-ce")
    yield gateway
    gateway.end()


def client_of(gateway: StandIn, password: str = PASSWORD) -> Client:
    return Client(Wire(gateway.url, Credentials(USER, password), 10.0))


def plain(name: str = "echo", **labels: str) -> Deployment:
    return msgspec.structs.replace(function(name), image=IMAGE, labels=labels)


def until(client: Client, name: str, holds: Callable[[FunctionStatus], bool]) -> FunctionStatus:
    end_s = time.monotonic() + 30
    while not holds(told := client.describe(name)):
        assert time.monotonic() < end_s, told
        time.sleep(0.02)
    return told


# ---------------------------------------------------------------- every gateway


def test_who_answers_is_recognised(client: Client, request: pytest.FixtureRequest) -> None:
    expected = request.node.callspec.params["client"]
    assert kind_of(client.info()) == expected
    assert client.namespaces() == ["openfaas-fn"]


def test_functions_are_created_updated_listed_described_and_removed(client: Client) -> None:
    assert client.functions() == []
    assert client.deploy(plain()) == "created"
    changed = msgspec.structs.replace(plain(colour="blue"), envVars={"COLOUR": "blue"})
    assert client.deploy(changed) == "updated"
    (listed,) = client.functions()
    told = client.describe("echo")
    for seen in (listed, told):
        assert (seen.name, seen.image, seen.envVars["COLOUR"]) == ("echo", IMAGE, "blue")
        assert seen.labels["colour"] == "blue"
    until(client, "echo", lambda f: f.availableReplicas > 0)
    until(client, "echo", lambda f: f.replicas == 1)  # what the update replaces may count for a moment
    client.delete("echo")
    assert client.functions() == []


def test_what_is_not_there_is_not_found(client: Client) -> None:
    for ask in (
        lambda: client.describe("no"),
        lambda: client.delete("no"),
        lambda: client.scale("no", 2),
        lambda: client.delete_secret("no"),
    ):
        with pytest.raises(NotFound, match="no"):
            ask()


def test_wrong_credentials_are_named_and_not_repeated(client: Client) -> None:
    for credentials in (None, Credentials("admin", "hunter2"), Credentials("eve", "hunter2")):
        wrong = Client(with_other(client.wire, credentials))
        with pytest.raises(Unauthorised, match="credentials are missing or wrong") as caught:
            wrong.functions()
        assert caught.value.status == 401
        assert "hunter2" not in str(caught.value) + repr(wrong.wire)


def with_other(wire: Wire, credentials: Credentials | None) -> Wire:
    return Wire(wire.url, credentials, wire.timeout_s)


def test_secrets_are_made_replaced_listed_and_removed(client: Client) -> None:
    assert client.put_secret("token", "one") == "created"
    assert client.put_secret("token", "two") == "updated"
    assert [secret.name for secret in client.secrets()] == ["token"]
    client.deploy(msgspec.structs.replace(plain(), secrets=["token"]))
    assert client.describe("echo").secrets == ["token"]
    client.delete("echo")
    client.delete_secret("token")
    assert client.secrets() == []


def test_a_secret_that_is_not_there_refuses_a_new_function(client: Client) -> None:
    with pytest.raises(Refused, match="absent"):
        client.deploy(msgspec.structs.replace(plain(), secrets=["absent"]))
    assert client.functions() == []


# ---------------------------------------------------------------- gateways with real processes


@pytest.mark.slow
def test_replicas_follow_a_scale_request_and_answer(real: Client) -> None:
    real.deploy(plain())
    real.scale("echo", 2)
    until(real, "echo", lambda f: (f.replicas, f.availableReplicas) == (2, 2))
    status, body = real.get("echo", "/some/path?a=1")
    assert status == 200
    assert msgspec.json.decode(body)["path"] == "/some/path"


def test_logs_are_read(real: Client) -> None:
    talk = PYTHON + " -c \"print('one'); print('two'); print('three'); import time; time.sleep(60)\""
    real.deploy(Deployment(service="talk", image=IMAGE, envProcess="env PYTHONUNBUFFERED=1 " + talk))
    end_s = time.monotonic() + 30
    while len(lines := real.logs("talk")) < 3:
        assert time.monotonic() < end_s, lines
        time.sleep(0.02)
    assert [line.text.rpartition("|")[2] for line in lines] == ["one", "two", "three"]
    assert len(real.logs("talk", tail=1)) == 1


# ---------------------------------------------------------------- what successes hide


def test_an_update_answered_200_that_changed_nothing_is_an_error(
    ce: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "VERIFY_S", 0.2)
    client = client_of(ce)
    client.deploy(plain())
    private = msgspec.structs.replace(plain(), image=PRIVATE + "x:1", envVars={"A": "1"})
    with pytest.raises(Unverified, match=r"function echo was answered 200, .* another image, environment:"):
        client.deploy(private)
    assert ce.deployed["echo"].image == IMAGE
    assert ce.asked.count("PUT /system/functions") == 1


def test_an_update_answered_200_that_shows_is_a_success() -> None:
    gateway = StandIn("faasd")
    client = client_of(gateway)
    client.deploy(plain())
    assert client.deploy(plain(colour="blue")) == "updated"
    assert client.describe("echo").labels["colour"] == "blue"
    gateway.end()


@pytest.mark.parametrize(("before", "least", "after"), [(4, "2", 4), (2, "3", 3), (1, "1", 1)])
def test_an_update_keeps_the_replicas(ce: StandIn, before: int, least: str, after: int) -> None:
    client = client_of(ce)
    client.deploy(plain())
    client.scale("echo", before)
    client.deploy(plain(**{"com.openfaas.scale.min": least}))
    assert ce.replicas["echo"] == after


@pytest.mark.slow
def test_our_own_gateway_gets_no_wish_by_an_update(folder: Path) -> None:
    own = OwnGateway(folder)
    try:
        own.client.deploy(plain(**{"com.openfaas.scale.min": "2"}))
        until(own.client, "echo", lambda f: f.replicas == 2)
        own.client.deploy(plain(**{"com.openfaas.scale.min": "1"}))
        assert own.local.function("echo").override is None
    finally:
        own.end()


def test_the_community_edition_takes_fifteen_functions_and_five_replicas(ce: StandIn) -> None:
    client = client_of(ce)
    for number in range(15):
        client.deploy(plain(f"f{number}"))
    with pytest.raises(Refused, match="answered 400: unable to create function, maximum: 15") as caught:
        client.deploy(plain("f15"))
    assert caught.value.status == 400
    client.scale("f0", 9)
    client.scale("f1", 0)
    assert (client.describe("f0").replicas, client.describe("f1").replicas) == (5, 1)


def test_a_failure_to_scale_what_exists_stays_a_failure(ce: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    client = client_of(ce)
    client.deploy(plain())
    monkeypatch.setattr(ce, "scale", lambda *_: (500, "unable to update function deployment: echo"))
    with pytest.raises(Failed, match=r"answered 500: unable to update function deployment: echo$"):
        client.scale("echo", 3)


# ---------------------------------------------------------------- bad answers


@pytest.mark.parametrize(
    ("answer", "kind", "text"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", BadAnswer, "what the API does not know"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", BadAnswer, "Expected `array`"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n[", Unreachable, "was cut off 98 bytes before"),
        (b"HTTP/1.1 301 Moved\r\nContent-Length: 0\r\nLocation: https://x\r\n\r\n", Refused, "answered 301"),
        (b"HTTP/1.1 502 Bad\r\nContent-Length: 0\r\n\r\n", Failed, "answered 502 without a body"),
        (b"\r\n\r\n", Unreachable, "got no answer"),
        (b"", Unreachable, "got no answer"),
    ],
)
def test_answers_that_are_none_have_a_name(answer: bytes, kind: type[OpenFaasError], text: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(kind, match=text) as caught:
            Client(Wire(url, timeout_s=5.0)).functions()
        thread.join(5)
    assert f"GET {url}/system/functions" in str(caught.value)


def test_silence_is_not_waited_for_without_bound() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(Unreachable, match="timed out"):
            Client(Wire(url, timeout_s=0.05)).info()


@pytest.mark.parametrize("told", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9000\r\n\r\n"])
def test_an_answer_that_trickles_is_not_waited_for_beyond_the_bound(told: bytes) -> None:
    """Each byte comes in time, the head's or the body's; the answer would take two minutes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ended = threading.Event()

        def trickle() -> None:
            peer, _ = server.accept()
            with peer, contextlib.suppress(OSError):
                peer.sendall(told)
                for _ in range(6000):
                    if ended.wait(0.02):
                        return
                    peer.sendall(b"x")

        thread = threading.Thread(target=trickle)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        begun_s = time.monotonic()
        with pytest.raises(Unreachable, match="timed out"):
            Client(Wire(url, timeout_s=0.2)).info()
        assert time.monotonic() - begun_s < 10.0
        ended.set()
        thread.join(5)


@pytest.mark.parametrize(
    "url",
    [
        *("", "gateway:8080", "ftp://x", "http://", "http://x:99999", "http://x?y", "http://u:secret@x"),
        *("http://[::1", "http://u:secret@[::1", "u:secret@x", "http://[x]:secret@y"),
        *("http://a b", "http://a\tb", "http://ab\n", " http://ab", "http://a\u00a0b", "http://a\0b"),
    ],
)
def test_addresses_that_are_none_are_refused_without_repeating_a_password(url: str) -> None:
    with pytest.raises(OpenFaasError) as caught:
        Wire(url)
    assert "secret" not in str(caught.value)


def certificate(folder: Path) -> Path:
    """A self-signed certificate for localhost with its key, in one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = dt.datetime.now(dt.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + dt.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    file = folder / "certificate.pem"
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    file.write_bytes(made.public_bytes(pem) + private)
    return file


def test_certificates_are_verified(ce: StandIn, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = certificate(folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)
    ce._server.socket = context.wrap_socket(ce._server.socket, server_side=True)
    port = ce.url.rpartition(":")[2]
    client = Client(Wire(f"https://localhost:{port}", Credentials(USER, PASSWORD), 10.0))
    with pytest.raises(Unreachable, match="certificate verify failed"):
        client.functions()
    assert ce.asked == []
    monkeypatch.setenv("SSL_CERT_FILE", str(file))
    assert client.functions() == []
