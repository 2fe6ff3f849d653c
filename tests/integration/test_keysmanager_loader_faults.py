"""Loading parameters: damaged and changing files, absurd sizes, cancellation. Real files and segments."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import threading
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import msgspec
import pytest
from support.keysmanager_bundles import (
    PATIENT,
    TOKEN,
    FilesBackend,
    answer_range,
    asked_range,
    content,
    holdings,
    odd_server,
    parameters_of,
    serving,
    settles_at,
    three_chunks,
    until,
)

from keystage.bundle.api import CHUNK_BYTES
from keystage.keysmanager import segment
from keystage.keysmanager.api import Parameters
from keystage.keysmanager.disk_cache import DiskCache
from keystage.keysmanager.loader import LoadedSegment, Loader, LoaderSettings, load
from keystage.keysmanager.loader_source import LoadCancelled, LoadError
from keystage.keysmanager.source_disk import DiskSource, FileReader
from keystage.keysmanager.source_peer import PeerSource


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return three_chunks(tmp_path_factory.mktemp("loader"))


@pytest.fixture(scope="module")
def wanted(bundle: Path) -> Parameters:
    return parameters_of(bundle)


@pytest.fixture(scope="module")
def right(bundle: Path, wanted: Parameters) -> bytes:
    return (bundle / wanted.file).read_bytes()


def test_damaged_copy_is_deleted_and_a_peer_serves_the_rest(
    tmp_path: Path, bundle: Path, wanted: Parameters, right: bytes
) -> None:
    cache = DiskCache(tmp_path / "cache", 10**9)
    fd = os.open(bundle / wanted.file, os.O_RDONLY)
    assert cache.store(wanted, fd)
    os.close(fd)
    copy = cache.find(wanted.identity)
    assert copy is not None
    with copy.open("r+b") as file:
        file.seek(CHUNK_BYTES + 77)
        file.write(b"damage")
    gone = tmp_path / "gone"
    far = msgspec.structs.replace(wanted, name=msgspec.structs.replace(wanted.name, bundle=gone.as_uri()))

    async def run() -> LoadedSegment:
        async with serving(FilesBackend({wanted.identity: bundle / wanted.file})) as url:
            loader = Loader(LoaderSettings(peers=(url,), token=TOKEN), cache)
            loaded = await loader.load(far)
            await loader.close()
            return loaded

    loaded = asyncio.run(run())
    assert f"disk {copy}: chunk 1 altered" in loaded.note
    assert content(loaded.fd, loaded.nbytes) == right
    # What the peer served was written anew, whole.
    assert copy.read_bytes() == right


def test_a_file_of_this_node_is_opened_for_peers(tmp_path: Path, bundle: Path, wanted: Parameters) -> None:
    before = holdings()
    fd = Loader(LoaderSettings()).open_local(wanted)
    assert fd is not None
    assert os.fstat(fd).st_ino == (bundle / wanted.file).stat().st_ino
    os.close(fd)
    assert Loader(LoaderSettings(home_is_remote=True)).open_local(wanted) is None
    longer = msgspec.structs.replace(wanted, nbytes=wanted.nbytes + 1)
    assert Loader(LoaderSettings()).open_local(longer) is None
    assert holdings() == before


def test_direct_reads_that_are_refused_become_buffered_ones(
    tmp_path: Path, wanted: Parameters, right: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As file systems do that let a file be opened for direct reads and then refuse them."""
    path = tmp_path / wanted.file
    path.write_bytes(right)
    monkeypatch.setattr(FileReader, "_from_cache", lambda *_: 0)
    real, refused = os.preadv, []

    def preadv(fd: int, buffers: list[memoryview], offset: int, *flags: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(fd)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, buffers, offset, *flags)

    monkeypatch.setattr(os, "preadv", preadv)
    before = holdings()
    loaded = asyncio.run(load(wanted, [DiskSource(path, wanted.nbytes)]))
    assert len(refused) >= 1
    assert content(loaded.fd, loaded.nbytes) == right
    assert settles_at(before)


def test_file_replaced_while_it_is_read(tmp_path: Path, wanted: Parameters, right: bytes) -> None:
    """The file that was opened is read to its end, or refused by hash: never a mixture."""
    path = tmp_path / wanted.file
    path.write_bytes(right)
    other = tmp_path / "other"
    other.write_bytes(bytes(len(right)))

    class Replaced(DiskSource):
        def open(self):  # type: ignore[no-untyped-def]
            reader = super().open()
            if other.exists():
                other.replace(path)
            return reader

    source = Replaced(path, wanted.nbytes)
    source.lanes = 1
    loaded = asyncio.run(load(wanted, [source]))
    assert content(loaded.fd, loaded.nbytes) == right
    with pytest.raises(LoadError, match="altered"):
        asyncio.run(load(wanted, [DiskSource(path, wanted.nbytes)]))


