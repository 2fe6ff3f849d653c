"""The cluster: GPUs, cores and host memory of the nodes, and who holds what.

Before it: the world's node kinds. After it: `fleet` takes and returns places here. It chooses a place
only where nobody said one: the node with room that has most free GPUs (for a stage without GPUs most
free cores), ties to the first; on it the free GPUs of smallest index (shared: most free memory first).
A world without nodes is one node without bounds.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from keystage.controller.domain.decision import Site
from keystage.simulator.api import NodeSpec, StageSpec

ANYWHERE = "anywhere"
"""The node of a world without nodes."""


class Gpu:
    """One GPU: `holders` replicas have taken it, `is_owned` by one alone; `waiters` wait for their turn."""

    __slots__ = (
        "free_bytes",
        "holders",
        "is_busy",
        "is_owned",
        "taken_s",
        "total_bytes",
        "used_s",
        "waiters",
    )

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.free_bytes = total_bytes
        self.holders = 0
        self.is_owned = False
        self.is_busy = False
        self.taken_s = 0.0
        self.used_s = 0.0
        self.waiters: list[object] = []


class Node:
    """One node.

    Attributes:
        name: its name.
        index: its place in the cluster.
        spec: its kind.
        gpus: its GPUs.
        cores_free: cores nobody has been given.
        memory: bytes of parameters in host memory by function, least recently used first.
        memory_free_bytes: host memory left for parameters.
        is_away: whether it failed and has not come back.
        back_s: when it comes back, while it is away.
        version: grows with every change, for views.
    """

    __slots__ = (
        "back_s", "cores_free", "gpus", "index", "is_away", "memory", "memory_free_bytes", "name", "spec",
        "version",
    )  # fmt: skip

    def __init__(self, name: str, index: int, spec: NodeSpec) -> None:
        self.name = name
        self.index = index
        self.spec = spec
        self.gpus = [Gpu(spec.gpu_bytes) for _ in range(spec.gpus)]
        self.cores_free = spec.cores
        self.memory: OrderedDict[str, int] = OrderedDict()
        self.memory_free_bytes = spec.memory_bytes
        self.is_away = False
        self.back_s = 0.0
        self.version = 0

    def keep(self, function: str, size_bytes: int) -> None:
        """Keeps parameters in host memory; the least recently used others go until they fit."""
        self.version += 1
        if function in self.memory:
            self.memory.move_to_end(function)
            return
        if size_bytes > self.spec.memory_bytes:
            return
        while self.memory_free_bytes < size_bytes:
            _, freed_bytes = self.memory.popitem(last=False)
            self.memory_free_bytes += freed_bytes
        self.memory[function] = size_bytes
        self.memory_free_bytes -= size_bytes

    def lose_memory(self) -> None:
        """Forgets all parameters in host memory."""
        self.memory.clear()
        self.memory_free_bytes = self.spec.memory_bytes
        self.version += 1


def gpu_share_bytes(stage: StageSpec) -> int:
    """Bytes of a stage's parameters on each of its GPUs."""
    return -(-stage.parameter_bytes // stage.gpus) if stage.gpus else 0


class Cluster:
    """All nodes.

    Args:
        kinds: node kinds of the world; empty for a world without nodes.
    """

    def __init__(self, kinds: Iterable[NodeSpec]) -> None:
        specs = [kind for kind in kinds for _ in range(kind.count)]
        self.has_nodes = bool(specs)
        if not specs:
            free = NodeSpec(cores=math.inf, memory_bytes=1 << 62)
            self.nodes = [Node(ANYWHERE, 0, free)]
        else:
            self.nodes = [Node(f"node-{i}", i, spec) for i, spec in enumerate(specs)]
        self.by_name = {node.name: node for node in self.nodes}

    def most_cores(self, stage: StageSpec) -> float:
        """Cores of the largest node that has the GPUs a replica needs."""
        return max(n.spec.cores for n in self.nodes if not self.has_nodes or n.spec.gpus >= stage.gpus)

    def find(self, stage: StageSpec, cores: float) -> tuple[Node, tuple[int, ...]] | None:
        """A place for one replica, None where there is no room."""
        best: tuple[float, Node, tuple[int, ...]] | None = None
        for node in self.nodes:
            gpus = self._gpus(node, stage, cores)
            if gpus is None:
                continue
            room = float(sum(g.holders == 0 for g in node.gpus)) if stage.gpus else node.cores_free
            if best is None or room > best[0]:
                best = (room, node, gpus)
        return best and best[1:]

    def at(self, site: Site, stage: StageSpec, cores: float) -> tuple[Node, tuple[int, ...]] | None:
        """The place a decision names, None where it has no room; no GPUs named: free ones of that node."""
        node = self.by_name.get(site.node)
        if node is None:
            return None
        if not site.gpus or not self.has_nodes:
            gpus = self._gpus(node, stage, cores)
            return None if gpus is None else (node, gpus)
        if node.is_away or node.cores_free < cores or not len(site.gpus) == len(set(site.gpus)) == stage.gpus:
            return None
        if all(0 <= i < len(node.gpus) and _has_room(node.gpus[i], stage) for i in site.gpus):
            return node, site.gpus
        return None

    def take(self, node: Node, gpus: Sequence[int], stage: StageSpec, cores: float, at_s: float) -> None:
        """Gives a place to a replica."""
        node.cores_free -= cores
        node.version += 1
        for i in gpus:
            gpu = node.gpus[i]
            if gpu.holders == 0:
                gpu.taken_s = at_s
            gpu.holders += 1
            gpu.is_owned = not stage.shared
            gpu.free_bytes -= gpu_share_bytes(stage) if stage.shared else gpu.total_bytes

    def give_back(self, node: Node, gpus: Sequence[int], stage: StageSpec, cores: float, at_s: float) -> None:
        """Takes a place back."""
        node.cores_free += cores
        node.version += 1
        for i in gpus:
            gpu = node.gpus[i]
            gpu.holders -= 1
            gpu.is_owned = False
            gpu.free_bytes += gpu_share_bytes(stage) if stage.shared else gpu.total_bytes
            if gpu.holders == 0:
                gpu.used_s += at_s - gpu.taken_s

    def gpu_s(self, at_s: float) -> float:
        """GPU-seconds taken until now; a GPU that several replicas share counts once."""
        gpus = [gpu for node in self.nodes for gpu in node.gpus]
        return math.fsum(g.used_s + (at_s - g.taken_s if g.holders else 0.0) for g in gpus)

    def _gpus(self, node: Node, stage: StageSpec, cores: float) -> tuple[int, ...] | None:
        """GPUs of a node for one replica, None where it has no room."""
        if node.is_away or node.cores_free < cores:
            return None
        if not stage.gpus or not self.has_nodes:
            return ()
        free = [i for i, gpu in enumerate(node.gpus) if _has_room(gpu, stage)]
        if len(free) < stage.gpus:
            return None
        if stage.shared:
            free.sort(key=lambda i: (-node.gpus[i].free_bytes, i))
        return tuple(free[: stage.gpus])


def _has_room(gpu: Gpu, stage: StageSpec) -> bool:
    if gpu.is_owned or gpu.total_bytes < gpu_share_bytes(stage):
        return False
    return gpu.free_bytes >= gpu_share_bytes(stage) if stage.shared else gpu.holders == 0
