"""Parameters on a GPU: every way gives the same bytes, nothing stays pinned, mapped or allocated."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from keystage.bench.load import output_of
from keystage.bench.load_bundles import STAGE, write_bundle
from keystage.bench.load_world import LoadWorld
from keystage.bundle.api import Pipeline
from keystage.keysmanager import fork_check, peer_gpu, pinning, registration, segment
from keystage.keysmanager.api import Parameters, StageName
from keystage.keysmanager.arena import Arena, layout_of
from keystage.keysmanager.device_config import DeviceConfig
from keystage.keysmanager.device_copy import Delivery, load_stage_from_segment
from keystage.keysmanager.mapped_pages import has_huge_pages
from keystage.keysmanager.registration import Registration, RegistrationError, Registrations
from keystage.keysmanager.ring_ahead import RingAhead
from keystage.keysmanager.segment_copy import STAGED_LANES, Copied, Copy
from keystage.keysmanager.standby import Prepared
from keystage.models.base import Row
from keystage.models.decoder import DecoderStage
from keystage.models.loading import load_stage, sample_input
from keystage.wire.cuda_driver import Driver

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

DEVICE = "cuda:0"
STEP_BYTES = 32 << 20
EXPORTER = """
import sys, torch
from pathlib import Path
from keystage.keysmanager import peer_gpu
data = torch.arange(1 << 20, dtype=torch.int32, device="cuda:0").view(torch.uint8)
torch.cuda.synchronize()
peer_gpu.publish(Path(sys.argv[1]), "exporter", peer_gpu.export("some-identity", data))
print("published", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Pipeline]:
    folder = tmp_path_factory.mktemp("gpu") / "b"
    return folder, write_bundle(folder, "b", 0.25, "bfloat16", 1)


@pytest.fixture
def sealed(bundle: tuple[Path, Pipeline]) -> Iterator[tuple[int, int]]:
    """The stage's file in a sealed segment: descriptor and bytes."""
    folder, pipeline = bundle
    content = (folder / pipeline.stages[STAGE].file).read_bytes()
    draft = segment.create(len(content), "test")
    with draft.window(0, len(content)) as window:
        window[:] = content
    fd = draft.seal()
    yield fd, len(content)
    os.close(fd)


@pytest.fixture
def view(sealed: tuple[int, int]) -> memoryview:
    """The segment, mapped as a replica maps it."""
    return segment.map_readonly(*sealed)


@pytest.fixture
def ahead(
    bundle: tuple[Path, Pipeline], view: memoryview, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Registrations]:
    """A standby's registrations, in small steps; a context exists."""
    torch.zeros(1, device=DEVICE)
    monkeypatch.setattr(registration, "STEP_BYTES", STEP_BYTES)
    registrations = Registrations(DEVICE, layout_of(view))
    yield registrations
    registrations.close()


def parameters_of(bundle: tuple[Path, Pipeline]) -> Parameters:
    folder, pipeline = bundle
    spec = pipeline.stages[STAGE]
    return Parameters(
        name=StageName(folder.as_uri(), STAGE), pipeline=pipeline.name, identity=spec.identity,
        dtype=pipeline.dtype, file=spec.file, nbytes=spec.nbytes, chunks=(),
    )  # fmt: skip


def shmem_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssShmem:")[2].split()[0]) * 1024


def copied(view: memoryview, ring: pinning.Ring | None) -> tuple[Copied, torch.Tensor, int]:
    """(how, bytes on the device, shared pages still mapped when all is over)."""
    layout = layout_of(view)
    arena = Arena(layout.data_bytes, DEVICE)
    copy = Copy(view, layout.data_start, arena, ring)
    result = copy.wait()
    done = threading.Event()
    copy.unmap(done.set)
    assert done.wait(30)
    return result, arena.data[: layout.data_bytes].cpu(), shmem_bytes()


def copied_ahead(held: Registration, ring: pinning.Ring | None) -> tuple[Copied, torch.Tensor]:
    """(how, bytes on the device) of a segment that was registered ahead, maybe in part."""
    assert held.view is not None
    arena = Arena(held.layout.data_bytes, DEVICE)
    copy = Copy(held.view, held.layout.data_start, arena, ring, held)
    result = copy.wait()
    held.close()
    done = threading.Event()
    copy.unmap(done.set)
    assert done.wait(30)
    return result, arena.data[: held.layout.data_bytes].cpu()


def expected(view: memoryview) -> torch.Tensor:
    return torch.frombuffer(bytearray(view[layout_of(view).data_start :]), dtype=torch.uint8)


def test_registered_in_place(view: memoryview) -> None:
    torch.zeros(1, device=DEVICE)  # the context maps shared pages of its own
    before = shmem_bytes()
    result, found, shared = copied(view, None)
    assert result.way == "registered", result
    assert torch.equal(found, expected(view))
    assert shared <= before + (8 << 20)


