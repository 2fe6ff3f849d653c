"""Loading parameters: order of sources, bad answers. Real files, servers and segments."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import msgspec
import pytest
from support.keysmanager_bundles import (
    PATIENT,
    THREE_CHUNKS,
    TOKEN,
    FilesBackend,
    answer_range,
    asked_range,
    content,
    folder_server,
    holdings,
    odd_server,
    parameters_of,
    peer,
    serving,
    settles_at,
    three_chunks,
)

from keystage.bundle.api import CHUNK_BYTES
from keystage.keysmanager import segment
from keystage.keysmanager.api import Parameters
from keystage.keysmanager.disk_cache import DiskCache
from keystage.keysmanager.loader import LoadedSegment, load
from keystage.keysmanager.loader_http import HttpLimits
from keystage.keysmanager.loader_source import LoadError
from keystage.keysmanager.source_disk import DiskSource
from keystage.keysmanager.source_home import HttpHomeSource, plan
from keystage.keysmanager.source_peer import PeerSource

QUICK = HttpLimits(connect_s=2.0, silent_s=0.2, span_s=0.5)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return three_chunks(tmp_path_factory.mktemp("loader"))


@pytest.fixture(scope="module")
def wanted(bundle: Path) -> Parameters:
    return parameters_of(bundle)


@pytest.fixture(scope="module")
def right(bundle: Path, wanted: Parameters) -> bytes:
    return (bundle / wanted.file).read_bytes()


def refusal(url: str, wanted: Parameters, **options: str) -> str:
    """Why a peer's answer is refused; nothing may be left behind."""
    before = holdings()
    with pytest.raises(LoadError) as caught:
        asyncio.run(load(wanted, [peer(url, wanted, **options)]))
    assert settles_at(before)
    assert f"peer {url}" in str(caught.value)
    return str(caught.value)


def test_from_a_file(bundle: Path, wanted: Parameters, right: bytes) -> None:
    before = holdings()
    loaded = asyncio.run(load(wanted, [DiskSource(bundle / wanted.file, wanted.nbytes)]))
    assert (loaded.source, loaded.nbytes, loaded.note, loaded.is_remote) == ("disk", len(right), "", False)
    assert segment.check_sealed(loaded.fd) >= len(right)
    assert content(loaded.fd, loaded.nbytes) == right
    assert settles_at(before)


def test_from_a_file_that_is_not_in_the_page_cache(bundle: Path, wanted: Parameters, right: bytes) -> None:
    path = bundle / wanted.file
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    loaded = asyncio.run(load(wanted, [DiskSource(path, wanted.nbytes)]))
    assert content(loaded.fd, loaded.nbytes) == right


def test_from_a_file_system_of_another_machine(bundle: Path, wanted: Parameters, right: bytes) -> None:
    loaded = asyncio.run(load(wanted, [DiskSource(bundle / wanted.file, wanted.nbytes, is_remote=True)]))
    assert (loaded.source, loaded.is_remote) == ("home", True)
    assert content(loaded.fd, loaded.nbytes) == right


def test_into_windows_where_pages_are_huge(bundle: Path, wanted: Parameters, right: bytes) -> None:
    def create(nbytes: int, name: str) -> segment.Draft:
        draft = segment.create(nbytes, name, huge=False)
        draft.huge_bytes = segment.HUGE_BYTES
        return draft

    before = holdings()
    source = DiskSource(bundle / wanted.file, wanted.nbytes)
    loaded = asyncio.run(load(wanted, [source], create=create))
    assert content(loaded.fd, loaded.nbytes) == right
    assert settles_at(before)


def test_from_a_peer(bundle: Path, wanted: Parameters, right: bytes) -> None:
    async def run() -> LoadedSegment:
        backend = FilesBackend({wanted.identity: bundle / wanted.file})
        async with serving(backend) as url:
            loaded = await load(wanted, [peer(url, wanted)])
            assert backend.offered == 3
            return loaded

    before = holdings()
    loaded = asyncio.run(run())
    assert (loaded.source, loaded.is_remote) == ("peer", True)
    assert content(loaded.fd, loaded.nbytes) == right
    assert settles_at(before)


def test_from_an_http_home(bundle: Path, wanted: Parameters, right: bytes) -> None:
    with folder_server(bundle) as home:
        there = parameters_of(bundle, home=home)
        loaded = asyncio.run(load(there, [HttpHomeSource(there)]))
    assert loaded.source == "home"
    assert content(loaded.fd, loaded.nbytes) == right


