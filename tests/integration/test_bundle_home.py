"""A bundle's home over HTTP: fetched once, checked, resumed, bounded. Real servers, good and bad."""

from __future__ import annotations

import http.server
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import msgspec
import pytest
from support.keysmanager_bundles import THREE_CHUNKS, folder_server, odd_server, three_chunks

from keystage.bundle import home, store
from keystage.bundle.api import CHUNK_BYTES
from keystage.bundle.errors import BundleError
from keystage.bundle.home import Limits

QUICK = Limits(connect_s=2.0, silent_s=0.3, small_s=1.0, slowest_bytes_s=1e8, tries=3, pause_s=0.01)


def test_small_files_come_first_and_a_stage_when_it_is_wanted(tmp_path: Path) -> None:
    bundle = three_chunks(tmp_path)
    pipeline = msgspec.structs.replace(store.load(bundle), tokenizer="tokenizer.json")
    (bundle / "tokenizer.json").write_text("{}")
    store.write(bundle, pipeline)
    with folder_server(bundle) as url:
        for address in (url, f"{url}/", f"{url}/pipeline.json"):
            folder = home.local_folder(address, home.folder_in(tmp_path / "run", address))
            assert store.load(folder) == pipeline == home.description(address)
            assert sorted(p.name for p in folder.iterdir()) == ["pipeline.json", "tokenizer.json"]
        path = home.fetch_stage(url, folder, pipeline, 0)
        assert path.read_bytes() == (bundle / path.name).read_bytes()
        store.verify(folder, 0)
    assert home.fetch_stage(url, folder, pipeline, 0) == path  # it is there: nobody is asked
    assert home.local_folder(bundle.as_uri(), tmp_path / "unused") == bundle
    assert not (tmp_path / "unused").exists()


def test_a_broken_transfer_goes_on_where_its_last_chunk_ended(tmp_path: Path) -> None:
    bundle = three_chunks(tmp_path)
    pipeline = store.load(bundle)
    body = (bundle / pipeline.stages[0].file).read_bytes()
    asked: list[int] = []

    def answer(handler: BaseHTTPRequestHandler) -> None:
        start = int(handler.headers.get("Range", "bytes=0-").removeprefix("bytes=").removesuffix("-"))
        asked.append(start)
        handler.send_response(206 if start else 200)
        if start:
            handler.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        handler.send_header("Content-Length", str(len(body) - start))
        handler.end_headers()
        handler.wfile.write(body[start : start + CHUNK_BYTES + 1000])  # a chunk and a bit
        handler.close_connection = True

    with odd_server(answer) as url:
        path = home.fetch_stage(url, tmp_path / "f", pipeline, 0, QUICK)
    assert path.read_bytes() == body
    assert asked == [0, CHUNK_BYTES, 2 * CHUNK_BYTES]


def test_what_an_earlier_process_left_is_used_if_it_is_right(tmp_path: Path) -> None:
    bundle = three_chunks(tmp_path)
    pipeline = store.load(bundle)
    file = pipeline.stages[0].file
    body = (bundle / file).read_bytes()
    folder = tmp_path / "f"
    folder.mkdir()
    left = bytearray(body[: 2 * CHUNK_BYTES + 77])
    left[CHUNK_BYTES + 5] ^= 1
    (folder / f".{file}.partial").write_bytes(left)
    asked: list[str | None] = []

    def answer(handler: BaseHTTPRequestHandler) -> None:
        asked.append(handler.headers.get("Range"))
        handler.send_response(200)  # a home without ranges: all of it comes, what is here is dropped
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    with odd_server(answer) as url:
        assert home.fetch_stage(url, folder, pipeline, 0, QUICK).read_bytes() == body
    assert asked == [f"bytes={CHUNK_BYTES}-"]
    assert [p.name for p in folder.iterdir()] == [file]


def _head(handler: BaseHTTPRequestHandler, status: int, length: int, **headers: str) -> None:
    handler.send_response(status)
    handler.send_header("Content-Length", str(length))
    for name, value in headers.items():
        handler.send_header(name, value)
    handler.end_headers()


def _altered(handler: BaseHTTPRequestHandler) -> None:
    _head(handler, 200, THREE_CHUNKS)
    handler.wfile.write(bytes(THREE_CHUNKS))


def _silent(handler: BaseHTTPRequestHandler) -> None:
    _head(handler, 200, THREE_CHUNKS)
    handler.wfile.write(b"x")
    time.sleep(1.0)


