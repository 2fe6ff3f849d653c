"""Activations that change on their way: found by their checksums, computed again, counted and named."""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
from pathlib import Path

import pytest
from support.pipeline_world import served
from support.processes import wait_for

from keystage.bundle.api import emulated
from keystage.bundle.store import write
from keystage.wire.address import Address
from keystage.wire.api import TensorRef
from keystage.wire.checksums import NONE, CorruptTensorError
from keystage.wire.link import Link
from keystage.wire.ring import Ring, RingError
from keystage.wire.secret import Secret
from keystage.wire.sources import TensorSources
from keystage.wire.tensor_server import TensorServer

DATA = bytes(range(200))


def put(ring: Ring) -> TensorRef:
    ref = ring.write(memoryview(DATA), "uint8", (len(DATA),))
    assert ref is not None
    return ref


def flip(ring: Ring, ref: TensorRef, byte: int) -> None:
    ring.whole[ref.offset + byte] ^= 0x10


def test_a_flipped_bit_in_a_ring_is_found_and_named(caplog: pytest.LogCaptureFixture) -> None:
    ring, sources = Ring(1 << 16, is_checked=True), TensorSources()
    good, bad = put(ring), put(ring)
    flip(ring, bad, 117)
    assert sources.view(good, "ipc:///a") == DATA
    with pytest.raises(
        CorruptTensorError, match=r"tensor of 200 bytes \(uint8 \[200\]\) in slot 2 of ipc:///a"
    ):
        sources.view(bad, "ipc:///a")
    assert sources.checker.corrupt == 1
    assert "ipc:///a was changed on its way" in caplog.text
    flip(ring, bad, 117)
    assert sources.view(bad, "ipc:///a") == DATA


def test_without_checksums_nothing_is_compared() -> None:
    ring, sources = Ring(1 << 16), TensorSources()
    ref = put(ring)
    assert ref.checksum == NONE
    flip(ring, ref, 0)
    assert sources.view(ref, "ipc:///a") != DATA
    assert sources.checker.corrupt == 0


def test_a_tensor_of_another_node_is_compared_as_well(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    ring = Ring(1 << 16, is_checked=True)
    link = Link("p", Secret(b"a" * 32), "127.0.0.1", is_plain=True)
    server = TensorServer(ring, link)
    name = Address("/nowhere", "127.0.0.1:1", server.address, "p").text
    sources = TensorSources(Link("c", Secret(b"a" * 32), "127.0.0.1", is_plain=True))
    try:
        good, bad = put(ring), put(ring)
        flip(ring, bad, 3)
        arrived: list[bool] = []
        assert sources.begin([good, bad], [name, name], lambda: arrived.append(True))

        def has_come() -> bool:
            sources.poll()
            return bool(arrived)

        wait_for(has_come, "both tensors")
        assert sources.view(good, name) == DATA
        with pytest.raises(RingError, match="was changed on its way"):
            sources.view(bad, name)
        assert sources.checker.corrupt == 1
    finally:
        sources.forget(name)
        server.close()


def ring_of(pid: int) -> mmap.mmap:
    """A worker's ring, from outside."""
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        if str(fd.readlink()).startswith("/memfd:keystage-ring"):
            opened = os.open(fd, os.O_RDWR)
            try:
                return mmap.mmap(opened, os.fstat(opened).st_size)
            finally:
                os.close(opened)
    raise AssertionError(f"process {pid} has no ring")


@pytest.mark.slow
def test_answers_stay_right_while_somebody_writes_into_a_ring(tmp_path: Path) -> None:
    (tmp_path / "bundle").mkdir()
    write(tmp_path / "bundle", emulated("em", 2, execution="single-pass"))
    # The second stage is slow: what the first one made waits for it in the ring.
    devices = ("emulated", "emulated:beta=0.03")
    env = {"KEYSTAGE_WIRE_CHECKSUM": "on", "KEYSTAGE_MAX_LOSSES": "100", "KEYSTAGE_MAX_BATCH": "1"}

    async def run() -> None:
        async with served(tmp_path / "bundle", tmp_path / "home", device=devices, env=env) as pipeline:
            (producer,) = pipeline.world.replicas("em-stage-0")
            (consumer,) = pipeline.world.replicas("em-stage-1")
            ring = ring_of(producer.pid)

            async def corrupt() -> int:
                async with pipeline.session.get(f"http://{consumer.address}/metrics") as answer:
                    text = await answer.text()
                name = "keystage_worker_corrupt_tensors_total{"
                line = next(line for line in text.splitlines() if line.startswith(name))
                return int(float(line.rpartition(" ")[2]))

            async def disturb() -> None:
                """Flips a bit in the slots that are used first, now and then, until it was noticed."""
                while await corrupt() == 0:
                    for offset in range(5, 64 * 8, 64):
                        ring[offset] = ring[offset] ^ 0x40
                    await asyncio.sleep(0.05)

            async def ask(i: int) -> None:
                body = bytes([i % 250]) * 48
                async with pipeline.session.post(f"{pipeline.router}/", data=body) as answer:
                    assert (answer.status, await answer.read()) == (200, body)

            async def keep_asking(disturbing: asyncio.Task[None]) -> None:
                asked = 0
                while not disturbing.done():
                    await asyncio.gather(*(ask(asked + i) for i in range(8)))
                    asked += 8

            async with asyncio.timeout(60):
                disturbing = asyncio.create_task(disturb())
                await keep_asking(disturbing)
                await disturbing
            assert await corrupt() > 0
            assert (await pipeline.stats()).refused == {}
            ring.close()

    asyncio.run(run())
