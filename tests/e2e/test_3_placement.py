"""Placement on six nodes, four of them played: key stages are spread, others packed, bad nodes avoided."""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping

import pytest
from support.e2e_load import Load, summary
from support.e2e_nodes import PlayedNodes
from support.e2e_world import World, figure, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

CPU = {"played-1": "4", "played-2": "4", "played-3": "4", "played-4": "50m"}
CORDONED, FULL = "played-3", "played-4"
KEY, OTHERS = 6, 2
RATE_RPS = 8.0


def _cores(quantity: str) -> float:
    return float(quantity[:-1]) / 1000 if quantity.endswith("m") else float(quantity)


def _divergence(counts: Mapping[str, int], capacity: Mapping[str, float]) -> float:
    """KL of the replicas' shares of nodes from the nodes' shares of capacity, in nats."""
    total, room = sum(counts.values()), sum(capacity.values())
    return sum(n / total * math.log(n / total / (capacity[node] / room)) for node, n in counts.items() if n)


def _nodes_of(world: World, function: str) -> collections.Counter[str]:
    return collections.Counter(p["spec"].get("nodeName", "none") for p in world.pods(function))


def test_key_stages_are_spread_and_others_packed(world: World, emulated: str) -> None:
    key = f"{emulated}-stage-1"
    others = [f"{emulated}-stage-{k}" for k in (0, 2)]
    for name in (key, *others):
        world.scale(name, 1)
    wait_for(lambda: all(len(world.pods(name)) == 1 for name in (key, *others)), "one replica each")
    real = {n["metadata"]["name"]: _cores(n["status"]["allocatable"]["cpu"]) for n in world.ready_nodes()}
    if len(real) < 2:
        pytest.skip("two real nodes are needed beside the played ones")
    played = PlayedNodes(world, CPU, frozenset({CORDONED}))
    with played, Load(f"{world.url}/function/{emulated}", RATE_RPS) as load:
        load.wait(100)  # the controller learns which stage is the slow one
        capacity = real | {name: _cores(cpu) for name, cpu in CPU.items() if name != CORDONED}
        before = _nodes_of(world, key)
        world.scale(key, KEY)
        for name in others:
            world.scale(name, OTHERS)
        wait_for(lambda: _placed(world, key, KEY), f"{KEY} replicas have a node", 60)
        for name in others:
            wait_for(lambda name=name: _placed(world, name, OTHERS), f"{OTHERS} replicas have a node", 60)
        after = _nodes_of(world, key)
        packed = collections.Counter({max(after, key=after.__getitem__): KEY})
        figure("key stage's replicas by node", dict(after))
        figure("other stages' replicas by node", {name: dict(_nodes_of(world, name)) for name in others})
        for when, counts in (("before", before), ("after", after), ("all on one node", packed)):
            figure(
                f"KL of the key stage's node shares from capacity shares, {when}",
                f"{_divergence(counts, capacity):.3f}",
            )
        used = set().union(after, *(_nodes_of(world, name) for name in others))
        figure("pods on the cordoned and on the full node", len(used & {CORDONED, FULL}))
        # Down again while the nodes are there: replicas that do no work go with those that do.
        for name in (key, *others):
            world.scale(name, 1)
        load.stop()
    figure("load meanwhile", summary(load))
    assert CORDONED not in used
    assert FULL not in used
    assert len(after) >= 4, "a key stage's replicas are on as many nodes as there are"
    assert max(after.values()) <= 2
    assert _divergence(after, capacity) < _divergence(before, capacity)
    wait_for(lambda: len(world.ready_pods(key)) == 1, "one replica again")


def _placed(world: World, function: str, replicas: int) -> bool:
    counts = _nodes_of(world, function)
    return counts.total() == replicas and "none" not in counts
