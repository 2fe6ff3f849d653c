"""Sealed segments: what may be done with them, and what may not."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import mmap
import os
from pathlib import Path

import pytest
import torch
from support.keysmanager_forks import at_most, open_fds

from keystage.keysmanager import segment
from keystage.keysmanager.segment import SegmentError, as_tensor, check_sealed, create, map_readonly


def sealed(content: bytes, name: str = "test") -> int:
    draft = create(len(content), name)
    with draft.window(0, len(content)) as window:
        window[:] = content
    return draft.seal()


def entries(name: str) -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if f"memfd:{name}" in line]


def anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


def test_content_written_window_by_window_is_read_back() -> None:
    content = os.urandom(3 * mmap.PAGESIZE + 17)
    draft = create(len(content), "windows")
    for start in range(0, len(content), 5000):
        part = content[start : start + 5000]
        with draft.window(start, len(part)) as window:
            window[:] = part
    fd = draft.seal()
    assert check_sealed(fd) >= len(content)
    assert bytes(map_readonly(fd, len(content))) == content
    os.close(fd)


def test_a_sealed_segment_cannot_be_changed_by_any_way() -> None:
    fd = sealed(b"x" * 9000)
    with pytest.raises(OSError, match="not permitted"):
        os.pwrite(fd, b"y", 0)
    for size in (1, 20_000):
        with pytest.raises(OSError, match="not permitted"):
            os.ftruncate(fd, size)
    with pytest.raises(OSError, match="not permitted"):
        mmap.mmap(fd, 9000, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(OSError, match="not permitted"):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    os.close(fd)


def test_what_is_mapped_is_shared_read_only_and_cannot_become_writable() -> None:
    fd = sealed(b"x" * 9000, "flags")
    view = map_readonly(fd, 9000)
    os.close(fd)
    (entry,) = entries("flags")
    assert entry.split()[1] == "r--s"
    with pytest.raises(TypeError):
        view[0] = 1
    address = int(entry.split("-")[0], 16)
    libc = ctypes.CDLL(None, use_errno=True)
    changed = libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(4096), mmap.PROT_READ | mmap.PROT_WRITE)
    assert changed == -1
    assert ctypes.get_errno() == 13


def test_reading_a_mapped_segment_makes_no_anonymous_memory() -> None:
    fd = sealed(bytes(32 << 20))
    tensor = as_tensor(map_readonly(fd, 32 << 20))
    os.close(fd)
    before = anonymous_bytes()
    assert int(tensor.sum()) == 0
    assert anonymous_bytes() - before < 4 << 20


def test_the_mapping_lives_as_long_as_the_last_tensor() -> None:
    fd = sealed(bytes(range(256)) * 64, "life")
    view = map_readonly(fd, 16384)
    os.close(fd)
    tensor = as_tensor(view)[256:512].view(torch.uint8)
    del view
    gc.collect()
    assert len(entries("life")) == 1
    assert tensor.tolist() == list(range(256))
    del tensor
    gc.collect()
    assert entries("life") == []


def test_sealing_waits_for_windows_and_happens_once() -> None:
    draft = create(5000, "open")
    with draft.window(0, 10), pytest.raises(SegmentError, match="1 windows are open"):
        draft.seal()
    fd = draft.seal()
    with pytest.raises(SegmentError, match="sealed before"):
        draft.seal()
    draft.discard()
    assert check_sealed(fd) == 5000
    os.close(fd)


@pytest.mark.parametrize(("offset", "length"), [(-1, 5), (0, 0), (0, 5001), (4999, 2), (6000, 1)])
def test_a_window_outside_is_refused(offset: int, length: int) -> None:
    draft = create(5000, "bounds")
    with pytest.raises(SegmentError, match="holds 5000"), draft.window(offset, length):
        pass
    draft.discard()


def test_a_discarded_draft_gives_its_descriptor_back() -> None:
    before = open_fds()
    draft = create(1 << 20, "gone")
    draft.discard()
    draft.discard()
    assert open_fds() == before


def test_an_absurd_size_is_named_and_takes_nothing() -> None:
    before = open_fds()
    with pytest.raises(
        SegmentError, match=r"segment huge: 1125899906842624 bytes wanted, \d+ bytes of memory"
    ):
        create(1 << 50, "huge")
    for size in (0, -1):
        with pytest.raises(SegmentError, match="at least 1"):
            create(size, "none")
    assert open_fds() == before


def test_a_size_that_the_kernel_refuses_is_named_and_takes_nothing() -> None:
    before = open_fds()
    with at_most(1 << 20), pytest.raises(SegmentError, match="segment big of 2097152 bytes: File too large"):
        create(2 << 20, "big", huge=False)
    assert open_fds() == before


def test_more_than_the_segment_is_not_mapped() -> None:
    fd = sealed(b"x" * 100)
    for nbytes in (0, 101, 1 << 40):
        with pytest.raises(SegmentError, match="holds 100"):
            map_readonly(fd, nbytes)
    os.close(fd)


def test_what_is_not_sealed_is_refused_by_the_missing_seal(tmp_path: Path) -> None:
    draft = create(100, "draft")
    with pytest.raises(SegmentError, match="SEAL, SHRINK, GROW, WRITE missing"):
        check_sealed(draft.fileno())
    fcntl.fcntl(draft.fileno(), fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    with pytest.raises(SegmentError, match="sealed: SEAL, WRITE missing"):
        check_sealed(draft.fileno())
    draft.discard()
    with (tmp_path / "file").open("wb") as file, pytest.raises(SegmentError, match="no memfd"):
        check_sealed(file.fileno())


def test_small_pages_serve_where_no_huge_ones_are_wanted() -> None:
    draft = create(100, "small", huge=False)
    assert (draft.huge_bytes, draft.is_hugetlb) == (0, False)
    draft.discard()


def test_huge_pages_serve_where_there_are_some_and_else_small_ones() -> None:
    has_huge = segment.free_huge_bytes() >= segment.HUGE_BYTES
    draft = create(5000, "huge")
    assert draft.is_hugetlb == has_huge
    with draft.window(10, 4000) as window:
        window[:3] = b"abc"
    fd = draft.seal()
    assert check_sealed(fd) == (segment.HUGE_BYTES if has_huge else 5000)
    assert bytes(map_readonly(fd, 5000)[10:13]) == b"abc"
    os.close(fd)