def test_sources_in_order(tmp_path: Path, bundle: Path, wanted: Parameters) -> None:
    """Cache, local home, peers, remote home."""
    cache = DiskCache(tmp_path, 10**9)
    fd = os.open(bundle / wanted.file, os.O_RDONLY)
    cache.store(wanted, fd)
    os.close(fd)

    def kinds(**options: object) -> list[str]:
        found = plan(wanted, cache=cache, peers=["http://a:1", "http://b:1"], token="t", **options)  # type: ignore[arg-type]
        return [source.kind for source in found]

    assert kinds(type_of=lambda _: "ext4") == ["disk", "disk", "peer", "peer"]
    assert kinds(type_of=lambda _: "nfs4") == ["disk", "peer", "peer", "home"]
    assert kinds(type_of=lambda _: "nfs4", home_is_remote=False) == ["disk", "disk", "peer", "peer"]
    assert kinds(home_is_remote=True) == ["disk", "peer", "peer", "home"]
    far = msgspec.structs.replace(wanted, name=msgspec.structs.replace(wanted.name, bundle="http://h/b"))
    assert [s.name for s in plan(far, cache=None, peers=[], token="")] == [f"home http://h/b/{wanted.file}"]


def test_a_file_outside_the_bundle_is_refused(wanted: Parameters) -> None:
    outside = msgspec.structs.replace(wanted, file="../secret")
    with pytest.raises(LoadError, match=r"'\.\./secret'.*outside the bundle"):
        plan(outside, cache=None, peers=[], token="")


def test_two_peers_share_the_work(bundle: Path, wanted: Parameters, right: bytes) -> None:
    """Neither peer lets go of its first chunk before the other was asked."""
    both = threading.Barrier(2, timeout=10)

    def answer(handler: BaseHTTPRequestHandler) -> None:
        if asked_range(handler)[0] < 2 * CHUNK_BYTES:
            both.wait()
        first, last = asked_range(handler)
        answer_range(handler, right[first : last + 1], len(right))

    with odd_server(answer) as one, odd_server(answer) as two:
        sources = [PeerSource(url, TOKEN, wanted, lanes=1, limits=PATIENT) for url in (one, two)]
        loaded = asyncio.run(load(wanted, sources))
    assert loaded.note == ""
    assert content(loaded.fd, loaded.nbytes) == right


def test_wrong_bytes_are_refused_and_another_peer_serves(
    bundle: Path, wanted: Parameters, right: bytes
) -> None:
    def wrong(handler: BaseHTTPRequestHandler) -> None:
        first, last = asked_range(handler)
        body = bytearray(right[first : last + 1])
        body[-1] ^= 1
        answer_range(handler, bytes(body), len(right))

    async def run(url: str) -> LoadedSegment:
        async with serving(FilesBackend({wanted.identity: bundle / wanted.file})) as good:
            return await load(wanted, [peer(url, wanted), peer(good, wanted)])

    with odd_server(wrong) as url:
        assert "altered: SHA-256" in refusal(url, wanted)
        loaded = asyncio.run(run(url))
        assert content(loaded.fd, loaded.nbytes) == right


def test_a_server_that_closes_after_each_answer(wanted: Parameters, right: bytes) -> None:
    def once(handler: BaseHTTPRequestHandler) -> None:
        first, last = asked_range(handler)
        handler.send_response(206)
        handler.send_header("Connection", "close")
        handler.send_header("Content-Range", f"bytes {first}-{last}/{len(right)}")
        handler.send_header("Content-Length", str(last - first + 1))
        handler.end_headers()
        handler.wfile.write(right[first : last + 1])

    before = holdings()
    with odd_server(once) as url:
        loaded = asyncio.run(load(wanted, [peer(url, wanted)]))
        assert content(loaded.fd, loaded.nbytes) == right
    assert settles_at(before)


