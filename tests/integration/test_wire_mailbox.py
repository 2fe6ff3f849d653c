"""Inboxes that other nodes reach: CURVE on tcp, none on ipc, and nobody without the secret."""

from __future__ import annotations

import contextlib
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from support.processes import wait_for
from zmq.utils.monitor import recv_monitor_message

from keystage.wire import api
from keystage.wire.address import parse
from keystage.wire.errors import WireError
from keystage.wire.link import Link
from keystage.wire.mailbox import MOST_SENDERS, Mailbox
from keystage.wire.ring import Ring
from keystage.wire.secret import Secret
from keystage.worker.executor import Activation
from keystage.worker.outbox import CARRIED_BYTES, TensorOutbox

OURS, OTHER = Secret(b"a" * 32), Secret(b"b" * 32)


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ks", dir="/tmp") as name:
        yield Path(name)


def on(node: str, secret: Secret = OURS) -> Link:
    return Link(node, secret, "127.0.0.1")


def received(mailbox: Mailbox, timeout_s: float = 10.0) -> list[tuple[str, api.ToWorker, bytes | None]]:
    until_s = time.monotonic() + timeout_s
    while mailbox.wait(max(0.0, until_s - time.monotonic())):  # may end with half a message there
        found = [(sender, api.decode_to_worker(body), part) for sender, body, part in mailbox.drain()]
        if found:
            return found
    return []


def test_nodes_talk_over_tcp_and_neighbours_over_ipc(folder: Path) -> None:
    a, b, c = (
        Mailbox(f"ipc://{folder}/{name}", link=on(node))
        for name, node in (("a", "n"), ("b", "m"), ("c", "n"))
    )
    # Without their sockets neighbours are lost to each other, other nodes are not.
    (folder / "a").unlink()
    b.send(a.address, api.Ack([1]), memoryview(b"tensor"))
    assert received(a) == [(b.address, api.Ack([1]), b"tensor")]
    a.send(b.address, api.Ack([2]))
    assert received(b) == [(a.address, api.Ack([2]), None)]
    c.send(a.address, api.Ack([3]))
    assert received(a, 0.2) == []
    a.send(c.address, api.Ack([4]))
    assert received(c) == [(a.address, api.Ack([4]), None)]
    assert [box.refused for box in (a, b, c)] == [0, 0, 0]
    for box in (a, b, c):
        box.close()


