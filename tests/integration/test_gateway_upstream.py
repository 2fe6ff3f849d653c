"""The gateway's proxy in front of replicas that do everything wrong, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from typing import Any

import pytest
from support.scripted_upstream import Call, Script, Upstream, head, open_call, proxy_to, run

HELLO = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
SILENCE_S = 1.0
"""Bound of a replica's silence where one is tested: far above what this process may stand still."""
Reader = asyncio.StreamReader
Writer = asyncio.StreamWriter


def saying(answer: bytes, *, close: bool = True) -> Script:
    """Answers every request with these bytes, then closes or goes on."""

    async def script(reader: Reader, writer: Writer) -> None:
        while True:
            await head(reader)
            writer.write(answer)
            await writer.drain()
            if close:
                return

    return script


async def ask(script: Script, call: Call | None = None, **options: Any) -> Call:
    async with Upstream(script).run() as address, proxy_to(address, **options) as proxy:
        return await (call or open_call()).run(proxy)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"", "broke the connection before it answered"),
        (b"HTTP/1.1 200", "broke the connection before it answered"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "sent what is no HTTP answer"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n", "sent what is no HTTP answer"),
        (b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n", "no HTTP answer"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"y" * 300_000, "sent more than 65536 bytes of headers"),
        (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 100_000, "sent more than 65536 bytes of headers"),
    ],
    ids=["nothing", "half", "another protocol", "bad length", "upgrade", "endless header", "headers"],
)
def test_a_broken_answer_is_a_named_502(answer: bytes, said: str) -> None:
    async def work() -> None:
        call = await ask(saying(answer))
        assert (call.status, call.is_whole) == (502, True)
        assert call.body.startswith(b"function f: replica f-0 ")
        assert said.encode() in call.body

    run(work())


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc", b"abc"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n5\r\nde", b"abcde"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n", b"abc"),
    ],
    ids=["length", "chunk", "last chunk"],
)
def test_an_answer_that_breaks_off_is_never_passed_on_as_whole(answer: bytes, body: bytes) -> None:
    async def work() -> None:
        call = await ask(saying(answer))
        assert (call.status, call.body, call.is_whole) == (200, body, False)

    run(work())


