"""Whatever happens to a cluster, plans keep to what they promise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.plan_world import Toy, router_function, stage_function

from keystage.controller.domain.decision import Site
from keystage.kubernetes.operations import Activate, Create, Delete, Leave, Operation, Park
from keystage.kubernetes.plan import is_live
from keystage.kubernetes.plan_places import is_open
from keystage.kubernetes.scene import Node, Pod

NODES = ("n1", "n2", "n3")
NAMES = ("llm-stage-0", "llm-stage-1")
STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("scale"),
            st.sampled_from(NAMES),
            st.integers(0, 5),
            st.lists(st.sampled_from(NODES), max_size=3),
        ),
        st.tuples(st.just("redeploy"), st.sampled_from(NAMES), st.sampled_from("abc")),
        st.tuples(st.just("ready"), st.integers(0, 9)),
        st.tuples(st.just("all-ready")),
        st.tuples(st.just("schedule"), st.integers(0, 9), st.sampled_from(NODES)),
        st.tuples(st.just("stuck"), st.integers(0, 9)),
        st.tuples(st.just("fail"), st.integers(0, 9)),
        st.tuples(st.just("evict"), st.integers(0, 9)),
        st.tuples(st.just("confirm"), st.integers(0, 9)),
        st.tuples(st.just("node"), st.sampled_from(NODES), st.sampled_from(["open", "cordoned", "lost"])),
        st.tuples(st.just("wait"), st.sampled_from([0.1, 1.0, 4.0, 15.0])),
    ),
    min_size=8,
    max_size=30,
)
WANTED = st.tuples(st.integers(0, 5), st.integers(0, 5))
"""Of each stage at first, all of them ready."""


def step(toy: Toy, what: Sequence[Any]) -> None:
    """Something happens."""
    kind, args = what[0], what[1:]
    names = sorted(toy.pods)
    if kind == "scale":
        toy.function(args[0], desired=args[1], sites=tuple(Site(node) for node in args[2]))
    elif kind == "redeploy":
        toy.function(args[0], template=f"template-{args[1]}", shape=f"shape-{args[1]}")
    elif kind == "node":
        node, state = args
        toy.nodes[node] = Node(name=node, is_open=state == "open", is_lost=state == "lost")
    elif kind == "all-ready":
        toy.ready()
    elif kind == "wait":
        toy.at_s += args[0]
    elif names:
        touch(toy, kind, names[args[0] % len(names)], args[1:])


def touch(toy: Toy, kind: str, name: str, args: Sequence[Any]) -> None:
    """Something happens to a pod."""
    pod = toy.pods[name]
    if kind == "ready" and pod.state == "starting":
        toy.ready(name)
    elif kind == "schedule" and not pod.node and is_open(toy.scene(), pod.site or args[0]):
        toy.schedule(name, args[0])
    elif kind == "stuck" and not pod.node and not pod.unschedulable_s:
        toy.change(name, unschedulable_s=toy.at_s)
    elif kind == "fail" and pod.node and pod.state in ("starting", "ready"):
        toy.change(name, state="failed")
    elif kind == "evict" and pod.state in ("starting", "ready"):
        toy.change(name, state="draining", is_deleted=True)
    elif kind == "confirm" and pod.is_deleted:
        del toy.pods[name]


def live(toy: Toy, name: str) -> list[Pod]:
    scene = toy.scene()
    return [pod for pod in toy.pods.values() if pod.function == name and is_live(scene, pod)]


def world(wanted: tuple[int, int]) -> Toy:
    stages = [stage_function(index, desired=desired) for index, desired in enumerate(wanted)]
    toy = Toy([router_function(), *stages], NODES, parked=2)
    toy.settle(2)
    return toy


def planned(toy: Toy) -> list[Operation]:
    operations = toy.plan()
    touched = [op.pod for op in operations if isinstance(op, Create | Park | Activate | Leave | Delete)]
    assert len(set(touched)) == len(touched), "two things are done to one pod"
    return operations


def check_stage(toy: Toy, name: str, before: list[Pod], operations: list[Operation]) -> None:
    function = toy.functions[name]
    mine = {pod.name for pod in before}
    after = live(toy, name)
    grew = {op.pod for op in operations if isinstance(op, Create | Activate) and op.function == name}
    # Never more than wanted and one beyond it.
    assert len(after) <= function.desired + 1
    # One beyond only while an old one serves; enough of them, or more are made (nothing holds here).
    is_rolling = any(pod.template != function.template for pod in after)
    assert is_rolling or len(after) == function.desired
    assert len(after) >= function.desired
    # One that serves goes only when no other of its template that does not serve could.
    gone = {op.pod for op in operations if isinstance(op, Leave) and op.pod in mine}
    served = [pod for pod in before if pod.name in gone]
    for pod in served:
        waiting = [
            p for p in after if p.template == pod.template and p.state == "starting" and p.name in mine
        ]
        assert not waiting, "a serving pod went for one that does not serve"
    # The last ones that serve stay as long as replicas are wanted and no new one serves.
    ready_before = [pod for pod in before if pod.state == "ready"]
    ready_after = [pod for pod in after if pod.state == "ready"]
    if ready_before and function.desired:
        assert ready_after
    if not is_rolling:
        assert not (gone and grew and len(ready_after) < min(function.desired, len(ready_before)))


def check_places(toy: Toy, operations: list[Operation], nodes_of: dict[str, str]) -> None:
    scene = toy.scene()
    for op in operations:
        if isinstance(op, Create) and op.place.node:
            assert is_open(scene, op.place.node)
        if isinstance(op, Activate) and not op.is_resumed:
            assert is_open(scene, nodes_of[op.pod])
    # Sites are used in order, by those that say so; a parked pod elsewhere is sooner than a new one there.
    for name in NAMES:
        sites = [site.node for site in toy.functions[name].sites]
        using = [
            op
            for op in operations
            if isinstance(op, Create | Activate) and op.function == name and op.uses_site
        ]
        for op, site in zip(using, sites, strict=False):
            if isinstance(op, Create):
                assert op.place.node == site or not is_open(scene, site)


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(WANTED, STEPS)
def test_every_plan_keeps_its_promises(wanted: tuple[int, int], steps: list[tuple[Any, ...]]) -> None:
    toy = world(wanted)
    for what in steps:
        step(toy, what)
        before = {name: live(toy, name) for name in NAMES}
        nodes_of = {name: pod.node for name, pod in toy.pods.items()}
        operations = planned(toy)
        for operation in operations:
            toy.do(operation)
        for name in NAMES:
            check_stage(toy, name, before[name], operations)
        check_places(toy, operations, nodes_of)
        assert len(toy.pool()) <= toy.parked
        # What was done is not done again at once.
        again = [op for op in toy.plan() if not (isinstance(op, Activate) and op.is_resumed)]
        assert not [op for op in again if isinstance(op, Create | Park | Leave)]


@pytest.mark.slow
@settings(max_examples=120, deadline=None)
@given(WANTED, STEPS)
def test_once_nothing_happens_any_more_the_cluster_is_as_wished(
    wanted: tuple[int, int], steps: list[tuple[Any, ...]]
) -> None:
    toy = world(wanted)
    for what in steps:
        step(toy, what)
        toy.turn()
    toy.nodes = {name: Node(name=name) for name in NODES}
    toy.settle(40)
    for name in NAMES:
        pods = toy.of(name)
        assert len(pods) == toy.functions[name].desired
        assert all(pod.state == "ready" and pod.template == toy.functions[name].template for pod in pods)
    assert len(toy.pool()) == toy.parked
    assert not [pod for pod in toy.pods.values() if pod.state in ("draining", "failed")]
