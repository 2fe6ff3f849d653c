"""Messages and descriptors over a socket pair."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator

import pytest
from support.keysmanager_forks import open_fds

from keystage.keysmanager.api import (
    MAX_MESSAGE_BYTES,
    Fork,
    Held,
    Ok,
    Progress,
    Refused,
    Spawned,
    StatusAsked,
)
from keystage.keysmanager.channel import MAX_DESCRIPTORS, Channel, ChannelError, PeerGone, pair, peer

Ends = tuple[Channel, Channel]


@pytest.fixture
def ends() -> Iterator[Ends]:
    one, two = (Channel(sock) for sock in pair())
    yield one, two
    one.close()
    two.close()


def test_messages_arrive_one_by_one_as_they_were(ends: Ends) -> None:
    told = [
        Ok(),
        Refused("no", 507),
        Held(pid=3, packed_bytes=1 << 40),
        StatusAsked(),
        Progress(phase="mapped", at_s=1.25, note="ü"),
        Fork(replica="r", module="m", env={"A": "b"}, wanted_at_s=0.1),
    ]
    for message in told:
        ends[0].send(message)
    assert [ends[1].receive() for _ in told] == [(message, []) for message in told]


def test_descriptors_travel_and_are_closed_on_exec(ends: Ends) -> None:
    reader, writer = os.pipe()
    ends[0].send(Ok(), (reader, writer))
    received = ends[1].receive()
    assert received is not None
    message, fds = received
    assert message == Ok()
    assert [os.get_inheritable(fd) for fd in fds] == [False, False]
    os.write(fds[1], b"x")
    assert os.read(reader, 9) == b"x"
    for fd in (reader, writer, *fds):
        os.close(fd)


def test_end_of_file_is_none_and_a_closed_end_is_named(ends: Ends) -> None:
    ends[0].send(Spawned(7))
    ends[0].close()
    assert ends[1].receive() == (Spawned(7), [])
    assert ends[1].receive() is None
    with pytest.raises(PeerGone, match="closed"):
        ends[1].send(Ok())
    assert not ends[1].try_send(Ok())


def test_a_peer_that_ends_with_unread_messages_is_end_of_file(ends: Ends) -> None:
    ends[0].send(Ok())
    ends[1].close()
    assert ends[0].receive() is None


def test_an_oversized_message_is_refused_before_it_is_sent(ends: Ends) -> None:
    with pytest.raises(
        ChannelError, match=rf"Refused of \d+ bytes: a message holds at most {MAX_MESSAGE_BYTES}"
    ):
        ends[0].send(Refused("x" * MAX_MESSAGE_BYTES))
    ends[0].send(Refused("x" * (MAX_MESSAGE_BYTES - 100)))
    assert ends[1].receive() is not None


def test_an_oversized_message_of_a_stranger_is_named(ends: Ends) -> None:
    ends[0].sock.send(b"x" * (MAX_MESSAGE_BYTES + 1))
    ends[0].send(Ok())
    with pytest.raises(ChannelError, match="more than"):
        ends[1].receive()
    assert ends[1].receive() == (Ok(), [])


@pytest.mark.parametrize("body", [b"{}", b"\xff\xff", b"\x81\xa4type\xa7Unknown", b"x" * 1000])
def test_a_malformed_message_is_named_and_its_descriptors_are_closed(ends: Ends, body: bytes) -> None:
    before = open_fds()
    socket.send_fds(ends[0].sock, [body], [0, 1])
    with pytest.raises(ChannelError, match=f"malformed message of {len(body)} bytes"):
        ends[1].receive()
    assert open_fds() == before


def test_too_many_descriptors_are_refused_on_both_sides(ends: Ends) -> None:
    with pytest.raises(ChannelError, match=f"at most {MAX_DESCRIPTORS}"):
        ends[0].send(Ok(), [0] * (MAX_DESCRIPTORS + 1))
    before = open_fds()
    ends[0].send(Ok(), [0])
    received = ends[1].receive()
    assert received is not None
    os.close(received[1][0])
    socket.send_fds(ends[0].sock, [b"\x81\xa4type\xa2Ok"], [0] * (MAX_DESCRIPTORS + 3))
    with pytest.raises(ChannelError, match="descriptors were lost"):
        ends[1].receive()
    assert open_fds() == before


def test_try_send_never_waits(ends: Ends) -> None:
    sent = 0
    while ends[0].try_send(Progress(phase="ready", at_s=1.0, note="n" * 1000)):
        sent += 1
        assert sent < 100_000
    assert sent > 0
    ends[1].receive()
    assert ends[0].try_send(Ok())


def test_peer_is_this_process() -> None:
    one, two = pair()
    with one, two:
        assert peer(one) == (os.getpid(), os.getuid())


def test_coroutines_wait_for_room_and_for_messages(ends: Ends) -> None:
    number = 500

    async def run() -> list[object]:
        async def send() -> None:
            for index in range(number):
                await ends[0].asend(Refused("x" * 5000, index))
            ends[0].close()

        sending = asyncio.create_task(send())
        found: list[object] = []
        while (received := await ends[1].areceive()) is not None:
            found.append(received[0])
        await sending
        return found

    assert asyncio.run(run()) == [Refused("x" * 5000, index) for index in range(number)]


def test_a_cancelled_receive_leaves_no_watcher_and_loses_nothing(ends: Ends) -> None:
    async def run() -> None:
        waiting = asyncio.create_task(ends[1].areceive())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not asyncio.get_running_loop().remove_reader(ends[1].fileno())
        await ends[0].asend(Ok())
        assert await ends[1].areceive() == (Ok(), [])

    asyncio.run(run())