def test_informational_answers_trailers_and_endings_by_close_pass() -> None:
    async def work() -> None:
        hints = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
        chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nX-T: 1\r\n\r\n"
        call = await ask(saying(hints + chunked))
        assert (call.status, call.body, call.is_whole) == (200, b"abc", True)
        assert not call.answer_headers.keys() & {b"link", b"x-t", b"transfer-encoding"}
        call = await ask(saying(b"HTTP/1.0 200 OK\r\n\r\nuntil the end"))
        assert (call.body, call.is_whole) == (b"until the end", True)
        call = await ask(saying(b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n"))
        assert (call.status, call.body, call.is_whole) == (304, b"", True)
        assert b"content-length" not in call.answer_headers

    run(work())


def test_connections_are_kept_as_long_as_both_sides_may() -> None:
    async def work() -> None:
        for answer, close, connections in (
            (HELLO, False, 1),
            (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 5\r\n\r\nhello", False, 5),
            (HELLO, True, 5),
            (HELLO + HELLO, False, 5),
        ):
            upstream = Upstream(saying(answer, close=close))
            async with upstream.run() as address, proxy_to(address) as proxy:
                for _ in range(5):
                    call = await open_call().run(proxy)
                    assert (call.status, call.body, call.is_whole) == (200, b"hello", True)
                    for _ in range(2):  # lets what came too much, or the end, be seen
                        await asyncio.sleep(0.01)
            assert upstream.connections == connections, (answer, close)

    run(work())


def test_a_head_request_has_no_body_and_its_connection_goes_on() -> None:
    async def script(reader: Reader, writer: Writer) -> None:
        while True:
            is_head = (await head(reader)).startswith(b"HEAD")
            writer.write(HELLO[:-5] if is_head else HELLO)

    async def work() -> None:
        upstream = Upstream(script)
        async with upstream.run() as address, proxy_to(address) as proxy:
            for method, body in (("HEAD", b""), ("GET", b"hello"), ("HEAD", b""), ("GET", b"hello")):
                call = await open_call(method).run(proxy)
                assert (call.status, call.body, call.is_whole) == (200, body, True)
                assert call.answer_headers[b"content-length"] == b"5"
        assert upstream.connections == 1

    run(work())


def test_only_what_cannot_have_arrived_is_sent_elsewhere() -> None:
    async def work() -> None:
        with socket.create_server(("127.0.0.1", 0)) as closed:
            nobody = f"127.0.0.1:{closed.getsockname()[1]}"
        healthy, breaking = Upstream(saying(HELLO)), Upstream(saying(b""))
        async with healthy.run() as good, breaking.run() as bad:
            async with proxy_to(nobody, good) as proxy:
                for parts in ((b"",), (b"ab",), (b"ab", b"cd")):
                    call = await open_call("POST", parts).run(proxy)
                    assert (call.status, call.body) == (200, b"hello")
            assert healthy.connections == 3
            async with proxy_to(bad, good) as proxy:
                call = await open_call().run(proxy)
            assert (call.status, healthy.connections, breaking.connections) == (502, 3, 1)
            async with proxy_to(nobody, wake_s=0.2) as proxy:
                assert (await open_call().run(proxy)).status == 503

    run(work())


@pytest.mark.slow
def test_silence_is_bounded_and_a_trickle_is_none() -> None:
    async def trickle(reader: Reader, writer: Writer) -> None:
        await head(reader)
        for byte in HELLO:
            writer.write(bytes([byte]))
            await asyncio.sleep(1.5 * SILENCE_S / len(HELLO))

    async def silent(reader: Reader, writer: Writer) -> None:
        await head(reader)
        writer.write(HELLO[:-1])
        await asyncio.sleep(30)

    async def mute(reader: Reader, _: Writer) -> None:
        await head(reader)
        await asyncio.sleep(30)

    async def deaf(_: Reader, writer: Writer) -> None:
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.sleep(30)

    async def work() -> None:
        assert (await ask(trickle, upstream_s=SILENCE_S)).body == b"hello"
        call = await ask(mute, upstream_s=SILENCE_S)
        assert (call.status, call.body) == (504, b"function f: replica f-0 sent nothing for 1 s\n")
        call = await ask(silent, upstream_s=SILENCE_S)
        assert (call.status, call.body, call.is_whole) == (200, b"hell", False)
        call = await ask(deaf, open_call("POST", [b"x" * (1 << 20)] * 160), upstream_s=SILENCE_S)
        assert (call.status, call.is_whole) == (504, True)
        assert call.taken < 80  # what sockets hold, and little more

    run(work())


@pytest.mark.slow
def test_a_slow_client_is_not_the_replica_s_silence() -> None:
    async def work() -> None:
        async with Upstream(saying(HELLO)).run() as address, proxy_to(address, upstream_s=SILENCE_S) as proxy:
            call = Call()
            going = asyncio.create_task(call.run(proxy))
            await asyncio.sleep(1.5 * SILENCE_S)
            call.gate.set()
            await going
            assert (call.status, call.body, call.is_whole) == (200, b"hello", True)

    async def last_byte(reader: Reader, writer: Writer) -> None:
        await head(reader)
        await reader.readexactly(4)
        writer.write(HELLO)

    async def slow_upload() -> None:
        length = [(b"content-length", b"4")]
        call = open_call("POST", [b"ab", b"cd"], headers=length, pace_s=1.5 * SILENCE_S)
        assert (await ask(last_byte, call, upstream_s=SILENCE_S)).body == b"hello"

    run(work())
    run(slow_upload())


def test_a_client_that_takes_nothing_stops_the_replica() -> None:
    size = 128 << 20  # sockets of some systems hold some 40 MiB
    written = 0

    async def script(reader: Reader, writer: Writer) -> None:
        nonlocal written
        await head(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
        while written < size:
            writer.write(bytes(1 << 16))
            await writer.drain()
            written += 1 << 16

    async def work() -> None:
        async with Upstream(script).run() as address, proxy_to(address) as proxy:
            call = Call()
            going = asyncio.create_task(call.run(proxy))
            before = -1
            while before != written or not written:
                before = written
                await asyncio.sleep(0.3)
            assert written < size // 2  # what sockets hold, and little more
            call.gate.set()
            await going
            assert (len(call.body), call.is_whole) == (size, True)
            assert max(len(message["body"]) for message in call.sent[1:]) < 1 << 20

    run(work())


def _reset(writer: Writer) -> None:
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def test_an_early_answer_to_a_large_upload_arrives_whatever_becomes_of_the_rest() -> None:
    refusal = b"HTTP/1.1 413 Content Too Large\r\nConnection: close\r\nContent-Length: 5\r\n\r\nlarge"

    async def closes(reader: Reader, writer: Writer) -> None:
        await head(reader)
        writer.write(refusal)
        await writer.drain()

    async def reads_on(reader: Reader, writer: Writer) -> None:
        await closes(reader, writer)
        while await reader.read(1 << 16):
            pass

    async def resets(reader: Reader, writer: Writer) -> None:
        await closes(reader, writer)
        _reset(writer)

    async def work() -> None:
        for script in (closes, reads_on, resets):
            for headers in ((), ((b"content-length", b"%d" % (32 << 20)),)):
                for _ in range(10):
                    call = open_call("POST", [b"x" * (1 << 20)] * 32, headers=headers)
                    await ask(script, call)
                    assert (call.status, call.body, call.is_whole) == (413, b"large", True), script

    run(work())


def test_an_upload_arrives_as_it_was_sent_with_or_without_a_length() -> None:
    seen = b""

    async def script(reader: Reader, writer: Writer) -> None:
        nonlocal seen
        seen = await head(reader)
        if b"transfer-encoding: chunked" in seen:
            while size := int(await reader.readline(), 16):
                seen += await reader.readexactly(size)
                await reader.readline()
        else:
            seen += await reader.readexactly(3_000_000)
        writer.write(HELLO)

    async def work() -> None:
        parts = [bytes([k]) * 100_000 for k in range(30)]
        for headers in ((), ((b"content-length", b"3000000"),)):
            call = await ask(script, open_call("PUT", parts, headers=headers))
            assert (call.status, call.body) == (200, b"hello")
            assert seen.endswith(b"".join(parts))
            assert (b"content-length: 3000000\r\n" in seen) == bool(headers)

    run(work())


def test_an_answer_is_read_though_writing_failed_before_it_was_seen() -> None:
    answered = threading.Event()

    def serve(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        connection.recv(1 << 16)
        connection.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 2\r\n\r\nno")
        connection.close()
        answered.set()

    def block(part: int) -> None:
        if part == 1:  # the event loop stands, so the answer and the end come unseen
            assert answered.wait(10)

    async def work() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            thread = threading.Thread(target=serve, args=(listening,))
            thread.start()
            async with proxy_to(f"127.0.0.1:{listening.getsockname()[1]}") as proxy:
                call = await open_call("POST", [b"x" * 100] * 9, before=block).run(proxy)
            thread.join()
            assert (call.status, call.body, call.is_whole) == (403, b"no", True)

    run(work())


@pytest.mark.parametrize("parts", [(b"ab",), ()], ids=["in the middle", "before its start"])
def test_half_an_upload_never_looks_like_a_whole_one(parts: tuple[bytes, ...]) -> None:
    async def work() -> None:
        rest = asyncio.Queue[bytes]()

        async def script(reader: Reader, writer: Writer) -> None:
            await head(reader)
            writer.write(HELLO)
            data = b""
            with contextlib.suppress(ConnectionError):
                while piece := await reader.read(1 << 16):
                    data += piece
            rest.put_nowait(data)

        async with Upstream(script).run() as address, proxy_to(address) as proxy:
            assert (await open_call().run(proxy)).body == b"hello"
            call = open_call("POST", parts, more=True)
            going = asyncio.create_task(call.run(proxy))
            while call.taken < len(parts):
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            call.left.set()
            await going
            assert not call.sent
            await proxy.stop()
            request, _, body = (await rest.get()).partition(b"\r\n\r\n")
            assert (request != b"", body) == ((True, b"2\r\nab\r\n") if parts else (False, b""))

    run(work())
