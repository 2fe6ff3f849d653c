"""What a standby registers ahead: choice by rank, use and limit; mappings that come and go."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from keystage.bundle.safetensors_file import header_bytes
from keystage.keysmanager import daemon_needs, registered_copy, registration, segment
from keystage.keysmanager.api import Parameters, StageName
from keystage.keysmanager.arena import Layout, layout_for
from keystage.keysmanager.daemon_ahead import Candidate, chosen
from keystage.keysmanager.registration import Registration, RegistrationError, Registrations
from keystage.wire.cuda_driver import CudaError, Driver

SHAPES: dict[str, tuple[int, ...]] = {"weight": (64, 64)}


@pytest.fixture
def sealed() -> Iterator[tuple[int, Parameters]]:
    body = header_bytes(SHAPES, "float32") + bytes(64 * 64 * 4)
    draft = segment.create(len(body), "keystage-registered")
    with draft.window(0, len(body)) as window:
        window[:] = body
    fd = draft.seal()
    yield fd, Parameters(
        name=StageName("file:///b", 0), pipeline="p", identity="abc", dtype="float32", file="f",
        nbytes=len(body), chunks=(),
    )  # fmt: skip
    os.close(fd)


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("/memfd:keystage-registered")


def test_key_stages_come_by_rank_then_the_last_used_and_what_does_not_fit_is_left_out() -> None:
    candidates = [
        Candidate("late", 4, None, 9.0),
        Candidate("early", 4, None, 3.0),
        Candidate("second", 5, 1, 0.0),
        Candidate("first", 3, 0, 0.0),
    ]
    assert chosen(candidates, 100) == ["first", "second", "late", "early"]
    assert chosen(candidates, 8) == ["first", "second"]
    assert chosen(candidates, 7) == ["first", "late"]
    assert chosen(candidates, 2) == []


def test_a_segment_is_mapped_once_and_gone_when_it_is_let_go_of(sealed: tuple[int, Parameters]) -> None:
    fd, parameters = sealed
    registrations = Registrations("cpu", layout_for(SHAPES, "float32"))
    for _ in range(2):
        held = registrations.register(parameters, fd)
        assert (held.done_bytes, held.is_complete, mappings()) == (parameters.nbytes, True, 1)
    registrations.unregister("another")
    assert mappings() == 1
    registrations.unregister("abc")
    assert (mappings(), registrations.take("abc")) == (0, None)


def test_what_is_taken_is_the_takers_and_the_rest_is_closed(sealed: tuple[int, Parameters]) -> None:
    fd, parameters = sealed
    registrations = Registrations("cpu", layout_for(SHAPES, "float32"))
    registrations.register(parameters, fd)
    taken = registrations.take("abc")
    assert taken is not None
    registrations.register(parameters, fd)
    assert mappings() == 2
    registrations.close()
    assert mappings() == 1
    assert taken.view is not None
    assert len(taken.view) == parameters.nbytes
    taken.close()
    taken.close()
    assert mappings() == 0


def test_a_segment_of_another_layout_is_refused_and_unmapped(sealed: tuple[int, Parameters]) -> None:
    registrations = Registrations("cpu", layout_for({"weight": (64, 32)}, "float32"))
    with pytest.raises(RegistrationError, match=r"f cannot be registered ahead: .*this arena has a place"):
        registrations.register(sealed[1], sealed[0])
    assert mappings() == 0


class Recorder:
    """A driver that notes what it is told, and refuses to pin beyond a number of bytes."""

    def __init__(self, limit_bytes: int = 1 << 40) -> None:
        self.limit_bytes = limit_bytes
        self.pinned: dict[int, int] = {}
        self.copies: list[tuple[int, int, int, int]] = []
        self.streams: set[int] = set()
        self.waited: list[int] = []

    def enter(self) -> None:
        """No context here."""

    def register(self, address: int, nbytes: int) -> None:
        if sum(self.pinned.values()) + nbytes > self.limit_bytes:
            raise CudaError("cuMemHostRegister_v2", "CUDA_ERROR_OUT_OF_MEMORY (2)")
        self.pinned[address] = nbytes

    def unregister(self, address: int) -> None:
        del self.pinned[address]

    def stream(self) -> int:
        self.streams.add(len(self.streams) + 1)
        return len(self.streams)

    def wait_stream(self, stream: int) -> None:
        self.waited.append(stream)

    def destroy_stream(self, stream: int) -> None:
        self.streams.discard(stream)

    def queue_copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self.copies.append((target, source, nbytes, stream))


PAGES = 7
STEP = 2 * mmap.PAGESIZE
DEVICE_ADDRESS = 1 << 44


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Recorder, Registration]]:
    """A file that ends within its seventh page, registered by two pages."""
    monkeypatch.setattr(registration, "STEP_BYTES", STEP)
    nbytes = PAGES * mmap.PAGESIZE - 100
    draft = segment.create(nbytes, "keystage-registered", huge=False)
    fd = draft.seal()
    recorder = Recorder()
    driver = cast("Driver", recorder)
    yield recorder, Registration("abc", segment.map_readonly(fd, nbytes), Layout(64, nbytes - 64, ()), driver)
    os.close(fd)


def test_steps_pin_whole_pages_in_order_and_closing_unpins_them(
    pinned: tuple[Recorder, Registration],
) -> None:
    recorder, held = pinned
    done = []
    while not held.is_complete:
        held.step()
        done.append(held.done_bytes)
    held.step()
    assert done == [STEP, 2 * STEP, 3 * STEP, PAGES * mmap.PAGESIZE - 100]
    assert list(recorder.pinned.values()) == [STEP, STEP, STEP, mmap.PAGESIZE]
    assert all(address % mmap.PAGESIZE == 0 for address in recorder.pinned)
    assert mappings() == 1
    held.close()
    assert (recorder.pinned, held.done_bytes, mappings()) == ({}, 0, 0)


@pytest.mark.parametrize("steps", [1, 3, 4])
@pytest.mark.parametrize("copy_bytes", [mmap.PAGESIZE, STEP, 1 << 30])
def test_every_byte_is_copied_once_and_no_copy_leaves_its_registration(
    pinned: tuple[Recorder, Registration], steps: int, copy_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registered_copy, "COPY_BYTES", copy_bytes)
    recorder, held = pinned
    for _ in range(steps):
        held.step()
    assert held.view is not None
    source, start = segment.as_tensor(held.view).data_ptr(), held.layout.data_start
    driver = cast("Driver", recorder)
    under_way = registered_copy.RegisteredCopy(driver, held, source, start, DEVICE_ADDRESS)
    assert under_way.done_bytes == held.done_bytes
    assert len(recorder.streams) == under_way.streams
    under_way.wait()
    at = source + start
    for target, begin, nbytes, _ in recorder.copies:
        assert (begin, target) == (at, DEVICE_ADDRESS + at - source - start)
        assert 0 < nbytes <= copy_bytes
        assert any(a <= begin and begin + nbytes <= a + n for a, n in recorder.pinned.items())
        at += nbytes
    assert at == source + held.done_bytes
    assert {stream for *_, stream in recorder.copies} <= set(recorder.waited)
    assert recorder.streams == set()


def test_pinning_that_is_refused_midway_is_undone_and_names_the_limit(
    sealed: tuple[int, Parameters], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration, "STEP_BYTES", mmap.PAGESIZE)
    recorder = Recorder(2 * mmap.PAGESIZE)
    registrations = Registrations("cpu", layout_for(SHAPES, "float32"))
    monkeypatch.setattr(registrations, "_pinning_driver", lambda: recorder)
    for step in (1, 2):
        assert registrations.register(sealed[1], sealed[0]).done_bytes == step * mmap.PAGESIZE
    with pytest.raises(RegistrationError, match=r"could not be pinned .*RLIMIT_MEMLOCK is"):
        registrations.register(sealed[1], sealed[0])
    assert (recorder.pinned, mappings()) == ({}, 0)


@pytest.mark.parametrize(("value", "found"), [("", None), ("0", 0), ("1024", 1024)])
def test_the_limit_of_a_standby_is_read_from_its_environment(value: str, found: int | None) -> None:
    env = {"KEYSTAGE_STAGES": "2", "KEYSTAGE_BUNDLE": "file:///b", "KEYSTAGE_STANDBY_REGISTER_BYTES": value}
    assert daemon_needs.of(env).register_bytes == found
    for wrong in ("-1", "1e9"):
        with pytest.raises(ValueError, match=f"KEYSTAGE_STANDBY_REGISTER_BYTES={wrong}"):
            daemon_needs.of({**env, "KEYSTAGE_STANDBY_REGISTER_BYTES": wrong})
