"""Which GPUs a node advertises: real ones as NVML shows them, or emulated ones. No gRPC here.

Read by `device_plugin` again and again; `Inventory` turns what is seen into resources that stay: a GPU
keeps its number while the process lives, whatever NVML calls it after another one fell off the bus, and
one that is no longer shown stays, unhealthy, since pods may hold it. Only whole GPUs are advertised: one in
MIG mode is left out, its parts belong to the vendor's plugin.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from keystage.keysmanager import inventory

GIB = 1 << 30
MOST_EMULATED = 64
EMULATED = "emulated-"
"""Begins the UUID of a GPU that is not there."""


@dataclasses.dataclass(frozen=True, slots=True)
class NodeGpu:
    """One GPU of the node.

    Attributes:
        index: number in its resource's name.
        uuid: what it is, whatever its number.
        minor: its device node is `/dev/nvidia<minor>`; None: it has none.
        gib: whole GiB of its memory.
        numa: its NUMA node, None: unknown.
        is_healthy: whether it is shown now.
    """

    index: int
    uuid: str
    minor: int | None
    gib: int
    numa: int | None = None
    is_healthy: bool = True


def parse_emulated(text: str) -> tuple[NodeGpu, ...]:
    """GPUs of `COUNTxGIB[,COUNTxGIB...]`.

    Raises:
        ValueError: it is not of that form, or there would be too many.
    """
    found: list[NodeGpu] = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        count, _, gib = part.partition("x")
        if not (count.isdecimal() and gib.isdecimal() and int(count) > 0 and int(gib) > 0):
            raise ValueError(f"emulated GPUs {part!r}: expected COUNTxGIB, for example 2x80")
        if len(found) + int(count) > MOST_EMULATED:
            raise ValueError(f"emulated GPUs {text!r}: at most {MOST_EMULATED} in all")
        for _ in range(int(count)):
            found.append(NodeGpu(len(found), f"{EMULATED}{len(found)}", None, int(gib)))
    return tuple(found)


def read(nvml: Any = None) -> tuple[tuple[NodeGpu, ...], str]:
    """What NVML shows now, and why something is missing (empty: nothing is); see `inventory.each`."""
    return inventory.each(_read, nvml)


def _read(nvml: Any, index: int) -> NodeGpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    if _is_divided(nvml, handle):
        raise inventory.LeftOut("is in MIG mode")
    return NodeGpu(
        index=index,
        uuid=inventory.as_text(nvml.nvmlDeviceGetUUID(handle)),
        minor=int(nvml.nvmlDeviceGetMinorNumber(handle)),
        gib=int(nvml.nvmlDeviceGetMemoryInfo(handle).total) // GIB,
        numa=_numa(nvml, handle),
    )


def _is_divided(nvml: Any, handle: Any) -> bool:
    try:
        current, _ = nvml.nvmlDeviceGetMigMode(handle)
    except nvml.NVMLError:  # most types cannot be divided, and say so by an error
        return False
    return bool(current)


def _numa(nvml: Any, handle: Any) -> int | None:
    try:
        node = int(nvml.nvmlDeviceGetNumaNodeId(handle))
    except (nvml.NVMLError, AttributeError):  # older drivers and packages do not tell
        return None
    return node if node >= 0 else None


class Inventory:
    """GPUs ever seen, by number, with their health as it is now."""

    def __init__(self) -> None:
        self._by_uuid: dict[str, NodeGpu] = {}

    def see(self, shown: tuple[NodeGpu, ...]) -> tuple[NodeGpu, ...]:
        """Takes what is shown now; returns all GPUs in order of their numbers.

        A new one gets the number that NVML gives it, or the lowest free one where that is taken.
        """
        for uuid in self._by_uuid.keys() - {gpu.uuid for gpu in shown}:
            self._by_uuid[uuid] = dataclasses.replace(self._by_uuid[uuid], is_healthy=False)
        for gpu in shown:
            known = self._by_uuid.get(gpu.uuid)
            index = known.index if known is not None else self._number(gpu.index)
            self._by_uuid[gpu.uuid] = dataclasses.replace(gpu, index=index, is_healthy=True)
        return tuple(sorted(self._by_uuid.values(), key=lambda gpu: gpu.index))

    def _number(self, wanted: int) -> int:
        taken = {gpu.index for gpu in self._by_uuid.values()}
        if wanted not in taken:
            return wanted
        return next(number for number in range(len(taken) + 1) if number not in taken)
