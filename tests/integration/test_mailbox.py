"""Mailboxes over real sockets: order, and peers that go and come back."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from keystage.wire import api
from keystage.wire.mailbox import Mailbox


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ks", dir="/tmp") as name:
        yield Path(name)


def receive(mailbox: Mailbox, count: int) -> list[api.ToWorker]:
    got: list[api.ToWorker] = []
    while len(got) < count and mailbox.wait(10.0):
        got += [api.decode_to_worker(body) for _, body, _ in mailbox.drain()]
    return got


def test_order_is_kept_per_sender_and_the_sender_is_named(folder: Path) -> None:
    a, b = Mailbox(f"ipc://{folder}/a"), Mailbox(f"ipc://{folder}/b")
    for i in range(500):
        assert a.send(b.address, api.Ack([i]))
    assert receive(b, 500) == [api.Ack([i]) for i in range(500)]
    b.send(a.address, api.Ack([1]), memoryview(b"tensor"))
    assert a.wait(10.0)
    assert list(a.drain()) == [(b.address, api.encode(api.Ack([1])), b"tensor")]
    a.close()
    b.close()
    assert not list(folder.iterdir())


def test_what_is_sent_before_a_peer_listens_arrives(folder: Path) -> None:
    a = Mailbox(f"ipc://{folder}/a")
    a.send(f"ipc://{folder}/b", api.Ack([1]))
    b = Mailbox(f"ipc://{folder}/b")
    assert receive(b, 1) == [api.Ack([1])]
    a.close()
    b.close()


def test_a_peer_started_again_on_its_address_is_reached(folder: Path) -> None:
    a, b = Mailbox(f"ipc://{folder}/a"), Mailbox(f"ipc://{folder}/b")
    a.send(b.address, api.Ack([1]))
    assert receive(b, 1) == [api.Ack([1])]
    b.close()
    a.forget(b.address)
    again = Mailbox(f"ipc://{folder}/b")
    a.send(again.address, api.Ack([2]))
    assert receive(again, 1) == [api.Ack([2])]
    a.close()
    again.close()


def test_an_address_too_long_for_a_socket_is_refused(folder: Path) -> None:
    with pytest.raises(zmq.ZMQError):
        Mailbox(f"ipc://{folder}/{'x' * 120}")