def test_a_small_tensor_comes_with_its_message_to_another_node_and_keeps_its_slot(folder: Path) -> None:
    a, far, near = (
        Mailbox(f"ipc://{folder}/{name}", link=on(node))
        for name, node in (("a", "n"), ("b", "m"), ("c", "n"))
    )
    ring = Ring(1 << 20)
    outbox = TensorOutbox(a, ring)

    def step(ref: api.TensorRef) -> api.Step:
        rows = api.StepRows([1], [1], [0], [1], [True], [1], [0.0], [1.0], [0])
        return api.Step(1, 1, 1, "", ["a", "b"], ["", ""], a.address, rows, [], ref)

    for receiver, size, is_carried in (
        (far, CARRIED_BYTES, True),
        (far, CARRIED_BYTES + 1, False),
        (near, 10, False),
    ):
        data = bytes(range(256)) * (size // 256 + 1)
        outbox.push(receiver.address, Activation("uint8", (size,), memoryview(data)[:size]), step)
        ((sender, message, payload),) = received(receiver)
        assert (sender, payload) == (a.address, data[:size] if is_carried else None)
        assert isinstance(message, api.Step)
        assert message.ref is not None
        assert message.ref.nbytes == size
        assert ring.ledger.slots == 1
        outbox.acknowledge([message.ref.slot])
        assert ring.ledger.slots == 0
    for box in (a, far, near):
        box.close()
    ring.close()


def test_a_peer_with_another_secret_is_refused_counted_and_named(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    a = Mailbox(f"ipc://{folder}/a", link=on("n"))
    stranger = Mailbox(f"ipc://{folder}/b", link=on("m", OTHER))
    stranger.send(a.address, api.Ack([1]))
    wait_for(lambda: a.refused, "a refusal")
    assert received(a, 0.2) == []
    assert "KEYSTAGE_WIRE_KEY_FILE is not ours" in caplog.text
    # Who belongs here is heard all the same.
    friend = Mailbox(f"ipc://{folder}/c", link=on("m"))
    friend.send(a.address, api.Ack([2]))
    assert received(a) == [(friend.address, api.Ack([2]), None)]
    for box in (a, stranger, friend):
        box.close()


@pytest.mark.parametrize("kind", ["no security", "own key"])
def test_who_is_no_sender_gets_nothing_through(
    folder: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    a = Mailbox(f"ipc://{folder}/a", link=on("n"))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    push = context.socket(zmq.PUSH)
    push.setsockopt(zmq.LINGER, 0)
    if kind == "own key":  # it knows the inbox's public key, and proves a key of its own
        push.curve_serverkey = on("n").inbox_keys[0]
        push.curve_publickey, push.curve_secretkey = zmq.curve_keypair()
    push.connect(f"tcp://{parse(a.address).tcp}")
    push.send(b"x\0" + api.encode(api.Ack([1])))
    wait_for(lambda: a.refused, "a refusal")
    assert received(a, 0.2) == []
    assert ("holds a key of its own" in caplog.text) == (kind == "own key")
    push.close()
    context.term()
    a.close()


def test_a_router_is_known_by_the_name_it_was_given(folder: Path) -> None:
    router = Mailbox(f"ipc://{folder}/r", link=on("n"), is_named=True)
    assert router.address == f"ipc://{folder}/r"
    router.close()
    free = Mailbox(f"ipc://{folder}/w", link=on("n"))
    name = f"tcp://{parse(free.address).tcp}"
    free.close()
    router = Mailbox(name, link=on("n"), is_named=True)
    worker = Mailbox(f"ipc://{folder}/w", link=on("n"))
    worker.send(name, api.Ack([1]))
    assert received(router) == [(worker.address, api.Ack([1]), None)]
    assert router.address == name
    router.close()
    worker.close()


def test_what_cannot_be_reached_is_said_and_not_sent(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    here = Mailbox(f"ipc://{folder}/a", link=Link("n"))
    assert here.address == f"ipc://{folder}/a#node=n"
    for peer, why in (
        (f"ipc://{folder}/b#node=m", "KEYSTAGE_WIRE_HOST is not set"),
        (f"ipc://{folder}/b#tcp=127.0.0.1:9&node=m", "KEYSTAGE_WIRE_KEY_FILE is not set here"),
        ("nonsense", "expected ipc://PATH"),
    ):
        assert not here.send(peer, api.Ack([1]))
        assert why in (here.unreachable(peer) or "")
        assert why in caplog.text
        assert not here.is_near(peer)
    assert here.dropped == 3
    here.close()
    with pytest.raises(WireError, match="needs KEYSTAGE_WIRE_KEY_FILE"):
        Mailbox("tcp://127.0.0.1:9")


def test_an_inbox_that_cannot_be_bound_is_named_and_leaves_nothing(folder: Path) -> None:
    a = Mailbox(f"ipc://{folder}/a", link=on("n"))
    taken = parse(a.address).tcp
    with pytest.raises(WireError, match=f"cannot bind tcp://{taken}: Address"):
        Mailbox(f"tcp://{taken}", link=on("n"))
    with pytest.raises(WireError, match=r"cannot listen on 'no\.such\.host\.invalid'"):
        Mailbox(f"ipc://{folder}/b", link=Link("n", OURS, "no.such.host.invalid"))
    a.close()


def test_names_of_hosts_are_bound_too(folder: Path) -> None:
    a = Mailbox(f"ipc://{folder}/a", link=Link("n", OURS, "localhost"))
    b = Mailbox(f"ipc://{folder}/b", link=Link("m", OURS, "localhost", "0.0.0.0"))
    assert parse(a.address).tcp.startswith("localhost:")
    b.send(a.address, api.Ack([1]))
    assert received(a) == [(b.address, api.Ack([1]), None)]
    a.send(b.address, api.Ack([2]))
    assert received(b) == [(a.address, api.Ack([2]), None)]
    a.close()
    b.close()


def test_a_stranger_that_announces_a_huge_frame_is_cut_off(folder: Path) -> None:
    a = Mailbox(f"ipc://{folder}/a", link=on("n"))
    host, _, port = parse(a.address).tcp.rpartition(":")
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
    with socket.create_connection((host, int(port)), 10.0) as sock:
        sock.sendall(greeting + b"\x06" + (1 << 40).to_bytes(8, "big") + bytes(1000))
        received_bytes = 0
        with contextlib.suppress(ConnectionResetError):
            while part := sock.recv(1000):
                received_bytes += len(part)
        assert received_bytes <= 64  # its own greeting at most, then the end
    friend = Mailbox(f"ipc://{folder}/b", link=on("m"))
    friend.send(a.address, api.Ack([2]))
    assert received(a) == [(friend.address, api.Ack([2]), None)]
    a.close()
    friend.close()


def test_a_try_to_connect_that_nobody_answers_is_given_up_for_another(folder: Path) -> None:
    """As behind a Service's address whose pod is gone: nothing refuses, nothing answers."""
    mine = Mailbox(f"ipc://{folder}/mine", link=on("n"))
    with socket.socket() as full, contextlib.ExitStack() as held:
        held.callback(mine.close)
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        while True:  # until its queue is full, and the system drops what comes
            filler = held.enter_context(socket.socket())
            filler.settimeout(0.2)
            try:
                filler.connect(full.getsockname())
            except TimeoutError:
                break
        to = f"tcp://127.0.0.1:{full.getsockname()[1]}"
        mine.send(to, api.Ack([1]))
        outbox = mine._outboxes[to]
        mine._links.drop(to)  # a socket has one monitor
        events = zmq.Event.CLOSED | zmq.Event.CONNECT_RETRIED
        monitor = outbox.get_monitor_socket(events, "inproc://another-monitor")
        held.callback(monitor.close, 0)
        held.callback(outbox.disable_monitor)
        seen = []
        while len(seen) < 2:
            assert monitor.poll(15_000), "it still waits for the first try"
            seen.append(recv_monitor_message(monitor)["event"])
        assert set(seen) == {zmq.Event.CLOSED, zmq.Event.CONNECT_RETRIED}


def test_names_of_those_who_are_gone_are_not_kept_for_ever(folder: Path) -> None:
    inbox = Mailbox(f"ipc://{folder}/inbox")
    try:
        with zmq.Context() as context, context.socket(zmq.PUSH) as outbox:
            outbox.connect(f"ipc://{folder}/inbox")
            names = [f"ipc://{folder}/w{number}" for number in range(2 * MOST_SENDERS + 1)]
            for name in names:
                outbox.send(name.encode() + b"\0" + api.encode(api.Ack([1])))
            found: list[str] = []
            while len(found) < len(names):
                assert inbox.wait(10)
                found += [sender for sender, _, _ in inbox.drain()]
        assert found == names
        assert len(inbox._senders) <= MOST_SENDERS
    finally:
        inbox.close()
