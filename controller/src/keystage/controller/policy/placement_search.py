"""Finds the cheapest place for one replica after the other.

Before it: the index of nodes at the start of the tick. After it: `placement` turns places into sites.
A stage looks at the first node of each class, and at those nodes that are special to it (they hold its
parameters, host its neighbours or its own replicas): the cheapest is among them, because being special
only makes a node cheaper. Where the first node of a class has no room though others of it may, all
nodes are looked at, once a tick per kind of need.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from keystage.controller.policy.placement_cost import Want, place_cost
from keystage.controller.policy.placement_index import NodeIndex


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """A node by index and GPUs of it."""

    node: int
    gpus: tuple[int, ...]


class Search:
    """One tick's search.

    Args:
        index: nodes; places found are taken in it.
        contended: the regime.
        spread: off: the first node with room.
    """

    def __init__(self, index: NodeIndex, contended: bool, spread: bool) -> None:
        self.index = index
        self.contended = contended
        self._spread = spread
        self._full: set[tuple[int, int, float]] = set()

    def add(self, want: Want, replicas: int) -> list[Place]:
        """Places for new replicas, fewer where the room ends; each is taken."""
        found: list[Place] = []
        while len(found) < replicas:
            place = self.best(want)
            if place is None:
                break
            self.take(want, place)
            found.append(place)
        return found

    def take(self, want: Want, place: Place) -> None:
        """Takes a place for this tick."""
        self.index.take(place.node, place.gpus, want.gpu_bytes, want.cores, want.key_units)

    def take_back(self, want: Want, place: Place) -> None:
        """Gives a place of this tick back."""
        self.index.release(place.node, place.gpus, want.gpu_bytes, want.cores, want.key_units)
        self._full.clear()

    def best(self, want: Want) -> Place | None:
        """The cheapest place, ties to the first node; None where there is no room."""
        need = (want.gpus, want.gpu_bytes, want.cores)
        if need in self._full:
            return None
        index = self.index
        everywhere = range(len(index.nodes))
        if not self._spread:
            place = next((p for p in (self._at(want, j) for j in everywhere) if p is not None), None)
        else:
            place, is_exact = self._cheapest(want, self._worth_a_look(want))
            if not is_exact:
                place, _ = self._cheapest(want, everywhere)
        if place is None:
            self._full.add(need)
        return place

    def _worth_a_look(self, want: Want) -> list[int]:
        index = self.index
        special = index.memory.nodes_with(want.function) | index.disk.nodes_with(want.function)
        special |= want.ready_on | want.near.keys()
        return sorted(special.union(index.candidates()))

    def _cheapest(self, want: Want, nodes: Iterable[int]) -> tuple[Place | None, bool]:
        """The cheapest of some nodes, and whether no class-mate of theirs can be cheaper."""
        index, contended = self.index, self.contended
        best: Place | None = None
        least, doubt = float("inf"), float("inf")
        for j in nodes:
            if want.gpus and (want.gpus > len(index.gpus[j]) or index.is_full(j)):
                continue
            cost = place_cost(want, index, j, contended)
            if cost >= least:
                continue
            place = self._at(want, j)
            if place is not None:
                best, least = place, cost
            elif index.mates_may_fit(j, want.gpus, want.gpu_bytes, want.cores):
                doubt = min(doubt, cost)
        return best, doubt > least or doubt == float("inf")

    def _at(self, want: Want, j: int) -> Place | None:
        gpus = self.index.places(j, want.gpus, want.gpu_bytes, want.cores)
        return None if gpus is None else Place(j, gpus)

    def bound(self, want: Want) -> str:
        """Which bound leaves a replica without a place, in words."""
        index = self.index
        if not want.gpus:
            return f"no node has {want.cores:g} cores free"
        if max(map(len, index.gpus)) < want.gpus:
            return f"it needs {want.gpus} GPUs of one node, the largest has {max(map(len, index.gpus))}"
        largest = max((gpu.total_bytes for gpus in index.gpus for gpu in gpus), default=0)
        if largest < want.gpu_bytes:
            return f"it needs {want.gpu_bytes} bytes of a GPU, the largest has {largest}"
        if index.free_gpus < want.gpus:
            return f"{index.total_gpus - index.free_gpus} of {index.total_gpus} GPUs are held"
        return (
            f"no node has {want.gpus} GPUs with {want.gpu_bytes} bytes and {want.cores:g} cores free "
            f"({index.free_gpus} of {index.total_gpus} GPUs are free)"
        )