def test_registered_ahead_in_steps_and_given_back(
    bundle: tuple[Path, Pipeline], sealed: tuple[int, int], view: memoryview, ahead: Registrations
) -> None:
    parameters, before = parameters_of(bundle), shmem_bytes()
    steps = -(-sealed[1] // STEP_BYTES)
    for _ in range(2):  # what is pinned still could not be pinned again
        done = [ahead.register(parameters, sealed[0]).done_bytes for _ in range(steps)]
        assert done == [min(STEP_BYTES * n, sealed[1]) for n in range(1, steps + 1)]
        held = ahead.take(parameters.identity)
        assert held is not None
        assert held.is_complete
        result, found = copied_ahead(held, None)
        assert (result.way, result.note) == ("registered-ahead", "")
        assert torch.equal(found, expected(view))
        del held
    assert shmem_bytes() <= before + sealed[1] + (8 << 20)  # `expected` has touched this process's own view


@pytest.mark.parametrize("has_ring", [False, True])
def test_what_was_registered_in_part_is_completed(
    bundle: tuple[Path, Pipeline],
    sealed: tuple[int, int],
    view: memoryview,
    ahead: Registrations,
    has_ring: bool,
) -> None:
    ring = pinning.Ring(Driver(), STAGED_LANES) if has_ring else None
    for _ in range(2):
        held = ahead.register(parameters_of(bundle), sealed[0])
    taken = ahead.take(held.identity)
    assert taken is held
    result, found = copied_ahead(held, ring)
    assert (result.way, result.note) == (
        "staged" if has_ring else "registered",
        f"{2 * STEP_BYTES} bytes were registered ahead",
    )
    assert torch.equal(found, expected(view))
    if ring is not None:
        ring.close()


def test_registering_that_is_refused_midway_leaves_nothing_pinned(
    bundle: tuple[Path, Pipeline], sealed: tuple[int, int], ahead: Registrations
) -> None:
    parameters, driver = parameters_of(bundle), Driver()
    held = ahead.register(parameters, sealed[0])
    ((address, nbytes),) = held.chunks
    driver.register(address + nbytes, mmap.PAGESIZE)  # the driver refuses to register a page twice
    try:
        with pytest.raises(RegistrationError, match="RLIMIT_MEMLOCK"):
            ahead.register(parameters, sealed[0])
    finally:
        driver.unregister(address + nbytes)
    assert ahead.take(parameters.identity) is None
    assert (held.chunks, held.view) == ([], None)


def test_staged_through_a_ring(view: memoryview) -> None:
    torch.zeros(1, device=DEVICE)
    ring = pinning.Ring(Driver(), STAGED_LANES)
    result, found, _ = copied(view, ring)
    again, twice, _ = copied(view, ring)
    ring.close()
    assert (result.way, again.way) == ("staged", "staged")
    assert torch.equal(found, expected(view))
    assert torch.equal(twice, found)


def test_a_forks_ring_is_made_before_its_context(view: memoryview) -> None:
    made = RingAhead(view)
    torch.zeros(1, device=DEVICE)
    ring = made.ring()
    assert (ring is None) == has_huge_pages(segment.as_tensor(view))
    assert made.ring() is None
    if ring is None:
        return
    result, found, _ = copied(view, ring)
    ring.close()
    assert result.way == "staged"
    assert torch.equal(found, expected(view))


def test_refused_registration_falls_back_and_names_the_limit(
    view: memoryview, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.zeros(1, device=DEVICE)
    driver = Driver()
    address = segment.as_tensor(view).data_ptr()
    driver.register(address, mmap.PAGESIZE)  # the driver refuses to register a page twice
    try:
        result, found, _ = copied(view, None)
        assert (result.way, "RLIMIT_MEMLOCK" in result.note) == ("staged", True)
        assert torch.equal(found, expected(view))
        monkeypatch.setattr(pinning, "RING_CHUNK_BYTES", 1 << 44)  # more than any machine pins
        result, found, _ = copied(view, None)
    finally:
        driver.unregister(address)
    assert result.way == "pageable"
    assert torch.equal(found, expected(view))
    assert "pageable copy" in caplog.text


def test_every_way_computes_what_a_cold_start_does(
    bundle: tuple[Path, Pipeline], view: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    from keystage.models.cuda_span import CudaSpan  # needs Triton

    monkeypatch.setenv("KEYSTAGE_PEER_GPU", "0")
    folder, pipeline = bundle
    cold = load_stage(folder, pipeline, STAGE, DEVICE, "bf16")
    forked = load_stage_from_segment(pipeline, STAGE, view, DEVICE, "bfloat16")
    prepared = Prepared(pipeline, STAGE, DEVICE, "bfloat16", 256 << 20)
    assert prepared.arena is not None
    assert prepared.stage is not None
    Delivery(view, layout_of(view), prepared.arena, "x", prepared.ring, DeviceConfig(peer_gpu=False)).wait()
    assert isinstance(cold, DecoderStage)
    assert isinstance(forked, DecoderStage)
    prompts, steps = [], []
    for stage in (CudaSpan([cold], 8), CudaSpan([forked], 8), prepared.stage):
        stage.open(0, 32)
        prompts.append(stage.forward(sample_input(stage, 16), [Row(0, 0, 16)], []))
        steps.append(stage.forward(sample_input(stage, 1), [Row(0, 16, 1)], []))
    assert torch.equal(prompts[0], prompts[1])
    assert torch.equal(prompts[0], prompts[2])
    assert torch.equal(steps[0], steps[1])
    assert torch.equal(steps[0], steps[2])
    assert getattr(prepared.stage, "replays", 0) >= 1


def test_a_peer_gives_its_parameters_until_it_dies(tmp_path: Path) -> None:
    exporter = subprocess.Popen(
        [sys.executable, "-c", EXPORTER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert exporter.stdout is not None
        assert exporter.stdout.readline() == b"published\n"
        target = torch.zeros(4 << 20, dtype=torch.uint8, device=DEVICE)
        filled = peer_gpu.fill(tmp_path, "some-identity", target)
        assert filled is not None
        source = filled[0]
        assert torch.equal(target.view(torch.int32).cpu(), torch.arange(1 << 20, dtype=torch.int32))
        assert peer_gpu.fill(tmp_path, "another-identity", target) is None
    finally:
        exporter.send_signal(signal.SIGKILL)
        exporter.wait(30)
        for end in (exporter.stdin, exporter.stdout):
            if end is not None:
                end.close()
    with pytest.raises(peer_gpu.PeerGpuError, match=f"process {source.pid}, which had .* has ended"):
        peer_gpu.copy_from(source, target)
    assert peer_gpu.fill(tmp_path, "some-identity", target) is None
    assert list(tmp_path.iterdir()) == []


def test_only_an_arena_that_lives_on_is_offered(
    bundle: tuple[Path, Pipeline], view: memoryview, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, pipeline = bundle
    monkeypatch.setenv("KEYSTAGE_RUN", str(tmp_path))
    for replica, dtype in (("kept", "bfloat16"), ("converted", "float32")):
        monkeypatch.setenv("KEYSTAGE_REPLICA", replica)
        load_stage_from_segment(pipeline, STAGE, view, DEVICE, dtype)
    assert [path.name for path in tmp_path.iterdir()] == ["kept.gpu"]


def used_bytes() -> int:
    import pynvml

    pynvml.nvmlInit()
    try:
        return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used)
    finally:
        pynvml.nvmlShutdown()


def test_fork_server_has_no_cuda_children_have_and_all_memory_comes_back() -> None:
    with LoadWorld(DEVICE, "bfloat16", 1) as world:
        folder = world.folder / "b"
        pipeline = write_bundle(folder, "b", 0.25, "bfloat16", 1)
        fresh = world.fresh(folder)
        fresh.timeline()
        reference = output_of(fresh, pipeline)
        fresh.end()
        before = used_bytes()
        forked = world.forked(folder)
        forked.timeline()
        assert forked.via == "holder"
        assert output_of(forked, pipeline) == reference
        assert "/dev/nvidia-uvm" in links(forked.pid)
        assert rss_shmem(forked.pid) < 32 << 20
        for registered, ways in ((None, {"staged", "registered"}), ([folder], {"registered-ahead"})):
            world.keep_standbys(folder, 1, registered)
            standby = world.forked(folder)
            standby.timeline()
            assert standby.via == "standby"
            assert standby.copied()[2] in ways
            assert output_of(standby, pipeline) == reference
            until_s = time.monotonic() + 10.0
            while rss_shmem(standby.pid) >= 32 << 20:  # given back beside the first work
                assert time.monotonic() < until_s
                time.sleep(0.01)
            if registered is None:
                standby.end()
        world.keep_standbys(folder, 0)
        for pid in world.keepers():
            assert "/dev/nvidia-uvm" not in links(pid)
            assert len(list(Path(f"/proc/{pid}/task").iterdir())) == 1
        assert used_bytes() > before
        forked.end()
        standby.end()
        assert used_bytes() <= before + (2 << 20)


def links(pid: int) -> set[str]:
    return {str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir() if entry.is_symlink()}


def rss_shmem(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("RssShmem:")[2].split()[0]) * 1024


def test_this_process_may_not_fork() -> None:
    torch.zeros(1, device=DEVICE)
    assert fork_check.has_cuda()
