"""How many SPUs each module of a program gets (NeuStream, Algorithm 2). Pure.

Before it: profiles (`streams.interpolate`), partial SLOs, executions counted so far. After it: workers are
started where `Placed` says; on a shared device `streams.eftf` turns the shares into an order.

Maximises the least normalised goodput g_i = limit_i / (SLO_i k_i), limit_i = argmax_b L_i(b, a_i) <= SLO_i:
the least module gets the fewest further steps of Delta SPUs that raise it, until none can be raised.

Where this differs from the paper's text:
- The first allotment, which holds the modules' memory, is taken from N. The paper forgets that and hands out
  more SPUs than there are.
- A step is taken only if it raises something: sorted from the least, goodputs must rise lexicographically.
  g_i goes up in jumps, so several steps may be needed; when the rest would not raise the least module, the
  next one is tried, and SPUs that raise nobody stay free for others. The paper pours all of them into the
  least module. It always ends: every step taken spends SPUs.

On one device the result is the best there is in steps of Delta. On several, best fit may leave room in
pieces; what fits nowhere is not given.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from keystage.streams.placement import Device, Edge, Module, Placed, PlacementError, least_spus, place


@dataclasses.dataclass(frozen=True, slots=True)
class Allocation:
    """Who has what.

    Attributes:
        spus: a_i of each module.
        first: what each had at the beginning, for its memory.
        placed: where each lies and its goodput.
        left: SPUs that nobody has.
        reason: why no more were given, in words.
    """

    spus: tuple[int, ...]
    first: tuple[int, ...]
    placed: tuple[Placed, ...]
    left: int
    reason: str

    @property
    def goodput_rps(self) -> float:
        """The least normalised goodput: what the program can serve."""
        return min(one.goodput_rps for one in self.placed)


def allocate(
    modules: Sequence[Module],
    devices: Sequence[Device],
    *,
    step: int = 1,
    edges: Sequence[Edge] = (),
    together: Sequence[tuple[int, int]] = (),
) -> Allocation:
    """Divides devices among modules.

    Args:
        modules: at least one.
        devices: what there is; N is the sum of their SPUs.
        step: Delta, SPUs given at a time.
        edges: streams that cost time between devices.
        together: pairs that share their devices (`streams.colocate` finds them).

    Raises:
        PlacementError: the modules' memory does not fit; names the module, its need and the room.
        ValueError: no modules, or a step below 1.
    """
    if not modules:
        raise ValueError("a program has at least one module, got none")
    if step < 1:
        raise ValueError(f"SPUs are given in steps of at least 1, got {step}")
    total = sum(device.spus for device in devices)
    spus, placed = _first(modules, devices, edges, together)
    first = tuple(spus)
    settled: set[int] = set()
    while len(settled) < len(modules) and total - sum(spus) >= step:
        least = min((m for m in range(len(modules)) if m not in settled), key=lambda m: placed[m].goodput_rps)
        raised = None
        for more in range(step, total - sum(spus) + 1, step):
            trial = [given + (more if m == least else 0) for m, given in enumerate(spus)]
            try:
                new = place(modules, trial, devices, edges, together)
            except PlacementError:
                continue
            if _ascending(new) > _ascending(placed):
                raised = trial, new
                break
        if raised is None:
            settled.add(least)
        else:
            spus, placed = raised
    left = total - sum(spus)
    return Allocation(tuple(spus), first, placed, left, _reason(modules, placed, left, step))


def _first(
    modules: Sequence[Module],
    devices: Sequence[Device],
    edges: Sequence[Edge],
    together: Sequence[tuple[int, int]],
) -> tuple[list[int], tuple[Placed, ...]]:
    """The least that holds every module's memory; where a type has no room, the least of the next type."""
    options = [least_spus(module, devices) for module in modules]
    chosen = [0] * len(modules)
    while True:
        spus = [found[at] if found else 1 for found, at in zip(options, chosen, strict=True)]
        try:
            return spus, place(modules, spus, devices, edges, together)
        except PlacementError as error:
            # With more SPUs a module may lie on a type whose SPUs hold less, or on more devices.
            another = next((m for m in error.modules if chosen[m] + 1 < len(options[m])), None)
            if another is None:
                raise
            chosen[another] += 1


def _ascending(placed: Sequence[Placed]) -> list[float]:
    return sorted(one.goodput_rps for one in placed)


def _reason(modules: Sequence[Module], placed: Sequence[Placed], left: int, step: int) -> str:
    if left < step:
        return f"all SPUs are given, {left} are left of steps of {step}"
    least = min(range(len(modules)), key=lambda m: placed[m].goodput_rps)
    return (
        f"no module gains by what is left, {left} SPUs: the least is {modules[least].name!r} with "
        f"{placed[least].goodput_rps:.4g} requests a second"
    )
