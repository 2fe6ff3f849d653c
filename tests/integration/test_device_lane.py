"""Tensors that stay on a device between workers: who maps what, whose slots they are, what a death leaves."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from keystage.wire import api
from keystage.wire.mailbox import Mailbox
from keystage.wire.ring import Ring, RingError
from keystage.wire.sources import TensorSources
from keystage.worker.device_lane import Arena, DeviceLane, LaneError
from keystage.worker.executor import Activation, DeviceActivation
from keystage.worker.handing import input_of
from keystage.worker.outbox import TensorOutbox

ARENA_BYTES = 4096
RING_BYTES = 8192


class Memory:
    """Arenas of every device of a test, by handle; a device can be told to map and pin nothing."""

    def __init__(self) -> None:
        self.arenas: dict[bytes, Arena] = {}
        self.numbers = itertools.count()

    def arena(self) -> Arena:
        owner = ctypes.create_string_buffer(ARENA_BYTES)
        handle = b"arena %d" % next(self.numbers)
        self.arenas[handle] = Arena(ctypes.addressof(owner), ARENA_BYTES, handle, owner)
        return self.arenas[handle]


@dataclasses.dataclass
class HostDriver:
    """A device whose memory is the host's; copies run when they are waited for, as on a device."""

    memory: Memory
    maps: bool = True
    pins: bool = True
    queued: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)
    mapped: list[int] = dataclasses.field(default_factory=list)
    pinned: dict[int, int] = dataclasses.field(default_factory=dict)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        self.queued.append((target, source, nbytes))

    def settle(self) -> None:
        for target, source, nbytes in self.queued:
            ctypes.memmove(target, source, nbytes)
        self.queued.clear()

    def map(self, handle: bytes) -> int:
        if not self.maps or handle not in self.memory.arenas:
            raise LaneError("peer access is not possible")
        self.mapped.append(self.memory.arenas[handle].address)
        return self.mapped[-1]

    def unmap(self, address: int) -> None:
        self.mapped.remove(address)

    def pin(self, address: int, nbytes: int) -> None:
        if not self.pins:
            raise LaneError("RLIMIT_MEMLOCK")
        self.pinned[address] = nbytes

    def unpin(self, address: int) -> None:
        del self.pinned[address]


class Node:
    """What of a worker sends and takes tensors."""

    def __init__(self, folder: Path, name: str, driver: HostDriver, *, has_arena: bool = True) -> None:
        self.mailbox = Mailbox(f"ipc://{folder}/{name}")
        self.ring = Ring(RING_BYTES)
        self.driver = driver
        self.lane = DeviceLane(driver, driver.memory.arena() if has_arena else None)
        self.sources = TensorSources()
        self.outbox = TensorOutbox(self.mailbox, self.ring, self.lane)
        self.lane.ring_mapped(self.ring.whole)
        self.sources.watch_rings(self.lane)

    @property
    def address(self) -> str:
        return self.mailbox.address

    def push(self, to: Node, data: bytes) -> None:
        owner = ctypes.create_string_buffer(data, len(data))
        activation = DeviceActivation("uint8", (len(data),), len(data), ctypes.addressof(owner), owner)
        self.outbox.push(
            to.address, activation, lambda ref: api.KvState(1, 1, 0, "r", self.address, 1, 1, ref)
        )

    def drain(self, count: int = 1) -> list[api.ToWorker]:
        """So many messages; acknowledgements are taken note of, as by the engine."""
        found: list[api.ToWorker] = []
        while len(found) < count:
            assert self.mailbox.wait(30)
            for sender, body, _ in self.mailbox.drain(count - len(found)):
                message = api.decode_to_worker(body)
                found.append(message)
                if isinstance(message, api.Ack):
                    self.outbox.acknowledge(message.slots)
                    self.lane.heard(sender, message.mapped)
        return found

    def take(self, sender: Node) -> tuple[api.TensorRef, bytes]:
        """The next tensor's bytes; acknowledged."""
        (message,) = self.drain()
        assert isinstance(message, api.KvState)
        found = input_of(message.ref, sender.address, self.lane, self.sources)
        target = ctypes.create_string_buffer(found.nbytes)
        if isinstance(found, Activation):
            target.raw = bytes(found.data)
        else:
            self.lane.enter(found, ctypes.addressof(target))
        self.lane.settle()
        self.outbox.taken(sender.address, message.ref.slot)
        self.outbox.pay()
        return message.ref, target.raw


