"""Tensor connections over real sockets: whole tensors, strangers, liars, and peers that die."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from support.processes import wait_for

from keystage.wire import tensor_stream
from keystage.wire.address import Address, join_host
from keystage.wire.api import TensorRef
from keystage.wire.link import Link
from keystage.wire.ring import Ring, RingError
from keystage.wire.secret import Secret
from keystage.wire.sources import TensorSources
from keystage.wire.tensor_server import MAX_STRANGERS, TensorServer
from keystage.wire.tensor_stream import OK, REPLY, REQUEST, receive, welcome

WAIT_S = 10.0


def link(node: str, *, plain: bool, secret: bytes = b"a" * 32) -> Link:
    return Link(node, Secret(secret), "127.0.0.1", is_plain=plain)


class Producer:
    """A ring and its tensor server on node `p`."""

    def __init__(self, *, plain: bool) -> None:
        self.ring = Ring(1 << 23)
        self.server = TensorServer(self.ring, link("p", plain=plain))
        self.name = Address("/nowhere", "127.0.0.1:1", self.server.address, "p").text

    def put(self, data: bytes) -> TensorRef:
        ref = self.ring.write(memoryview(data), "uint8", (len(data),))
        assert ref is not None
        return ref


@pytest.fixture(params=[False, True], ids=["tls", "plain"])
def plain(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def producer(plain: bool) -> Iterator[Producer]:
    found = Producer(plain=plain)
    yield found
    found.server.close()


def fetch(sources: TensorSources, refs: list[TensorRef], owners: list[str]) -> None:
    """Brings tensors as the engine does: begin, sleep on the descriptor, poll."""
    ready: list[bool] = []
    assert sources.begin(refs, owners, lambda: ready.append(True))
    assert sources.fd is not None
    while not ready:
        assert select.select([sources.fd], [], [], WAIT_S)[0], "no arrival in time"
        sources.poll()
    assert not select.select([sources.fd], [], [], 0)[0]  # no wake-up is left over


def fails(sources: TensorSources, ref: TensorRef, owner: str, named: str) -> None:
    fetch(sources, [ref], [owner])
    with pytest.raises(RingError, match=named):
        sources.view(ref, owner)


def test_tensors_come_whole_in_any_number_and_their_buffers_are_used_again(
    producer: Producer, plain: bool
) -> None:
    sources = TensorSources(link("c", plain=plain))
    for size in (0, 1, 1000, 65536, 65537, 3_000_001):
        data = [os.urandom(size) for _ in range(2)]
        refs = [producer.put(part) for part in data]
        fetch(sources, refs, [producer.name] * 2)
        assert [bytes(sources.view(ref, producer.name)) for ref in refs] == data
        for ref in refs:
            sources.release(ref, producer.name)
            producer.ring.ledger.give_back(ref.slot)
    assert producer.ring.ledger.slots == 0
    assert producer.server.refused == 0


def test_a_neighbours_tensor_is_read_where_it_lies(producer: Producer, plain: bool) -> None:
    sources = TensorSources(link("p", plain=plain))
    ref = producer.put(b"abc")
    assert not sources.begin([ref], [producer.name], lambda: None)
    assert bytes(sources.view(ref, producer.name)) == b"abc"


def test_what_was_not_handed_out_is_not_given(producer: Producer, plain: bool) -> None:
    sources = TensorSources(link("c", plain=plain))
    ref = producer.put(b"x" * 100)
    producer.put(b"secret" * 100)
    fails(sources, msgspec.structs.replace(ref, nbytes=500, shape=(500,)), producer.name, "not handed out")
    fails(sources, msgspec.structs.replace(ref, offset=64), producer.name, "not handed out")
    producer.ring.ledger.give_back(ref.slot)
    fails(sources, ref, producer.name, "not handed out")
    ref = producer.put(b"y" * 100)  # the connection has outlived the refusals
    fetch(sources, [ref], [producer.name])
    assert bytes(sources.view(ref, producer.name)) == b"y" * 100


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"nbytes": 1 << 40, "shape": (1 << 40,)}, "the bound is"),
        ({"nbytes": -1}, "the bound is"),
        ({"shape": (7,)}, r"100 bytes with shape \[7\] of uint8"),
        ({"dtype": "object"}, "unknown element type"),
    ],
)
def test_absurd_sizes_are_refused_before_anything_is_asked(
    producer: Producer, plain: bool, change: dict[str, Any], named: str
) -> None:
    sources = TensorSources(link("c", plain=plain))
    fails(sources, msgspec.structs.replace(producer.put(b"x" * 100), **change), producer.name, named)


def test_another_secret_is_refused_at_both_ends(
    producer: Producer, plain: bool, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = TensorSources(link("c", plain=plain, secret=b"b" * 32))
    ref = producer.put(b"x")
    fails(stranger, ref, producer.name, "KEYSTAGE_WIRE_KEY_FILE")
    fetch(TensorSources(link("c", plain=plain)), [ref], [producer.name])
    wait_for(lambda: producer.server.refused == 1, "one refusal")
    assert "refused a tensor connection from 127.0.0.1" in caplog.text


def test_plain_and_tls_do_not_meet(producer: Producer, plain: bool) -> None:
    fails(TensorSources(link("c", plain=not plain)), producer.put(b"x"), producer.name, "KEYSTAGE_WIRE_PLAIN")
    wait_for(lambda: producer.server.refused == 1, "one refusal")


def test_a_producer_without_a_tensor_port_is_named(plain: bool) -> None:
    ref = TensorRef("uint8", (1,), 1, 1, 0, 1, 1)
    fails(TensorSources(link("c", plain=plain)), ref, "ipc:///x#node=p", "KEYSTAGE_WIRE_HOST is not set")


Play = Callable[[socket.socket], None]


def impostor(play: Play, *, plain: bool) -> tuple[str, threading.Thread]:
    """A producer with the right secret that then does as `play` says; (its name, its thread)."""
    listening = socket.create_server(("127.0.0.1", 0))
    host, port = listening.getsockname()

    def serve() -> None:
        accepted, _ = listening.accept()
        with listening, welcome(accepted, link("p", plain=plain), "consumer")[0] as sock:
            receive(sock, REQUEST.size)
            with contextlib.suppress(ConnectionError, ssl.SSLError):  # the consumer may hang up
                play(sock)

    thread = threading.Thread(target=serve)
    thread.start()
    return Address("/x", "", join_host(host, port), "p").text, thread


def _truncate(sock: socket.socket) -> None:
    sock.sendall(REPLY.pack(OK, 100_000) + b"x" * 60_000)


def _too_much(sock: socket.socket) -> None:
    sock.sendall(REPLY.pack(OK, 1 << 60) + b"x" * 100)


def _too_little(sock: socket.socket) -> None:
    sock.sendall(REPLY.pack(OK, 99_999) + b"x" * 99_999)


def _long_refusal(sock: socket.socket) -> None:
    sock.sendall(REPLY.pack(7, 1 << 60))


def _silence(sock: socket.socket) -> None:
    sock.sendall(REPLY.pack(OK, 100_000) + b"x" * 60_000)
    sock.settimeout(WAIT_S)
    sock.recv(1)  # until the consumer gives up


@pytest.mark.parametrize(
    ("play", "named"),
    [
        (_truncate, "ended after 60000 of 100000 bytes"),
        (_too_much, "announces 1152921504606846976 bytes for a tensor of 100000"),
        (_too_little, "announces 99999 bytes for a tensor of 100000"),
        (_long_refusal, "a refusal of 1152921504606846976 bytes"),
        (_silence, "after 60000 of 100000 bytes"),
    ],
)
def test_a_tensor_that_is_not_what_was_asked_for_is_refused(
    plain: bool, play: Play, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_stream, "SILENCE_S", 1.0)
    name, thread = impostor(play, plain=plain)
    sources = TensorSources(link("c", plain=plain))
    fails(sources, TensorRef("uint8", (100_000,), 1, 1, 0, 100_000, 1), name, named)
    sources.forget(name)
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_what_is_on_its_way_from_a_dead_producer_fails_at_once(plain: bool) -> None:
    asked = threading.Event()

    def play(sock: socket.socket) -> None:
        asked.set()
        sock.settimeout(WAIT_S)
        sock.recv(1)

    name, thread = impostor(play, plain=plain)
    sources = TensorSources(link("c", plain=plain))
    ref = TensorRef("uint8", (100_000,), 1, 1, 0, 100_000, 1)
    ready: list[bool] = []
    assert sources.begin([ref], [name], lambda: ready.append(True))
    assert asked.wait(WAIT_S)
    sources.forget(name)
    while not ready:
        assert sources.fd is not None
        assert select.select([sources.fd], [], [], tensor_stream.SILENCE_S / 2)[0]
        sources.poll()
    with pytest.raises(RingError, match="slot 1 of"):
        sources.view(ref, name)
    thread.join(WAIT_S)


def test_strangers_that_say_anything_are_cut_off(producer: Producer, plain: bool) -> None:
    del plain
    host, _, port = producer.server.address.rpartition(":")
    for words in (b"GET / HTTP/1.1\r\n\r\n" * 10, os.urandom(200), b"KSTN\xff\xff" + bytes(200)):
        with socket.create_connection((host, int(port)), WAIT_S) as sock:
            sock.sendall(words)
            answered = b""
            try:
                while part := sock.recv(1000):
                    answered += part
            except ConnectionResetError:
                pass
            assert len(answered) < 200  # an alert or a greeting at most
    ref = producer.put(b"fine")
    sources = TensorSources(link("c", plain=producer.server._link.is_plain))
    fetch(sources, [ref], [producer.name])
    assert bytes(sources.view(ref, producer.name)) == b"fine"
    wait_for(lambda: producer.server.refused == 3, "three refusals")


def test_silent_strangers_take_no_consumers_place_and_fill_no_log(
    producer: Producer, plain: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_stream, "SILENCE_S", 600.0)
    host, _, port = producer.server.address.rpartition(":")
    with contextlib.ExitStack() as stack:
        strangers = [
            stack.enter_context(socket.create_connection((host, int(port)), WAIT_S))
            for _ in range(3 * MAX_STRANGERS)
        ]
        ref = producer.put(b"fine")
        sources = TensorSources(link("c", plain=plain))
        fetch(sources, [ref], [producer.name])
        assert bytes(sources.view(ref, producer.name)) == b"fine"
        # The oldest are cut off without waiting for their time-out; the newest may stay.
        least = 2 * MAX_STRANGERS
        wait_for(lambda: producer.server.refused >= least, "the oldest are refused")
        assert strangers[0].recv(1) == b""
        named = [line for line in caplog.messages if "refused a tensor connection" in line]
        assert len(named) == 1
    wait_for(lambda: not producer.server._strangers, "all have gone")
