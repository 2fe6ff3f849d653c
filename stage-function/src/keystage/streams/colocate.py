"""Which modules should share their devices (NeuStream, section 4.2, colocating modules). Pure.

Around `streams.allocate`: a pair joined by a stream is tried on the same devices; that is kept only if the
lesser goodput of the two rises (the paper's rule) and the program's least does not fall (ours: a pair must
not gain at the expense of the program). What a pair saves is the time of its streams between devices
(`placement.Edge`); what it may lose is room elsewhere. Costly streams are tried first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from keystage.streams.allocate import Allocation, allocate
from keystage.streams.placement import Device, Edge, Module, PlacementError


@dataclasses.dataclass(frozen=True, slots=True)
class Colocation:
    """What the search found.

    Attributes:
        pairs: modules that share their devices.
        allocation: with these pairs.
        apart: without any.
        tried: pairs that were tried.
    """

    pairs: tuple[tuple[int, int], ...]
    allocation: Allocation
    apart: Allocation
    tried: int


def colocate(
    modules: Sequence[Module], devices: Sequence[Device], edges: Sequence[Edge], *, step: int = 1
) -> Colocation:
    """Searches pairs of modules to be placed together; a module is in one pair at most.

    Args:
        modules: as for `allocate`.
        devices: as for `allocate`.
        edges: streams between modules; their pairs are tried.
        step: Delta.

    Raises:
        PlacementError: the modules do not fit even apart.
    """
    best = apart = allocate(modules, devices, step=step, edges=edges)
    costs: dict[tuple[int, int], float] = {}
    for edge in edges:
        if edge.producer != edge.consumer:
            pair = (min(edge.producer, edge.consumer), max(edge.producer, edge.consumer))
            costs[pair] = costs.get(pair, 0.0) + edge.item_s * edge.crossings
    pairs: list[tuple[int, int]] = []
    for pair in sorted(costs, key=lambda p: (-costs[p], p)):
        if any(module in other for other in pairs for module in pair):
            continue
        try:
            trial = allocate(modules, devices, step=step, edges=edges, together=[*pairs, pair])
        except PlacementError:
            continue
        if _lesser(trial, pair) > _lesser(best, pair) and trial.goodput_rps >= best.goodput_rps:
            pairs.append(pair)
            best = trial
    return Colocation(tuple(pairs), best, apart, len(costs))


def _lesser(allocation: Allocation, pair: tuple[int, int]) -> float:
    return min(allocation.placed[module].goodput_rps for module in pair)
