"""Rings between real processes: what one writes another reads, and a dead owner leaves nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest
from support.shared_memory import shared_names

from keystage.wire.api import TensorRef
from keystage.wire.ring import PeerRings, RingError

PRODUCER = """
import sys, msgspec
from keystage.wire.ring import Ring
ring = Ring(1 << 20)
for line in sys.stdin:
    ref = ring.write(memoryview(line.strip().encode() * 1000), "uint8", (1000,))
    sys.stdout.buffer.write(msgspec.json.encode(ref) + b"\\n")
    sys.stdout.flush()
"""


@pytest.fixture
def producer() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        [sys.executable, "-c", PRODUCER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        yield process
        process.kill()


def write(process: subprocess.Popen[bytes], word: bytes) -> TensorRef:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(word + b"\n")
    process.stdin.flush()
    return msgspec.json.decode(process.stdout.readline(), type=TensorRef)


def test_a_tensor_of_another_process_is_read_where_it_lies(producer: subprocess.Popen[bytes]) -> None:
    rings = PeerRings()
    first, second = write(producer, b"ab"), write(producer, b"xyz")
    assert bytes(rings.view(second, "p")) == b"xyz" * 1000
    assert bytes(rings.view(first, "p")) == b"ab" * 1000


def test_a_killed_owner_leaves_no_name_and_cannot_be_opened(producer: subprocess.Popen[bytes]) -> None:
    before = shared_names()
    ref = write(producer, b"ab")
    mapped, fresh = PeerRings(), PeerRings()
    mapped.view(ref, "p")
    producer.kill()
    producer.wait(10)
    # Who had it mapped may finish; nobody else can begin.
    assert bytes(mapped.view(ref, "p")) == b"ab" * 1000
    with pytest.raises(RingError, match=f"ring of pid {ref.pid}"):
        fresh.view(ref, "p")
    mapped.forget("p")
    with pytest.raises(RingError):
        mapped.view(ref, "p")
    assert shared_names() == before


@pytest.mark.parametrize(
    "changes", [{"offset": 1 << 20}, {"nbytes": -1}, {"offset": -2}, {"nbytes": 1 << 60}], ids=str
)
def test_a_reference_outside_of_the_ring_is_refused(
    producer: subprocess.Popen[bytes], changes: dict[str, int]
) -> None:
    ref = msgspec.structs.replace(write(producer, b"ab"), **changes)
    with pytest.raises(RingError, match="outside the ring"):
        PeerRings().view(ref, "p")


def test_a_descriptor_that_is_no_ring_is_refused(producer: subprocess.Popen[bytes]) -> None:
    ref = msgspec.structs.replace(write(producer, b"ab"), fd=0)
    with pytest.raises(RingError, match="not a ring"):
        PeerRings().view(ref, "p")
