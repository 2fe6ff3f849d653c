"""Who gets how much of a device in `bench neustream`: Algorithm 2 on the language programs' profiles.

Between profiles (`neustream_models`) and the emulated agents. Prefill and decode of one model work with the
same parameters and the same KV pool, so memory does not divide them; agents are parted by device.
"""

from __future__ import annotations

import dataclasses
import functools

from keystage.bench.neustream_agents import PartialSloAgent, Share
from keystage.bench.neustream_language import Lengths, Load, Part
from keystage.bench.neustream_models import Language
from keystage.bench.neustream_prefill_first import PrefillFirst
from keystage.streams.allocate import Allocation, allocate
from keystage.streams.placement import Device, Module

DEVICE_SPUS = 24
"""K: fine enough that a share is within 5 % of what one would wish."""


GRACE_STEPS = (2, 5, 10, 20, 40, 80, 160)
"""A prefill's partial SLO is its objective and what so many decode steps gain on theirs."""
ENOUGH_RATIO = 0.8
"""Of the goodput that Algorithm 2 finds with the best of these: the shortest with so much is taken."""


@dataclasses.dataclass(frozen=True, slots=True)
class Effort:
    """What is tuned of ours.

    Attributes:
        horizon_ratio: see `neustream_agents.Share`.
        margin_ratio: of a decode step's objective that its batch limit may use.
    """

    horizon_ratio: float
    margin_ratio: float


@dataclasses.dataclass(frozen=True, slots=True)
class Shared:
    """An allocation, as agents and devices need it.

    Attributes:
        spus: SPUs of prefill and decode of each agent.
        shares: of each agent.
        allocation: what Algorithm 2 said.
    """

    spus: list[tuple[int, int]]
    shares: list[Share]
    allocation: Allocation


def shared(agents: list[tuple[Language, Lengths]], load: Load, effort: Effort) -> Shared:
    """Divides one device among the prefill and decode modules of agents, and their objectives among both.

    Args:
        agents: models with their lengths, all on one device.
        load: its objectives are used.
        effort: what is tuned.

    Raises:
        PlacementError: more modules than SPUs.
    """
    found = [_with_grace(agents, load, effort, steps) for steps in GRACE_STEPS]
    best_rps = max(one.allocation.goodput_rps for one in found)
    return next(one for one in found if one.allocation.goodput_rps >= ENOUGH_RATIO * best_rps)


def _with_grace(agents: list[tuple[Language, Lengths]], load: Load, effort: Effort, steps: int) -> Shared:
    modules = []
    partial = []
    for index, (model, lengths) in enumerate(agents):
        first_s, _ = model.alone_s(int(lengths.prompt), 2)
        tokens = lengths.prompt + lengths.mean_output / 2
        step_s = load.token_scale * model.decode_time_s(int(tokens))
        grace_s = steps * (step_s - step_s / load.token_scale)
        prefill_s = load.first_scale * first_s + grace_s
        decode_s = step_s * effort.margin_ratio
        partial.append(decode_s)
        modules += [
            Module(f"prefill {index}", prefill_s, 1.0, 1, {("gpu", 1): model.prefill(lengths.prompt)}),
            Module(f"decode {index}", decode_s, lengths.mean_output, 1, {("gpu", 1): model.decode(tokens)}),
        ]
    found = allocate(modules, [Device("gpu0", "gpu", DEVICE_SPUS, 1 << 40)])
    spus = [(found.spus[2 * i], found.spus[2 * i + 1]) for i in range(len(agents))]
    shares = [
        Share(decode_s, DEVICE_SPUS / mine[1], effort.horizon_ratio, lengths.mean_output)
        for decode_s, mine, (_, lengths) in zip(partial, spus, agents, strict=True)
    ]
    return Shared(spus, shares, found)


def our_parts(
    agents: list[tuple[Language, Lengths]], load: Load, effort: Effort, devices: list[int]
) -> list[Part]:
    """The agents as stream programs, each device divided by Algorithm 2."""
    parts: dict[int, Part] = {}
    for device in sorted(set(devices)):
        mine = [i for i, on in enumerate(devices) if on == device]
        found = shared([agents[i] for i in mine], load, effort)
        for index, spus, share in zip(mine, found.spus, found.shares, strict=True):
            model, lengths = agents[index]
            make = functools.partial(PartialSloAgent, model, share)
            parts[index] = Part(model, lengths, device, make, spus)
    return [parts[index] for index in range(len(agents))]


def prefill_first_parts(
    agents: list[tuple[Language, Lengths]], most_sessions: int, most_batched: int, devices: list[int]
) -> list[Part]:
    """The agents as prefill-first engines, one process each."""
    return [
        Part(
            model, lengths, device, functools.partial(PrefillFirst, model, most_sessions, most_batched), None
        )
        for (model, lengths), device in zip(agents, devices, strict=True)
    ]
