"""Types of file systems, and the bounded disk cache."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from keystage.keysmanager.api import Parameters, StageName
from keystage.keysmanager.disk_cache import DiskCache
from keystage.keysmanager.loader_mounts import file_system, is_network, type_of

MOUNTS = """\
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 27 0:40 / /models rw,relatime shared:2 master:3 - nfs4 server:/models rw,vers=4.2
31 30 0:41 / /models/local rw - xfs /dev/vdb rw
32 27 0:42 / /mnt/with\\040space rw - fuse.s3fs s3fs rw
33 27 0:43 / /twice rw - ext4 /dev/vdc rw
34 33 0:44 / /twice rw - lustre mds:/l rw
garbled line
"""


@pytest.mark.parametrize(
    ("path", "kind", "remote"),
    [
        ("/srv/bundle/stage", "ext4", False),
        ("/models/b/stage", "nfs4", True),
        ("/models", "nfs4", True),
        ("/models-too/b", "ext4", False),
        ("/models/local/b", "xfs", False),
        ("/mnt/with space/b", "fuse.s3fs", True),
        ("/twice/b", "lustre", True),
    ],
)
def test_type_of_the_file_system(path: str, kind: str, remote: bool) -> None:
    assert type_of(path, MOUNTS) == kind
    assert is_network(kind) is remote


@pytest.mark.parametrize(
    ("kind", "remote"),
    [("tmpfs", False), ("overlay", False), ("btrfs", False), ("fuse.fuse-overlayfs", False), ("", False),
     ("fuse.juicefs", True), ("cifs", True), ("9p", True), ("ceph", True), ("fuse", True)],
)  # fmt: skip
def test_which_are_another_machines(kind: str, remote: bool) -> None:
    assert is_network(kind) is remote


def test_no_mounts_no_type() -> None:
    assert type_of("/a", "") == ""


def test_of_this_machine(tmp_path: Path) -> None:
    assert file_system(Path("/proc/self")) == "proc"
    (tmp_path / "link").symlink_to("/proc")
    assert file_system(tmp_path / "link" / "missing") == "proc"


def made(number: int, nbytes: int) -> Parameters:
    return Parameters(
        name=StageName("file:///b", number),
        pipeline="p",
        identity=f"{number:064x}",
        dtype="float32",
        file="f",
        nbytes=nbytes,
        chunks=(),
    )


def store(cache: DiskCache, parameters: Parameters, content: bytes) -> bool:
    fd = os.memfd_create("test")
    try:
        os.pwrite(fd, content, 0)
        return cache.store(parameters, fd)
    finally:
        os.close(fd)


def test_least_recently_used_makes_room(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "cache", 1000)
    for number in (1, 2, 3):
        assert store(cache, made(number, 300), bytes([number]) * 300)
        path = cache.find(made(number, 0).identity)
        assert path is not None
        os.utime(path, ns=(number, number))
    assert cache.find(made(1, 0).identity) is not None  # used again: 2 is the oldest now
    assert store(cache, made(4, 500), bytes(500))
    assert cache.held_bytes() == 800
    assert [number for number in (1, 2, 3, 4) if cache.find(made(number, 0).identity)] == [1, 4]


def test_content_and_rights(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "cache", 1000)
    assert store(cache, made(1, 5), b"12345-rest-of-a-huge-page")
    path = cache.find(made(1, 0).identity)
    assert path is not None
    assert path.read_bytes() == b"12345"
    assert path.parent.stat().st_mode & 0o077 == 0
    cache.drop(made(1, 0).identity)
    cache.drop(made(1, 0).identity)
    assert cache.find(made(1, 0).identity) is None


def test_what_is_not_kept(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "cache", 1000)
    assert not store(cache, made(1, 1001), bytes(1001))  # larger than all
    assert not store(cache, made(2, 900), bytes(10))  # a segment that is too short
    assert not store(cache, msgspec.structs.replace(made(3, 5), identity="../evil"), bytes(5))
    assert not store(DiskCache(tmp_path / "off", 0), made(4, 5), bytes(5))
    assert cache.find("../evil") is None
    assert cache.held_bytes() == 0
    assert list((tmp_path / "cache").iterdir()) == []
    assert not (tmp_path / "off").exists()


def test_a_folder_that_cannot_be_written_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert not store(DiskCache(tmp_path / "file" / "cache", 1000), made(1, 5), bytes(5))


def test_rests_of_a_killed_daemon_are_swept(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 1000)
    rest = tmp_path / f".{'0' * 64}.partial"
    rest.write_bytes(bytes(100))
    assert store(cache, made(1, 5), bytes(5))
    assert not rest.exists()


def test_stored_twice_is_written_once(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 1000)
    assert store(cache, made(1, 5), b"first")
    assert store(cache, made(1, 5), b"other")
    assert (tmp_path / made(1, 0).identity).read_bytes() == b"first"