def test_an_error_whose_text_is_cut_short(wanted: Parameters) -> None:
    def cut(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(500)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        handler.wfile.write(b"99\r\nno")
        handler.close_connection = True

    with odd_server(cut) as url:
        assert "status 500" in refusal(url, wanted)


def test_truncated_answer(wanted: Parameters, right: bytes) -> None:
    def short(handler: BaseHTTPRequestHandler) -> None:
        first, last = asked_range(handler)
        answer_range(handler, right[first : last - 9], len(right), claim=last - first + 1)
        handler.close_connection = True

    with odd_server(short) as url:
        assert "truncated: 10 bytes of a range missing" in refusal(url, wanted)


@pytest.mark.parametrize("change", [-1, 1])
def test_answer_of_another_length(wanted: Parameters, right: bytes, change: int) -> None:
    def other(handler: BaseHTTPRequestHandler) -> None:
        first, last = asked_range(handler)
        answer_range(handler, bytes(last - first + 1 + change), len(right))

    with odd_server(other) as url:
        assert "Content-Length" in refusal(url, wanted)


def test_more_bytes_than_the_head_says(wanted: Parameters, right: bytes) -> None:
    """What comes after the promised bytes is taken for the next answer, and is none."""

    def more(handler: BaseHTTPRequestHandler) -> None:
        first, last = asked_range(handler)
        body = right[first : last + 1]
        answer_range(handler, body + b"surplus", len(right), claim=len(body))

    with odd_server(more) as url:
        source = PeerSource(url, TOKEN, wanted, lanes=1, limits=PATIENT)
        with pytest.raises(LoadError, match="no answer"):
            asyncio.run(load(wanted, [source]))


def test_file_of_another_length(wanted: Parameters, right: bytes) -> None:
    def other(handler: BaseHTTPRequestHandler) -> None:
        first, last = asked_range(handler)
        answer_range(handler, right[first : last + 1], len(right) + 1)

    with odd_server(other) as url:
        assert f"/{len(right)}' expected" in refusal(url, wanted)


def _silent(handler: BaseHTTPRequestHandler, ended: threading.Event) -> None:
    ended.wait(20)


def _trickle(handler: BaseHTTPRequestHandler, ended: threading.Event) -> None:
    first, last = asked_range(handler)
    answer_range(handler, b"", THREE_CHUNKS, claim=last - first + 1)
    while not ended.wait(0.02):
        handler.wfile.write(b".")


def _trickle_of_lines(handler: BaseHTTPRequestHandler, ended: threading.Event) -> None:
    handler.wfile.write(b"HTTP/1.1 206 Partial\r\n")
    while not ended.wait(0.02):
        handler.wfile.write(b"A")


@pytest.mark.parametrize(
    ("behave", "reason"),
    [
        (_silent, "no answer within 0.2 s"),
        (_trickle, "too slow|silent|no answer"),
        (_trickle_of_lines, "Content-Range|no answer"),
    ],
)
def test_silent_and_trickling_peers_are_given_up(
    wanted: Parameters, behave: Callable[[BaseHTTPRequestHandler, threading.Event], None], reason: str
) -> None:
    ended = threading.Event()
    with odd_server(lambda handler: behave(handler, ended)) as url:
        try:
            with pytest.raises(LoadError, match=reason):
                asyncio.run(asyncio.wait_for(load(wanted, [peer(url, wanted, limits=QUICK)]), 30))
        finally:
            ended.set()


def test_redirects_are_not_followed(wanted: Parameters, right: bytes) -> None:
    asked: list[str] = []

    def elsewhere(handler: BaseHTTPRequestHandler) -> None:
        asked.append(handler.headers["Authorization"])
        first, last = asked_range(handler)
        answer_range(handler, right[first : last + 1], len(right))

    def redirect(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(307)
        handler.send_header("Location", f"{there}/v1")
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    with odd_server(elsewhere) as there, odd_server(redirect) as url:
        assert f"redirects to '{there}/v1'" in refusal(url, wanted)
    assert asked == []


def test_whole_file_instead_of_a_range(wanted: Parameters) -> None:
    def whole(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "5")
        handler.end_headers()
        handler.wfile.write(b"12345")

    with odd_server(whole) as url:
        assert "it must serve ranges" in refusal(url, wanted)


def test_wrong_token_and_unknown_identity(bundle: Path, wanted: Parameters) -> None:
    async def run(backend: FilesBackend, token: str) -> str:
        async with serving(backend) as url:
            with pytest.raises(LoadError) as caught:
                await load(wanted, [peer(url, wanted, token)])
            return str(caught.value)

    full, empty = FilesBackend({wanted.identity: bundle / wanted.file}), FilesBackend({})
    assert "refuses our token (401)" in asyncio.run(run(full, "wrong"))
    assert full.offered == 0
    assert "not there (404)" in asyncio.run(run(empty, TOKEN))


def test_nobody_listens(wanted: Parameters) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    assert "no connection within 2 s" in refusal(f"http://127.0.0.1:{port}", wanted)


def test_all_sources_fail_and_each_is_named(tmp_path: Path, wanted: Parameters) -> None:
    missing, short = tmp_path / "missing", tmp_path / "short"
    short.write_bytes(b"123")
    folder = tmp_path / "folder"
    folder.mkdir()
    sources = [DiskSource(path, wanted.nbytes) for path in (missing, short, folder)]
    before = holdings()
    with pytest.raises(LoadError) as caught:
        asyncio.run(load(wanted, [*sources, peer("http://127.0.0.1:9", wanted)]))
    assert settles_at(before)
    for part in (
        f"disk {missing}: No such file or directory",
        f"disk {short}: truncated: {wanted.nbytes} bytes expected, 3 found",
        f"disk {folder}: not a regular file",
        "peer http://127.0.0.1:9: no connection",
    ):
        assert part in str(caught.value)


def test_no_source_at_all(wanted: Parameters) -> None:
    with pytest.raises(LoadError, match="none is configured"):
        asyncio.run(load(wanted, []))
