"""From SPUs of modules to devices (NeuStream, section 4.2, module placement). Pure.

Called by `streams.allocate` for each allotment it tries. Modules (or pairs that are to share their devices,
`streams.colocate`) come in descending order of allotment; each goes to the device with the least room that
takes it, or, when none does, evenly over the fewest devices of one type, as data-parallel copies of
model-parallel parts, whichever combination allows the largest batch within the partial SLO.

A device of B bytes has K SPUs of B / K bytes. A module may hold what its SPUs hold, so devices never hold
more than they have. Types of devices differ in K, bytes and profiles.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

from keystage.batching.profile import LatencyProfile
from keystage.streams.interpolate import on_spus, slowed

_GIB = 2**30


class PlacementError(Exception):
    """Modules that do not fit; names the module, what it needs and what room there is.

    Attributes:
        modules: indices: of one module, or of a pair that was to lie together.
    """

    def __init__(self, modules: tuple[int, ...], message: str) -> None:
        super().__init__(message)
        self.modules = modules


@dataclasses.dataclass(frozen=True, slots=True)
class Device:
    """One device.

    Attributes:
        name: for messages.
        kind: its type; profiles are by type.
        spus: K, how many equal parts it is divided into.
        bytes: memory.
    """

    name: str
    kind: str
    spus: int
    bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Module:
    """What a module needs.

    Attributes:
        name: for messages.
        slo_s: partial SLO of one execution.
        executions: k, mean executions in a request's path.
        bytes: parameters, state and work space of one copy.
        profiles: L(b) by (device type, number of devices one copy is spread over); a number that is missing
            is one that the module cannot be spread over.
    """

    name: str
    slo_s: float
    executions: float
    bytes: int
    profiles: Mapping[tuple[str, int], LatencyProfile]


@dataclasses.dataclass(frozen=True, slots=True)
class Edge:
    """A stream between two modules that costs time where they lie on different devices.

    Attributes:
        producer: index of the module that writes.
        consumer: index of the module that reads, and waits for what it reads.
        item_s: seconds to move one item.
        crossings: mean messages of a request over it.
    """

    producer: int
    consumer: int
    item_s: float
    crossings: float = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Placed:
    """Where a module lies and what it does there.

    Attributes:
        pieces: (device index, SPUs), ascending.
        copies: data parallelism.
        parts: model parallelism: devices of each copy; copies * parts is the number of pieces.
        limit: largest batch within the partial SLO, all copies together.
        goodput_rps: limit / (slo_s * executions), equation 1.
    """

    pieces: tuple[tuple[int, int], ...]
    copies: int
    parts: int
    limit: int
    goodput_rps: float

    @property
    def devices(self) -> frozenset[int]:
        """Indices of its devices."""
        return frozenset(device for device, _ in self.pieces)


_Pieces = tuple[tuple[int, int], ...]


def place(
    modules: Sequence[Module],
    allotment: Sequence[int],
    devices: Sequence[Device],
    edges: Sequence[Edge] = (),
    together: Sequence[tuple[int, int]] = (),
) -> tuple[Placed, ...]:
    """Maps an allotment to devices.

    Args:
        modules: what is placed.
        allotment: SPUs of each.
        devices: what there is, all free.
        edges: streams whose cost depends on where modules lie.
        together: pairs of modules that share their devices; a module is in one pair at most.

    Returns:
        One entry a module.

    Raises:
        PlacementError: a module, or a pair, fits nowhere.
    """
    free = [device.spus for device in devices]
    pieces: list[_Pieces] = [() for _ in modules]
    paired = {module for pair in together for module in pair}
    groups = [*together, *((module,) for module in range(len(modules)) if module not in paired)]
    for group in sorted(groups, key=lambda g: (-sum(allotment[m] for m in g), g)):
        found = _fit(group, modules, allotment, devices, free)
        if found is None:
            raise PlacementError(group, _refusal(group, modules, allotment, devices, free))
        for module, mine in zip(group, found, strict=True):
            pieces[module] = mine
            for device, spus in mine:
                free[device] -= spus
    on = [frozenset(device for device, _ in mine) for mine in pieces]
    item_s = [0.0] * len(modules)
    for edge in edges:
        if on[edge.producer] != on[edge.consumer]:
            share = edge.crossings / modules[edge.consumer].executions
            item_s[edge.consumer] += edge.item_s * share
    return tuple(
        _best(module, mine, devices, more_s)
        for module, mine, more_s in zip(modules, pieces, item_s, strict=True)
    )


def _fit(
    group: tuple[int, ...],
    modules: Sequence[Module],
    allotment: Sequence[int],
    devices: Sequence[Device],
    free: Sequence[int],
) -> list[_Pieces] | None:
    """Pieces of each module of the group, on one device if one takes it, else on the fewest."""
    kinds = sorted({device.kind for device in devices})
    for count in range(1, len(devices) + 1):
        options = []
        for kind in kinds:
            found = _on_kind(group, modules, allotment, devices, free, kind, count)
            if found is not None:
                room = sum(free[device] for device, _ in found[0])
                limits = [
                    _best(modules[m], mine, devices, 0.0).limit for m, mine in zip(group, found, strict=True)
                ]
                options.append((room, [-limit for limit in limits], kind, found))
        if options:
            return min(options)[3]
    return None


def _on_kind(
    group: tuple[int, ...],
    modules: Sequence[Module],
    allotment: Sequence[int],
    devices: Sequence[Device],
    free: Sequence[int],
    kind: str,
    count: int,
) -> list[_Pieces] | None:
    """The group evenly on so many devices of a type, those with the least room that take it."""
    shares = [_even(allotment[m], count) for m in group]
    needs = [sum(column) for column in zip(*shares, strict=True)]
    chosen: list[int] = []
    for need in reversed(needs):  # ascending
        fitting = [
            (room, index)
            for index, room in enumerate(free)
            if devices[index].kind == kind and room >= need and index not in chosen
        ]
        if not fitting:
            return None
        chosen.append(min(fitting)[1])
    chosen.reverse()
    pieces = [tuple(sorted(zip(chosen, share, strict=True))) for share in shares]
    for module, mine in zip(group, pieces, strict=True):
        if not any(True for _ in _ways(modules[module], mine, devices)):
            return None
    return pieces


def _even(spus: int, count: int) -> list[int]:
    """So many SPUs in so many parts, the larger ones first; a part may be 0, which no module takes."""
    return [spus // count + (1 if place < spus % count else 0) for place in range(count)]


def _ways(module: Module, pieces: _Pieces, devices: Sequence[Device]) -> Iterator[tuple[int, int]]:
    """(copies, parts) in which the module can be on these pieces: measured so, and its memory fits."""
    count = len(pieces)
    kind = devices[pieces[0][0]].kind
    for parts in range(1, count + 1):
        if count % parts or (kind, parts) not in module.profiles:
            continue
        if all(
            spus > 0 and spus * devices[device].bytes * parts >= module.bytes * devices[device].spus
            for device, spus in pieces
        ):
            yield count // parts, parts


def _best(module: Module, pieces: _Pieces, devices: Sequence[Device], item_s: float) -> Placed:
    """The combination of copies and parts with the largest batch; more copies where that is equal."""
    first = devices[pieces[0][0]]
    best: Placed | None = None
    for copies, parts in _ways(module, pieces, devices):
        profile = module.profiles[first.kind, parts]
        limit = 0
        for copy in range(copies):
            mine = pieces[copy * parts : (copy + 1) * parts]
            # The slowest part binds the others.
            spus = parts * min(spus for _, spus in mine)
            shared = slowed(on_spus(profile, spus, parts, first.spus), 1.0, item_s)
            limit += shared.largest_batch(module.slo_s)
        if best is None or limit > best.limit:
            goodput_rps = limit / (module.slo_s * module.executions)
            best = Placed(pieces, copies, parts, limit, goodput_rps)
    assert best is not None
    return best


def _refusal(
    group: tuple[int, ...],
    modules: Sequence[Module],
    allotment: Sequence[int],
    devices: Sequence[Device],
    free: Sequence[int],
) -> str:
    needs = " with ".join(
        f"module {modules[m].name!r} needs {allotment[m]} SPUs holding {modules[m].bytes / _GIB:.3g} GiB"
        for m in group
    )
    rooms = ", ".join(
        f"{room} of {device.spus} SPUs of {device.bytes / device.spus / _GIB:.3g} GiB on {device.name}"
        for device, room in zip(devices, free, strict=True)
    )
    measured = sorted({key for m in group for key in modules[m].profiles})
    return f"{needs}; free are {rooms or 'no devices'}; measured on {measured}"


def least_spus(module: Module, devices: Sequence[Device]) -> list[int]:
    """Numbers of SPUs with which the module's memory fits, the least of each type and spread; ascending.

    With fewer than the first it fits nowhere.
    """
    found = set()
    for kind, parts in module.profiles:
        fitting = [device for device in devices if device.kind == kind]
        if len(fitting) >= parts:
            a_part = max(1, math.ceil(module.bytes * fitting[0].spus / (parts * fitting[0].bytes)))
            if a_part <= fitting[0].spus:
                found.add(a_part * parts)
    return sorted(found)
