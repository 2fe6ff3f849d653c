"""What nodes of a cluster can hold of each stage: caps, nodes as the policy sees them, places checked. Pure.

Before it: rooms (`kubernetes.room`) and the stages' needs. After it: `kubernetes_view` puts them into the
snapshot, and sites are looked at once more before they are stated. Nodes are told even where there is only
one: a site also says which GPU, and that is part of what a pod asks for. A node that takes
nothing new (cordoned, tainted, not ready) is not told.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from keystage.controller.domain.decision import Site
from keystage.controller.domain.snapshot import GpuView, NodeView
from keystage.controller.platforms.local_nodes import free_bytes, in_memory
from keystage.keysmanager.api import NodeStatus
from keystage.kubernetes.api import gpu_resource
from keystage.kubernetes.room import GPU_TOLERATION, VENDOR_GPU, Room

GIB = 1 << 30


@dataclasses.dataclass(frozen=True, slots=True)
class Need:
    """What one replica of a stage takes of its node.

    Attributes:
        resources: by resource name, GPUs left out.
        gpu_gib: GiB of one GPU, 0: none.
        cores: as the policy counts them.
        selector: labels that its nodes must have.
    """

    resources: Mapping[str, float]
    gpu_gib: int = 0
    cores: float = 1.0
    selector: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def key(self) -> tuple[object, ...]:
        """Equal needs have equal keys."""
        return (self.gpu_gib, *sorted(self.resources.items()), *sorted(self.selector.items()))

    @property
    def tolerations(self) -> tuple[Mapping[str, str], ...]:
        """Of its pods."""
        return (GPU_TOLERATION,) if self.gpu_gib else ()


@dataclasses.dataclass(frozen=True, slots=True)
class Ground:
    """The nodes at one moment.

    Attributes:
        rooms: by name.
        beside_vendor: whether GPUs of nodes where the vendor's plugin hands them out too are ours as well.
        known: what was counted before.
    """

    rooms: Mapping[str, Room]
    beside_vendor: bool = False
    known: dict[tuple[object, ...], Mapping[str, int]] = dataclasses.field(
        default_factory=dict, compare=False
    )

    def gpus(self, room: Room) -> tuple[int, ...]:
        """GPUs of a node that replicas may be given."""
        if room.total.get(VENDOR_GPU, 0.0) > 0 and not self.beside_vendor:
            return ()
        return room.gpus

    def fits(self, need: Need) -> Mapping[str, int]:
        """How many more replicas each node holds."""
        key = need.key
        found = self.known.get(key)
        if found is None:
            found = self.known[key] = {name: self._fits(need, room) for name, room in self.rooms.items()}
        return found

    def _fits(self, need: Need, room: Room) -> int:
        if any(room.labels.get(key) != value for key, value in need.selector.items()):
            return 0
        if room.kept_out(need.tolerations):
            return 0
        beside = room.holds(need.resources)
        if not need.gpu_gib or not beside:
            return beside
        return min(beside, sum(int(room.free(gpu_resource(i)) // need.gpu_gib) for i in self.gpus(room)))

    def cap(self, need: Need, placed: int) -> tuple[int | None, str]:
        """Bound of a stage's replicas, and why.

        Args:
            need: of one replica.
            placed: replicas that have a node.

        Returns:
            No bound where no nodes are known.
        """
        if not self.rooms:
            return None, ""
        more = sum(self.fits(need).values())
        memory = need.resources.get("memory", 0.0) / GIB
        parts = [f"{need.resources.get('cpu', 0.0):g} cores", f"{memory:.3g} GiB of memory"]
        if need.gpu_gib:
            parts.append(f"{need.gpu_gib} GiB of a GPU")
        reason = f"the nodes have room for {more} more of {', '.join(parts)}{self._closed(need)}"
        return placed + more, reason

    def _closed(self, need: Need) -> str:
        """Nodes that are left out, for people."""
        words = [
            f"{room.node}: {why}" for room in self.rooms.values() if (why := room.kept_out(need.tolerations))
        ]
        if need.gpu_gib and not self.beside_vendor:
            words += [
                f"{room.node}: its GPUs are also handed out as {VENDOR_GPU}"
                for room in self.rooms.values()
                if room.gpus and room.total.get(VENDOR_GPU, 0.0) > 0
            ]
        return f" ({'; '.join(words[:4])})" if words else ""

    def fitting(self, need: Need, sites: Sequence[Site]) -> tuple[Site, ...]:
        """Those sites that have room now, in order; the others are for the scheduler to choose."""
        fits = self.fits(need)
        taken: Counter[str] = Counter()
        on_gpu: Counter[tuple[str, int]] = Counter()
        kept = []
        for site in sites:
            room = self.rooms.get(site.node)
            if room is None or taken[site.node] >= fits[site.node]:
                continue
            if need.gpu_gib and not self._gpu_fits(need, room, site, on_gpu):
                continue
            taken[site.node] += 1
            on_gpu.update((site.node, index) for index in site.gpus)
            kept.append(site)
        return tuple(kept)

    def _gpu_fits(self, need: Need, room: Room, site: Site, on_gpu: Counter[tuple[str, int]]) -> bool:
        return bool(site.gpus) and all(
            room.free(gpu_resource(i)) >= need.gpu_gib * (1 + on_gpu[site.node, i]) for i in site.gpus
        )


def node_views(
    ground: Ground,
    needs: Mapping[str, Need],
    held: Mapping[tuple[str, int], int],
    statuses: Mapping[str, NodeStatus],
    stages: Mapping[tuple[str, int], str],
) -> tuple[NodeView, ...]:
    """The nodes that can be chosen, by name.

    Args:
        ground: the nodes.
        needs: of the stages, by function.
        held: replicas that hold a GPU, by node and index.
        statuses: what KeysManagers tell, by node.
        stages: stage functions by pipeline and stage.
    """
    on_cpu = {need.key: need for full in needs.values() for need in [dataclasses.replace(full, gpu_gib=0)]}
    return tuple(
        NodeView(
            node=name,
            gpus=tuple(
                GpuView(
                    total_bytes=int(room.total.get(gpu_resource(i), 0.0)) * GIB,
                    free_bytes=int(room.free(gpu_resource(i))) * GIB,
                    replicas=held.get((name, i), 0),
                )
                for i in range(max(ground.gpus(room), default=-1) + 1)
            ),
            cores_free=_cores_free(ground, room, on_cpu.values()),
            memory_free_bytes=free_bytes(statuses.get(name)),
            in_memory=in_memory(statuses.get(name), stages),
        )
        for name, room in sorted(ground.rooms.items())
        if any(not room.kept_out(need.tolerations) for need in needs.values()) or not room.kept_out()
    )


def _cores_free(ground: Ground, room: Room, needs: Collection[Need]) -> float:
    """Free cores as the policy counts them: it gives each replica its cores and knows no other request.

    So memory, pods and requests that differ from the cores are counted in: of the stages that fit at all, the
    one for which the node holds least decides. Where none fits there is none free.
    """
    if not needs:
        return room.free("cpu")
    counts = ((ground.fits(need)[room.node], need.cores) for need in needs)
    return min((count * cores for count, cores in counts if count), default=0.0)