def _trickle(handler: BaseHTTPRequestHandler) -> None:
    _head(handler, 200, THREE_CHUNKS)
    until_s = time.monotonic() + 10
    while time.monotonic() < until_s:
        handler.wfile.write(b"x")
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        (_altered, "chunk 0 altered"),
        (_silent, "broke off: timed out; 0 of 3 chunks came"),
        (_trickle, "0 of 3 chunks came"),
        (lambda h: _head(h, 404, 0), r"not there \(404\)"),
        (lambda h: _head(h, 403, 0), "status 403; 0 of 3"),
        (lambda h: _head(h, 503, 0), "status 503; 0 of 3"),
        (lambda h: _head(h, 302, 0, Location="http://elsewhere/"), "redirects are not followed"),
        (lambda h: _head(h, 200, 5), f"5 bytes, the bundle says {THREE_CHUNKS}"),
        (lambda h: h.wfile.write(b"nonsense\r\n\r\n"), "0 of 3 chunks came"),
    ],
)
def test_a_home_that_does_not_give_it_is_named_in_time(
    tmp_path: Path, answer: Callable[[BaseHTTPRequestHandler], None], named: str
) -> None:
    pipeline = store.load(three_chunks(tmp_path))
    with odd_server(answer) as url, pytest.raises(BundleError, match=named):
        home.fetch_stage(url, tmp_path / "f", pipeline, 0, QUICK)
    assert not (tmp_path / "f" / pipeline.stages[0].file).exists()


def test_a_description_that_is_too_large_missing_or_unreachable_is_refused(tmp_path: Path) -> None:
    def endless(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        handler.close_connection = True
        block = bytes(1 << 20)
        while True:
            handler.wfile.write(block)

    with odd_server(endless) as url, pytest.raises(BundleError, match="larger than 67108864 bytes"):
        home.local_folder(url, tmp_path / "f", Limits(small_s=20.0))
    with (
        odd_server(lambda h: _head(h, 404, 0)) as url,
        pytest.raises(BundleError, match=r"pipeline.json: not"),
    ):
        home.local_folder(url, tmp_path / "f", QUICK)
    with pytest.raises(BundleError, match="refused"):  # nobody listens there any more
        home.description(url, QUICK)
    for address in ("http://user:secret@127.0.0.1/b", "http:///b", "http://127.0.0.1:x/b"):
        with pytest.raises(BundleError, match=r"http|port|Port"):
            home.description(address, QUICK)
    assert not (tmp_path / "f").exists()


def test_a_tokenizer_that_lies_elsewhere_or_nowhere_is_refused(tmp_path: Path) -> None:
    bundle = three_chunks(tmp_path)
    plain = store.load(bundle)
    for name, named in (("../x", "lies outside the bundle"), ("tokenizer.json", r"not there \(404\)")):
        store.write(bundle, msgspec.structs.replace(plain, tokenizer=name))
        with folder_server(bundle) as url, pytest.raises(BundleError, match=named):
            home.local_folder(url, tmp_path / "f", QUICK)
    assert not (tmp_path / "f" / "pipeline.json").exists()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    bundle = three_chunks(tmp_path)
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "f"
    with folder_server(bundle) as url:
        with pytest.raises(BundleError, match=r"file/f/pipeline\.json of .* bytes: Not a directory"):
            home.local_folder(url, folder, QUICK)
        with pytest.raises(BundleError, match=r"file/f/.* of .* bytes: Not a directory"):
            home.fetch_stage(url, folder, store.load(bundle), 0, QUICK)


def test_two_processes_may_fetch_one_stage_at_once(tmp_path: Path) -> None:
    bundle = three_chunks(tmp_path)
    pipeline = store.load(bundle)
    failed: list[BaseException] = []

    def fetch() -> None:
        try:
            home.fetch_stage(url, tmp_path / "f", pipeline, 0)
        except BundleError as error:
            failed.append(error)

    with folder_server(bundle) as url:
        threads = [threading.Thread(target=fetch) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert not failed
    store.verify(tmp_path / "f", pipeline.stages[0], pipeline.dtype)


def test_the_standard_library_s_server_is_a_home(tmp_path: Path) -> None:
    bundle = three_chunks(tmp_path)

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: object) -> None:
            super().__init__(*args, directory=str(bundle))  # type: ignore[arg-type]

        def log_message(self, *args: object) -> None:
            """Says nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_address[1]}"
        folder = home.local_folder(url, tmp_path / "f")
        home.fetch_stage(url, folder, store.load(folder), 1)
        store.verify(folder, 1)
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


@pytest.mark.parametrize("url", ["http://a..b/", "http://\udcff.example/x", "http://127.0.0.1:1/é"])
def test_what_is_no_address_is_named(tmp_path: Path, url: str) -> None:
    with pytest.raises(BundleError, match="no address: "):
        home.local_folder(url, tmp_path, QUICK)


def test_a_name_that_is_no_utf_8_has_a_folder_too(tmp_path: Path) -> None:
    assert home.folder_in(tmp_path, "a\udcff") != home.folder_in(tmp_path, "a")