class World:
    """Nodes, and the memory of their devices."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.memory = Memory()
        self.nodes: list[Node] = []

    def node(self, *, maps: bool = True, pins: bool = True, has_arena: bool = True) -> Node:
        driver = HostDriver(self.memory, maps, pins)
        self.nodes.append(Node(self.folder, f"n{len(self.nodes)}", driver, has_arena=has_arena))
        return self.nodes[-1]


@pytest.fixture
def world() -> Iterator[World]:
    with tempfile.TemporaryDirectory(prefix="ks", dir="/tmp") as name:
        found = World(Path(name))
        yield found
        for node in found.nodes:
            node.mailbox.close()


def passed(producer: Node, consumer: Node, data: bytes) -> api.TensorRef:
    """A tensor goes over, and its acknowledgement comes back."""
    producer.push(consumer, data)
    ref, found = consumer.take(producer)
    assert found == data
    assert [type(message) for message in producer.drain()] == [api.Ack]
    assert producer.outbox.slots == 0
    return ref


def test_the_first_tensor_offers_and_the_next_stay_on_the_device(world: World) -> None:
    a, b = world.node(), world.node()
    first = passed(a, b, b"first")
    assert first.slot > 0
    assert first.handle == b"arena 0"
    second = passed(a, b, b"second")
    assert second.slot < 0
    assert passed(a, b, b"").nbytes == 0
    assert passed(b, a, b"back").slot > 0, "each direction finds out for itself"
    assert not a.driver.pinned
    assert not b.driver.pinned, "rings are pinned where they are used"
    assert b.driver.mapped == [world.memory.arenas[b"arena 0"].address]


@pytest.mark.parametrize("why", ["cannot map", "was told not to"])
def test_a_consumer_that_maps_nothing_is_offered_nothing_more(world: World, why: str) -> None:
    a = world.node()
    b = world.node(maps=why != "cannot map", has_arena=why == "cannot map")
    assert passed(a, b, b"first").handle
    for data in (b"second", b"third"):
        ref = passed(a, b, data)
        assert ref.slot > 0
        assert not ref.handle
    assert not b.driver.mapped
    assert len(b.driver.pinned) == 2, "its own ring and the other's"
    assert a.driver.pinned.keys() == {ctypes.addressof(ctypes.c_char.from_buffer(a.ring.whole))}
    b.sources.forget(a.address)
    assert len(b.driver.pinned) == 1


def test_a_full_arena_falls_back_to_the_ring_and_a_full_ring_holds_back(world: World) -> None:
    a, b = world.node(), world.node()
    passed(a, b, b"first")
    whole = bytes(range(256)) * (ARENA_BYTES // 256)
    for _ in range(4):
        a.push(b, whole)
    assert a.outbox.is_blocked, "one in the arena, two in the ring, one waits"
    assert a.lane.slots == 1
    assert a.outbox.slots == 3
    for message in b.drain(3):
        assert isinstance(message, api.KvState)
        found = input_of(message.ref, a.address, b.lane, b.sources)
        assert bytes(b.outbox.bytes_of(found)) == whole
        b.outbox.taken(a.address, message.ref.slot)
    b.outbox.pay()
    a.drain()
    assert a.outbox.flush()
    assert b.take(a)[1] == whole


def test_a_tensor_larger_than_the_ring_travels_in_the_message(world: World) -> None:
    a, b = world.node(), world.node()
    a.push(b, bytes(RING_BYTES + 1))
    assert b.mailbox.wait(5)
    ((_, body, payload),) = b.mailbox.drain()
    message = api.decode_to_worker(body)
    assert isinstance(message, api.KvState)
    assert message.ref.pid == 0
    assert payload == bytes(RING_BYTES + 1)


def test_a_dead_consumer_gives_its_slots_back_and_a_dead_producer_is_unmapped(world: World) -> None:
    a, b = world.node(), world.node()
    passed(a, b, b"first")
    a.push(b, b"never taken")
    assert a.lane.slots == 1
    a.outbox.forget(b.address)
    assert a.outbox.slots == 0
    b.outbox.forget(a.address)
    b.sources.forget(a.address)
    assert not b.driver.mapped
    assert a.lane.offer(b.address), "whoever comes under that address is offered anew"


def test_memory_that_is_not_mapped_is_an_error_and_sends_the_producer_back_to_its_ring(world: World) -> None:
    a = world.node()
    b = world.node(maps=False)
    a.lane.heard(b.address, 1)  # as if another process had said so before, under b's address
    a.push(b, b"lost")
    (message,) = b.drain()
    assert isinstance(message, api.KvState)
    with pytest.raises(RingError, match="cannot be mapped here"):
        input_of(message.ref, a.address, b.lane, b.sources)
    b.outbox.taken(a.address, message.ref.slot)
    b.outbox.pay()
    a.drain()
    assert a.outbox.slots == 0
    assert passed(a, b, b"by the ring").slot > 0
    with pytest.raises(RingError, match="there is no device here"):
        input_of(message.ref, a.address, None, b.sources)


def test_where_nothing_can_be_pinned_it_is_tried_once(world: World) -> None:
    a, b = world.node(pins=False, has_arena=False), world.node(pins=False, has_arena=False)
    assert passed(a, b, b"pageable").slot > 0
    assert not a.driver.pinned
    assert not b.driver.pinned


def test_a_lost_device_is_told_with_the_tensor_that_waited_for_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = world.node()

    def lost() -> None:
        raise LaneError("cuda:0 is lost")

    monkeypatch.setattr(node.driver, "settle", lost)
    with pytest.raises(LaneError, match="cuda:0 is lost") as found:
        node.push(node, b"x" * 100)
    assert found.value.__notes__ == ["while a tensor of shape (100,) was computed, or sent on"]
