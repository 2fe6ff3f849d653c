"""The nodes of a cluster with what is free on them, kept from tick to tick.

Before it: `Snapshot.nodes`. After it: `policy.placement` takes places here while it decides, and gives all
of them back at the end of the tick. Reading ten thousand nodes anew takes a tenth of a second, so only
nodes whose view is another object are read again. The index is a memo: what it answers depends on the
snapshot alone, never on what it saw before.

Nodes that cost every stage the same form a *class* (same GPUs, same free ones, same key-stage load, ...);
of a class the node of smallest index stands for all. So a stage looks at a few dozen nodes, not at all.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Iterable, Sequence

from keystage.controller.domain.snapshot import NodeView
from keystage.controller.policy.placement_holdings import Holdings

Class = tuple[object, ...]

MOST_CORES = 1e6
"""No node has more, whatever its view says."""

MEMORY_LEVEL = 16
"""Free memory of a GPU is told apart in 16ths of it, among nodes of one class."""


class Gpu:
    """One GPU as it would be with what was placed this tick."""

    __slots__ = ("free_bytes", "replicas", "total_bytes")

    def __init__(self, total_bytes: int, free_bytes: int, replicas: int) -> None:
        self.total_bytes = total_bytes
        self.free_bytes = free_bytes
        self.replicas = replicas

    def has_room(self, need_bytes: int) -> bool:
        """Whether one more replica fits: alone where it needs (or may need) all of it, else beside others."""
        if need_bytes <= 0 or need_bytes >= self.total_bytes:
            return self.replicas == 0 and self.total_bytes >= need_bytes
        return self.free_bytes >= need_bytes


class NodeIndex:
    """What is free where.

    Args:
        nodes: the nodes, names unique.

    Attributes:
        nodes: the same.
        number: index of a node by its name.
        gpus: GPUs per node.
        width: how many these are.
        widths: nodes by that number.
        free: GPUs nobody holds, per node.
        cores: CPU cores nobody has been given, per node.
        key_gpus: GPUs held by key stages, per node.
        key_cpu: replicas of key stages without GPUs, per node.
        reserved: GPUs key stages may want next, per node (may exceed the free ones).
        memory: who holds what in host memory.
        disk: who has what on disk.
        total_gpus: GPUs of all nodes.
        free_gpus: those nobody holds.
    """

    def __init__(self, nodes: Sequence[NodeView]) -> None:
        self.nodes = list(nodes)
        self.number = {node.node: j for j, node in enumerate(nodes)}
        count = len(self.nodes)
        self.gpus: list[list[Gpu]] = [[] for _ in range(count)]
        self.width = [0] * count
        self.widths = Counter({0: count})
        self.free = [0] * count
        self.cores = [0.0] * count
        self.key_gpus = [0] * count
        self.key_cpu = [0] * count
        self.reserved = [0] * count
        self.memory = Holdings([node.in_memory for node in nodes])
        self.disk = Holdings([node.on_disk for node in nodes])
        self.total_gpus = 0
        self.free_gpus = 0
        self._class: list[Class] = [()] * count
        self._members: dict[Class, list[int]] = {}
        self._taken: set[int] = set()
        self._lent: list[tuple[int, bool, int]] = []
        for j, node in enumerate(self.nodes):
            self._read(j, node)
        for j in range(count):
            self._class[j] = self._class_of(j)
            self._members.setdefault(self._class[j], []).append(j)

    def update(self, nodes: Sequence[NodeView]) -> bool:
        """Reads the nodes that changed; False if they are other nodes, then a new index is needed."""
        if len(nodes) != len(self.nodes):
            return False
        changed: set[int] = set()
        for j, (old, new) in enumerate(zip(self.nodes, nodes, strict=True)):
            if old is new:
                continue
            if old.node != new.node:
                return False
            self.nodes[j] = new
            self._read(j, new)
            changed |= self.memory.put(j, new.in_memory)
            changed |= self.disk.put(j, new.on_disk)
            changed.add(j)
        self.classify(changed)
        return True

    def give_back(self) -> None:
        """Undoes every `take` and `release` since the last time."""
        for j in self._taken:
            self._read(j, self.nodes[j])
        for j, on_gpu, units in self._lent:
            self.load(j, on_gpu, -units)
        self.classify(self._taken)
        self._taken, self._lent = set(), []

    def _read(self, j: int, node: NodeView) -> None:
        before, width = self.width[j], len(node.gpus)
        if width != before:
            self.width[j] = width
            self.widths[before] -= 1
            self.widths[width] += 1
            self.total_gpus += width - before
        self.free_gpus -= self.free[j]
        self.gpus[j] = [Gpu(g.total_bytes, g.free_bytes, g.replicas) for g in node.gpus]
        self.free[j] = sum(g.replicas == 0 for g in node.gpus)
        self.free_gpus += self.free[j]
        self.cores[j] = max(0.0, min(MOST_CORES, node.cores_free)) if math.isfinite(node.cores_free) else 0.0

    # ------------------------------------------------------------------ places

    def places(self, j: int, gpus: int, gpu_bytes: int, cores: float) -> tuple[int, ...] | None:
        """GPUs of a node for one replica, None where it has no room.

        Among GPUs the fewest replicas come first (the least marginal divergence among equals), then
        the most free memory, then the smallest index.
        """
        if self.cores[j] < cores:
            return None
        if not gpus:
            return ()
        mine = self.gpus[j]
        found = [i for i, gpu in enumerate(mine) if gpu.has_room(gpu_bytes)]
        if len(found) < gpus:
            return None
        found.sort(key=lambda i: (mine[i].replicas, -mine[i].free_bytes, i))
        return tuple(sorted(found[:gpus]))

    def take(self, j: int, gpus: Iterable[int], gpu_bytes: int, cores: float, key_units: int) -> None:
        """Gives a place to a replica for this tick.

        Args:
            j: node.
            gpus: its GPUs.
            gpu_bytes: memory taken on each.
            cores: CPU cores taken.
            key_units: GPUs (without GPUs: 1) that count as key-stage load, 0 for other stages.
        """
        self._change(j, list(gpus), gpu_bytes, cores, key_units, 1)

    def release(self, j: int, gpus: Iterable[int], gpu_bytes: int, cores: float, key_units: int) -> None:
        """Takes back what `take` gave with the same arguments."""
        self._change(j, list(gpus), gpu_bytes, cores, key_units, -1)

    def _change(
        self, j: int, gpus: list[int], gpu_bytes: int, cores: float, key_units: int, sign: int
    ) -> None:
        for i in gpus:
            gpu = self.gpus[j][i]
            was_free = gpu.replicas == 0
            gpu.replicas += sign
            gpu.free_bytes -= sign * (gpu_bytes if gpu_bytes > 0 else gpu.total_bytes)
            freed = int(gpu.replicas == 0) - int(was_free)
            self.free[j] += freed
            self.free_gpus += freed
        self.cores[j] -= sign * cores
        self.load(j, bool(gpus), sign * key_units)
        self._lent.append((j, bool(gpus), sign * key_units))
        self._taken.add(j)
        self.classify((j,))

    def load(self, j: int, on_gpu: bool, units: int) -> None:
        """Adds key-stage load to a node; `classify` is the caller's."""
        if on_gpu:
            self.key_gpus[j] += units
        else:
            self.key_cpu[j] += units

    def mates_may_fit(self, j: int, gpus: int, gpu_bytes: int, cores: float) -> bool:
        """Whether a node of the same class might have room where this one has none."""
        mine = self.gpus[j]
        if 2.0 ** self.cores_level(j) <= cores or len(mine) < gpus:
            return False
        if self.free[j] >= gpus or not gpus:
            return True
        largest = max(gpu.total_bytes for gpu in mine)
        return 0 < gpu_bytes < largest and MEMORY_LEVEL * gpu_bytes < (self._roomiest(j) + 1) * largest

    # ------------------------------------------------------------------ classes

    def candidates(self) -> list[int]:
        """The first node of every class, ascending."""
        return sorted(members[0] for members in self._members.values())

    def classify(self, changed: Iterable[int]) -> None:
        """Puts nodes that changed into their classes."""
        for j in changed:
            new, old = self._class_of(j), self._class[j]
            if new == old:
                continue
            members = self._members[old]
            del members[bisect.bisect_left(members, j)]
            if not members:
                del self._members[old]
            bisect.insort(self._members.setdefault(new, []), j)
            self._class[j] = new

    def _class_of(self, j: int) -> Class:
        return (
            len(self.gpus[j]),
            self.free[j],
            self._roomiest(j),
            self.key_gpus[j],
            self.key_cpu[j],
            min(self.reserved[j], self.free[j]),
            self.cores_level(j),
            self.memory_level(j),
            self.memory.common(j),
            self.disk.common(j),
        )

    def _roomiest(self, j: int) -> int:
        """Free memory of the node's roomiest GPU in 16ths of it, rounded down; -1 where none has any."""
        most = -1
        for gpu in self.gpus[j]:
            if gpu.free_bytes > 0 and gpu.total_bytes > 0:
                most = max(most, MEMORY_LEVEL * gpu.free_bytes // gpu.total_bytes)
        return most

    def is_full(self, j: int) -> bool:
        """Whether no GPU of a node, or of any in its class, has room for anybody."""
        return self.free[j] == 0 and self._class[j][2] == -1

    def cores_level(self, j: int) -> int:
        """Free cores as a power of two, from 0 (less than one) on."""
        return max(0, math.frexp(self.cores[j])[1]) if self.cores[j] > 0 else 0

    def memory_level(self, j: int) -> int:
        """Free host memory as a power of two in bytes: n for 2^(n-1) up to 2^n."""
        return max(0, self.nodes[j].memory_free_bytes).bit_length()
