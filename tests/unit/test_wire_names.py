"""Addresses, the secret, and the certificate made of it."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import Encoding

from keystage.wire.address import Address, join_host, node_token, parse, split_host
from keystage.wire.certificate import certificate
from keystage.wire.errors import WireError
from keystage.wire.link import Link, node_identity
from keystage.wire.opening import open_worker, router_address
from keystage.wire.secret import Secret, create_secret, read_secret


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("ipc:///run/a", Address("/run/a")),
        ("tcp://10.0.0.1:70", Address(tcp="10.0.0.1:70")),
        ("ipc:///run/a#node=t", Address("/run/a", node="t")),
        (
            "ipc:///run/a#tcp=[::1]:5&tensors=h.example:6&node=t",
            Address("/run/a", "[::1]:5", "h.example:6", "t"),
        ),
    ],
)
def test_a_name_is_its_parts(text: str, parts: Address) -> None:
    assert parse(text) == parts
    assert parts.text == text


@pytest.mark.parametrize(
    "text",
    [
        "", "ipc://", "udp://a:1", "tcp://a", "tcp://:5", "tcp://a:0", "tcp://a:70000", "tcp://a:٣",
        "ipc:///a#", "ipc:///a#tcp=", "ipc:///a#tcp=x", "ipc:///a#port=1", "ipc:///a#node=a&node=b",
    ],
)  # fmt: skip
def test_any_other_form_is_refused_by_name(text: str) -> None:
    with pytest.raises(WireError, match="address"):
        parse(text)


def test_a_name_without_a_node_is_of_the_readers_node() -> None:
    assert parse("ipc:///a").is_on("t")
    assert parse("ipc:///a#node=t").is_on("t")
    assert not parse("ipc:///a#node=t").is_on("u")
    assert not parse("ipc:///a#node=t").is_on("")


def test_hosts_keep_their_brackets() -> None:
    assert split_host(join_host("::1", 5)) == ("::1", 5)
    assert split_host(join_host("h", 5)) == ("h", 5)


def test_a_node_name_distinguishes_nodes_of_one_machine() -> None:
    assert node_identity() == node_identity()
    assert len({node_identity(), node_identity("a"), node_identity("b")}) == 3
    assert len({node_token(node_identity(name)) for name in ("", "a", "b")}) == 3


def test_a_router_has_one_name_for_neighbours_and_other_nodes() -> None:
    parts = parse(router_address("/run/r", "10.0.0.1:70", "a"))
    assert (parts.ipc, parts.tcp) == ("/run/r", "10.0.0.1:70")
    assert parts.is_on(node_token(node_identity("a")))
    assert not parts.is_on(node_token(node_identity("b")))


@pytest.mark.parametrize("variable", ["KEYSTAGE_WIRE_HOST", "KEYSTAGE_WIRE_BIND"])
def test_who_is_reached_from_elsewhere_needs_the_secret(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KEYSTAGE_WIRE_KEY_FILE", raising=False)
    monkeypatch.setenv(variable, "127.0.0.1")
    with pytest.raises(WireError, match=f"{variable}=127.0.0.1 needs KEYSTAGE_WIRE_KEY_FILE"):
        open_worker("ipc:///tmp/never-bound", 4096)


def test_a_secret_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "key"
    create_secret(path)
    first = path.read_bytes()
    assert path.stat().st_mode & 0o777 == 0o600
    create_secret(path)
    assert path.read_bytes() == first
    assert read_secret(path) == read_secret(path)
    assert first.decode().strip() not in repr(read_secret(path))


@pytest.mark.parametrize(
    ("content", "mode", "named"),
    [
        (b"x" * 32, 0o640, "mode 0640"),
        (b"x" * 32, 0o604, "mode 0604"),
        (b"x" * 31, 0o600, "holds 31 bytes"),
        (b" \n", 0o600, "holds 0 bytes"),
        (b"x" * 5000, 0o600, "expected 32 to 4096"),
    ],
)
def test_a_file_that_is_no_secret_is_refused(tmp_path: Path, content: bytes, mode: int, named: str) -> None:
    path = tmp_path / "key"
    path.write_bytes(content)
    path.chmod(mode)
    with pytest.raises(WireError, match=named):
        read_secret(path)
    path.unlink()
    with pytest.raises(WireError, match="cannot be read"):
        read_secret(path)


def test_every_key_is_another_and_the_same_again() -> None:
    link, again, other = (Link("n", Secret(value)) for value in (b"a" * 32, b"a" * 32, b"b" * 32))
    keys = [link.inbox_keys[1], link.sender_keys[1], link.handshake_key, other.inbox_keys[1]]
    assert len(set(keys)) == 4
    assert (link.inbox_keys, link.sender_keys) == (again.inbox_keys, again.sender_keys)


def test_the_certificate_is_one_that_openssl_reads_and_depends_on_the_secret() -> None:
    made, _ = certificate(Secret(b"a" * 32))
    assert certificate(Secret(b"a" * 32))[0] == made
    assert certificate(Secret(b"b" * 32))[0] != made
    der = made.public_bytes(Encoding.DER)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=der)
    (found,) = context.get_ca_certs(binary_form=True)
    assert found == der