def test_file_cut_while_it_is_read(tmp_path: Path, wanted: Parameters, right: bytes) -> None:
    path = tmp_path / wanted.file
    path.write_bytes(right)

    class Cut(DiskSource):
        def open(self):  # type: ignore[no-untyped-def]
            reader = super().open()
            os.truncate(path, CHUNK_BYTES + 5)
            return reader

    source = Cut(path, wanted.nbytes)
    source.lanes = 1
    with pytest.raises(LoadError, match="truncated while it was read"):
        asyncio.run(load(wanted, [source]))


def test_absurd_parameters_are_refused_before_memory_is_taken(bundle: Path, wanted: Parameters) -> None:
    def create(nbytes: int, name: str) -> segment.Draft:
        raise AssertionError("memory was asked for")

    replace = msgspec.structs.replace
    for absurd, reason in (
        (replace(wanted, nbytes=0), "0 bytes"),
        (replace(wanted, nbytes=-5), "-5 bytes"),
        (replace(wanted, nbytes=2**60), f"{2**60} bytes are {2**36} chunks, 3 hashes are given"),
        (replace(wanted, chunks=("xx", *wanted.chunks[1:])), "no hexadecimal"),
        (replace(wanted, chunks=(wanted.chunks[1], *wanted.chunks[1:])), "its hashes make"),
        (replace(wanted, dtype="bfloat16"), "its hashes make"),
    ):
        with pytest.raises(LoadError, match=reason):
            asyncio.run(load(absurd, [DiskSource(bundle / wanted.file, wanted.nbytes)], create=create))


def test_no_memory_is_named(bundle: Path, wanted: Parameters) -> None:
    def create(nbytes: int, name: str) -> segment.Draft:
        return segment.create(segment.available_bytes() * 4, name)

    with pytest.raises(LoadError, match="bytes of memory are free"):
        asyncio.run(load(wanted, [DiskSource(bundle / wanted.file, wanted.nbytes)], create=create))


def test_segment_that_cannot_be_written_ends_all_lanes(bundle: Path, wanted: Parameters) -> None:
    def create(nbytes: int, name: str) -> segment.Draft:
        draft = segment.create(nbytes, name, huge=False)
        segment.seal(draft.fileno())
        return draft

    before = holdings()
    with pytest.raises(LoadError, match=f"segment of {wanted.nbytes} bytes"):
        asyncio.run(load(wanted, [DiskSource(bundle / wanted.file, wanted.nbytes)], create=create))
    assert settles_at(before)


@pytest.mark.parametrize("by", ["event", "task"])
def test_cancelled_load_leaves_nothing(wanted: Parameters, by: str) -> None:
    """A peer that is silent for good: cancellation must not wait for its limit."""
    asked, ended = threading.Event(), threading.Event()

    def silent(handler: BaseHTTPRequestHandler) -> None:
        first, last = asked_range(handler)
        answer_range(handler, bytes(1000), len_of, claim=last - first + 1)
        asked.set()
        ended.wait(30)

    len_of = wanted.nbytes

    async def run(url: str) -> None:
        cancelled = asyncio.Event()
        source = PeerSource(url, TOKEN, wanted, limits=PATIENT)
        task = asyncio.create_task(load(wanted, [source], cancelled=cancelled))
        await until(asked.is_set)
        if by == "event":
            cancelled.set()
            with pytest.raises(LoadCancelled):
                await task
        else:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    with odd_server(silent) as url:
        before = holdings()
        started_s = time.monotonic()
        asyncio.run(run(url))
        assert time.monotonic() - started_s < PATIENT.silent_s / 2
        ended.set()
        assert settles_at(before)


def test_cancelled_before_it_began(bundle: Path, wanted: Parameters) -> None:
    async def run() -> None:
        cancelled = asyncio.Event()
        cancelled.set()
        await load(wanted, [DiskSource(bundle / wanted.file, wanted.nbytes)], cancelled=cancelled)

    before = holdings()
    with pytest.raises(LoadCancelled):
        asyncio.run(run())
    assert settles_at(before)
