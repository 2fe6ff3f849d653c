"""Nexus's plan (Shen et al., SOSP 2019): models and batch sizes of each GPU, by squishy bin packing. Pure.

Before: the request rates of an epoch. After: `nexus`, whose frontends route by the plan and whose backends
run it. A model's load fills whole GPUs first, at the largest batch with 2 l(b) <= SLO (a request may just
miss a batch and wait for the next). What is left over of each model is a *residue*: in a duty cycle of d
seconds it gathers b = r d requests, the largest b with l(b) + b / r <= SLO. Residues are packed best fit,
fullest first: two fit on one GPU when their batches, made smaller for the shorter of both cycles ("squishy"),
fit into it. The paper's goal is the fewest GPUs for a rate. On a cluster of given size the rates are
multiplied by the largest factor whose plan fits, so that spare capacity is spread and a lack is shared.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from keystage.batching.profile import LatencyProfile


@dataclasses.dataclass(frozen=True, slots=True)
class Session:
    """A model to be planned.

    Attributes:
        profile: its service time.
        slo_s: from arrival to the end of its batch.
    """

    profile: LatencyProfile
    slo_s: float

    def saturating(self, slo_share: float) -> int:
        """The batch of a GPU of its own: the largest that takes at most this share of the SLO, at least 1."""
        return max(1, self.profile.largest_batch(self.slo_s * slo_share))


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """A model on a GPU.

    Attributes:
        batch: the most requests it may take at once.
        rate_rps: its share of the model's requests.
    """

    batch: int
    rate_rps: float


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """What one GPU is to run.

    Attributes:
        parts: by model.
        cycle_s: every model's batch runs once in this time.
        busy_s: the sum of their service times.
    """

    parts: Mapping[int, Part]
    cycle_s: float
    busy_s: float


def plan(
    sessions: Mapping[int, Session], rates_rps: Mapping[int, float], nodes: int, slo_share: float = 0.5
) -> list[Node]:
    """A plan for exactly this many GPUs, or fewer when there is nothing to run.

    Args:
        sessions: by model.
        rates_rps: requests/s of each; a model without requests still gets a place.
        nodes: GPUs, at least 1.
        slo_share: a batch on a GPU of its own takes at most this share of the SLO; the paper has a half.
    """
    if not sessions:
        return []
    # Nothing may be left out altogether: a request may come for it at any time.
    floor_rps = 1e-3 * max(sum(rates_rps.values()), 1.0) / len(sessions)
    asked = {model: max(rates_rps.get(model, 0.0), floor_rps) for model in sessions}
    low, high = 0.0, 2.0
    best = pack(sessions, dict.fromkeys(asked, 0.0), slo_share)
    while len(found := _scaled(sessions, asked, high, slo_share)) <= nodes and high < 1e6:
        low, high, best = high, high * 2, found
    for _ in range(20):
        middle = (low + high) / 2
        found = _scaled(sessions, asked, middle, slo_share)
        if len(found) <= nodes:
            low, best = middle, found
        else:
            high = middle
    if len(best) > nodes:
        best = _squeezed(best, nodes)
    return _spread(sessions, best, nodes, slo_share)


def _scaled(
    sessions: Mapping[int, Session], rates_rps: Mapping[int, float], factor: float, slo_share: float
) -> list[Node]:
    return pack(sessions, {model: rate * factor for model, rate in rates_rps.items()}, slo_share)


def pack(
    sessions: Mapping[int, Session], rates_rps: Mapping[int, float], slo_share: float = 0.5
) -> list[Node]:
    """Squishy bin packing: the GPUs that these rates need, at most one residue of each model."""
    full: list[Node] = []
    residues: list[Node] = []
    for model, session in sessions.items():
        batch = session.saturating(slo_share)
        service_s = session.profile.latency_s(batch)
        most_rps = batch / service_s
        whole = int(rates_rps[model] / most_rps)
        full += [Node({model: Part(batch, most_rps)}, service_s, service_s)] * whole
        rest_rps = rates_rps[model] - whole * most_rps
        if rest_rps > 1e-9 or not whole:
            residues.append(_residue(model, session, rest_rps, batch))
    residues.sort(key=lambda node: -node.busy_s / node.cycle_s)
    packed: list[Node] = []
    for residue in residues:
        merged = [(_merged(sessions, node, residue), place) for place, node in enumerate(packed)]
        fitting = [(node.busy_s / node.cycle_s, -place, node) for node, place in merged if node is not None]
        if fitting:
            _, place, node = max(fitting, key=lambda found: found[:2])
            packed[-place] = node
        else:
            packed.append(residue)
    return full + packed


def _residue(model: int, session: Session, rate_rps: float, most: int) -> Node:
    """The node of what is left of a model: its own batch and cycle."""
    profile, slo_s = session.profile, session.slo_s
    # l(b) + b / r <= SLO is alpha b + beta + b / r <= SLO.
    squeezed = LatencyProfile(profile.alpha_s + 1 / rate_rps, profile.beta_s) if rate_rps > 0 else None
    batch = min(most, squeezed.largest_batch(slo_s)) if squeezed is not None else 0
    # Too few to fill even a batch of one in time: it runs alone, as often as its SLO asks.
    cycle_s = batch / rate_rps if batch else max(slo_s - profile.latency_s(1), profile.latency_s(1))
    batch = max(batch, 1)
    service_s = profile.latency_s(batch)
    if service_s > cycle_s:  # nearly a whole GPU: it gets one
        batch = most
        cycle_s = service_s = profile.latency_s(most)
    return Node({model: Part(batch, rate_rps)}, cycle_s, service_s)


def _merged(sessions: Mapping[int, Session], one: Node, other: Node) -> Node | None:
    """Both on one GPU in the shorter cycle, None when that does not fit."""
    cycle_s = min(one.cycle_s, other.cycle_s)
    parts: dict[int, Part] = {}
    busy_s = 0.0
    for node in (one, other):
        for model, part in node.parts.items():
            batch = part.batch
            if node.cycle_s > cycle_s:
                batch = min(batch, max(1, math.ceil(cycle_s * part.rate_rps - 1e-9)))
            parts[model] = Part(batch, part.rate_rps)
            busy_s += sessions[model].profile.latency_s(batch)
    return Node(parts, cycle_s, busy_s) if busy_s <= cycle_s else None


def _squeezed(packed: Sequence[Node], nodes: int) -> list[Node]:
    """More GPUs than there are: the emptiest are laid on the others, beyond what they can bear."""
    kept = [dict(node.parts) for node in packed[:nodes]]
    for place, node in enumerate(packed[nodes:]):
        kept[place % nodes].update(node.parts)
    return [Node(parts, math.inf, math.inf) for parts in kept]


def _spread(
    sessions: Mapping[int, Session], packed: Sequence[Node], nodes: int, slo_share: float
) -> list[Node]:
    """GPUs that packing left over go to the models that fill theirs most."""
    spread = list(packed)
    while len(spread) < nodes:
        fullest = max(spread, key=lambda node: node.busy_s / node.cycle_s)
        model = max(fullest.parts, key=lambda found: fullest.parts[found].rate_rps)
        session = sessions[model]
        holders = [place for place, node in enumerate(spread) if model in node.parts]
        rate_rps = sum(spread[place].parts[model].rate_rps for place in holders)
        each_rps = rate_rps / (len(holders) + 1)
        for place in holders:
            parts = dict(spread[place].parts)
            parts[model] = Part(parts[model].batch, each_rps)
            busy_s = spread[place].busy_s * len(holders) / (len(holders) + 1)
            spread[place] = Node(parts, spread[place].cycle_s, busy_s)
        batch = session.saturating(slo_share)
        service_s = session.profile.latency_s(batch)
        spread.append(
            Node({model: Part(batch, each_rps)}, service_s, service_s * len(holders) / (len(holders) + 1))
        )
    return spread
