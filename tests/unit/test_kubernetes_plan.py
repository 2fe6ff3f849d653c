"""The planner's rules, one by one."""

from __future__ import annotations

import dataclasses

from support.plan_world import Toy, router_function, stage_function

from keystage.controller.domain.decision import Site
from keystage.kubernetes.manifests_pod import Place
from keystage.kubernetes.operations import Activate, Apply, Create, Delete, Leave, Note, Park, RemoveWorkload
from keystage.kubernetes.scene import Node, Workload

STAGE = "llm-stage-0"


def test_missing_replicas_are_made_at_their_sites_then_anywhere() -> None:
    toy = Toy([stage_function(desired=3, sites=(Site("n2"), Site("n1")))])
    made = toy.turn()
    assert [op.place for op in made if isinstance(op, Create)] == [Place("n2"), Place("n1"), Place()]
    assert [op.uses_site for op in made if isinstance(op, Create)] == [True, True, False]
    assert toy.turn() == []


def test_a_site_that_takes_no_pods_is_passed_over() -> None:
    toy = Toy([stage_function(sites=(Site("n2"),))])
    toy.nodes["n2"] = Node(name="n2", is_open=False)
    assert [op.place for op in toy.plan() if isinstance(op, Create)] == [Place()]
    toy.function(STAGE, sites=(Site("n9"),))
    assert [op.place for op in toy.plan() if isinstance(op, Create)] == [Place()]


def test_too_many_go_in_order() -> None:
    toy = Toy([stage_function(desired=5)])
    toy.turn()
    names = sorted(toy.pods)
    toy.ready(*names[:3])
    toy.schedule(names[3])
    toy.function(STAGE, desired=4, victims=(names[1],))
    assert [op.pod for op in toy.turn() if isinstance(op, Delete)] == [names[4]]  # without a node
    toy.function(STAGE, desired=3)
    assert [op.pod for op in toy.turn() if isinstance(op, Delete)] == [names[3]]  # starting
    toy.function(STAGE, desired=2)
    assert [op.pod for op in toy.turn() if isinstance(op, Leave)] == [names[1]]  # named
    toy.function(STAGE, desired=1)
    toy.change(names[2], created_s=toy.at_s + 1)
    assert [op.pod for op in toy.turn() if isinstance(op, Leave)] == [names[2]]  # the youngest
    toy.function(STAGE, desired=0)
    assert [op.pod for op in toy.turn() if isinstance(op, Leave)] == [names[0]]


def test_who_leaves_is_deleted_when_nobody_has_requests_there_at_last_after_ten_seconds() -> None:
    toy = Toy([stage_function(desired=2)])
    toy.settle()
    first, second = sorted(toy.pods)
    toy.in_use = {first}
    toy.function(STAGE, desired=0)
    toy.turn()
    toy.at_s += 0.4
    assert toy.plan() == []
    toy.at_s += 0.2
    assert [op.pod for op in toy.turn() if isinstance(op, Delete)] == [second]
    toy.at_s += 9.0
    assert toy.plan() == []
    toy.at_s += 0.5
    assert [op.pod for op in toy.turn() if isinstance(op, Delete)] == [first]


def test_who_leaves_by_a_clock_that_was_ahead_is_dated_anew() -> None:
    toy = Toy([stage_function()])
    toy.settle()
    (name,) = toy.pods
    toy.pods[name] = dataclasses.replace(toy.pods[name], state="draining", leaving_s=toy.at_s + 3600.0)
    assert [op.pod for op in toy.turn() if isinstance(op, Leave)] == [name]
    assert toy.pods[name].leaving_s <= toy.at_s
    toy.at_s += 1.0
    assert [op.pod for op in toy.turn() if isinstance(op, Delete)] == [name]


def test_a_new_template_replaces_one_at_a_time() -> None:
    toy = Toy([stage_function(desired=2)])
    toy.settle()
    old = set(toy.pods)
    toy.function(STAGE, template="another")
    made = toy.turn()
    assert [type(op) for op in made] == [Create]
    assert toy.plan() == []  # the old ones serve until it does
    toy.ready()
    assert sorted(type(op).__name__ for op in toy.turn()) == ["Create", "Leave"]
    assert sum(p.name in old for p in toy.of()) == 1
    toy.settle()
    assert {p.template for p in toy.of()} == {"another"}
    assert len(toy.of()) == 2


def test_a_new_template_without_room_takes_the_place_of_an_old_pod_where_several_serve() -> None:
    toy = Toy([stage_function(desired=2)])
    toy.settle()
    toy.function(STAGE, template="another")
    (created,) = (op for op in toy.turn() if isinstance(op, Create))
    toy.change(created.pod, unschedulable_s=toy.at_s)
    toy.at_s += 9.9
    assert toy.plan() == []
    toy.at_s += 0.1
    assert sum(isinstance(op, Leave) for op in toy.turn()) == 1
    toy.at_s += 0.1
    assert not [op for op in toy.plan() if isinstance(op, Leave)]  # the next would be the last that serves


def test_what_is_leaving_ended_evicted_or_lost_is_replaced_at_once() -> None:
    for changes in ({"state": "failed"}, {"state": "draining", "is_deleted": True}, {"node": "n2"}):
        toy = Toy([stage_function()])
        toy.settle()
        (pod,) = toy.pods.values()
        toy.change(pod.name, **changes)
        toy.nodes["n2"] = Node(name="n2", is_lost=True, is_open=False)
        made = toy.turn()
        assert sum(isinstance(op, Create) for op in made) == 1, changes
        deleted = [op for op in made if isinstance(op, Delete)]
        assert [op.is_failure for op in deleted] == ([True] if changes == {"state": "failed"} else [])


def test_a_lost_nodes_pod_is_deleted_for_good_only_when_the_node_is_gone() -> None:
    toy = Toy([stage_function(sites=(Site("n2"),))])
    toy.settle()
    (pod,) = toy.pods.values()
    toy.nodes["n2"] = Node(name="n2", is_lost=True, is_open=False)
    made = toy.turn()
    assert [type(op) for op in made] == [Leave, Note, Create]
    toy.at_s += 1.0
    assert [op.is_gone for op in toy.turn() if isinstance(op, Delete)] == [False]
    del toy.nodes["n2"]
    toy.at_s += 20.0
    assert [(op.pod, op.is_gone) for op in toy.turn() if isinstance(op, Delete)] == [(pod.name, True)]


def test_a_hold_after_failures_puts_off_new_pods_and_nothing_else() -> None:
    toy = Toy([stage_function(desired=2, hold_until_s=1001.0)])
    assert toy.plan() == []
    toy.at_s = 1001.0
    assert len(toy.plan()) == 2


def test_a_pod_that_its_site_has_no_room_for_goes_elsewhere_after_three_seconds() -> None:
    toy = Toy([stage_function(sites=(Site("n1"),))])
    (created,) = (op for op in toy.turn() if isinstance(op, Create))
    toy.function(STAGE, sites=())
    toy.change(created.pod, unschedulable_s=toy.at_s)
    toy.at_s += 2.9
    assert toy.plan() == []
    toy.at_s += 0.1
    made = toy.turn()
    assert [op.place for op in made if isinstance(op, Create)] == [Place("n1", is_required=False)]
    assert [op.pod for op in made if isinstance(op, Delete)] == [created.pod]
    assert [op.reason for op in made if isinstance(op, Note)] == ["PlacementFailed"]
    (waiting,) = toy.of()
    toy.change(waiting.name, unschedulable_s=toy.at_s)
    toy.at_s += 60.0
    assert toy.plan() == []  # the scheduler places it when there is room


def test_a_pod_waiting_for_a_node_that_was_cordoned_goes_elsewhere_at_once() -> None:
    toy = Toy([stage_function(sites=(Site("n1"),))])
    toy.turn()
    toy.nodes["n1"] = Node(name="n1", is_open=False)
    assert [op.place for op in toy.turn() if isinstance(op, Create)] == [Place()]


def test_parked_pods_come_first_those_that_can_be_activated_before_the_others() -> None:
    toy = Toy([router_function(), stage_function(desired=0)], parked=3)
    toy.turn()
    names = sorted(p.name for p in toy.pool())
    assert len(names) == 3
    toy.schedule(names[0])
    toy.ready(names[2])
    toy.function(STAGE, desired=3)
    made = toy.turn()
    assert [op.pod for op in made if isinstance(op, Activate)] == [names[2], names[0]]
    assert sum(isinstance(op, Create) for op in made) == 1
    assert toy.pods[names[2]].owner == toy.functions[STAGE].uid


def test_a_parked_pod_at_the_site_is_taken_else_one_elsewhere_else_a_new_pod_is_made_there() -> None:
    toy = Toy([router_function(), stage_function(desired=0)], parked=2)
    toy.turn()
    first, second = toy.pool()
    toy.schedule(first.name, "n1")
    toy.schedule(second.name, "n2")
    toy.ready()
    for node, there, elsewhere in (("n1", first, second), ("n2", second, first)):
        toy.function(STAGE, desired=3, sites=(Site(node), Site(node), Site(node)))
        made = toy.plan()
        assert [op.pod for op in made if isinstance(op, Activate)] == [there.name, elsewhere.name]
        assert [op.place for op in made if isinstance(op, Create)] == [Place(node)]


def test_a_parked_pod_has_the_site_of_its_own_node_whatever_its_place_in_the_list() -> None:
    toy = Toy([router_function(), stage_function(desired=0)], parked=1)
    toy.turn()
    (parked,) = toy.pool()
    toy.schedule(parked.name, "n1")
    toy.ready()
    toy.function(STAGE, desired=2, sites=(Site("n2"), Site("n1")))
    made = toy.plan()
    assert [op.place for op in made if isinstance(op, Create)] == [Place("n2")]
    assert [op.pod for op in made if isinstance(op, Activate)] == [parked.name]


def test_parked_pods_on_closed_nodes_go_and_are_not_used() -> None:
    toy = Toy([router_function(), stage_function(desired=0)], parked=1)
    toy.turn()
    (parked,) = toy.pool()
    toy.schedule(parked.name, "n1")
    toy.ready()
    toy.nodes["n1"] = Node(name="n1", is_open=False)
    toy.function(STAGE, desired=1)
    made = toy.turn()
    assert not [op for op in made if isinstance(op, Activate)]
    assert [op.pod for op in made if isinstance(op, Delete)] == [parked.name]


def test_a_replica_without_room_has_a_parked_pods() -> None:
    toy = Toy([router_function(), stage_function(desired=0), stage_function(1, desired=0)], parked=2)
    toy.settle()
    assert len(toy.pool()) == 2
    toy.function(STAGE, desired=1, shape="other")  # of another shape than all that is parked
    (created,) = (op for op in toy.turn() if isinstance(op, Create))
    toy.change(created.pod, unschedulable_s=toy.at_s)
    made = toy.turn()
    assert sum(isinstance(op, Delete) for op in made) == 1
    assert not [op for op in made if isinstance(op, Park)]


def test_an_activation_that_nobody_sees_to_is_resumed() -> None:
    toy = Toy([router_function(), stage_function(desired=0)], parked=1)
    toy.settle()
    toy.function(STAGE, desired=1)
    (first,) = (op for op in toy.turn() if isinstance(op, Activate))
    (again,) = (op for op in toy.plan() if isinstance(op, Activate))
    assert (again.pod, again.is_resumed) == (first.pod, True)
    scene = dataclasses.replace(toy.scene(), activating=frozenset({first.pod}))
    from keystage.kubernetes.plan import plan

    assert not [op for op in plan(scene, str) if isinstance(op, Activate)]


def test_the_gpu_with_most_room_is_chosen_where_the_decision_names_none() -> None:
    toy = Toy([stage_function(desired=3, gpu_gib=10)])
    toy.nodes = {
        "n1": Node(name="n1", gpu_gib={0: 15.0, 1: 5.0}),
        "n2": Node(name="n2", gpu_gib={0: 22.0}),
    }
    places = [op.place for op in toy.plan() if isinstance(op, Create)]
    assert places == [Place("n2", 0), Place("n1", 0), Place("n2", 0)]
    toy.function(STAGE, desired=1, sites=(Site("n1", (1,)),))
    assert [op.place for op in toy.plan() if isinstance(op, Create)] == [Place("n1", 1)]


def test_pods_of_a_function_of_that_name_that_was_removed_count_for_nothing() -> None:
    toy = Toy([stage_function()])
    toy.settle()
    (pod,) = toy.pods.values()
    toy.function(STAGE, uid="uid-of-the-next")
    made = toy.turn()
    assert [type(op) for op in made] == [Create]
    assert pod.name in toy.pods  # the garbage collector's


def test_deployments_follow_template_and_number_and_go_with_the_role() -> None:
    toy = Toy([router_function()])
    assert toy.turn() == [Apply("llm")]
    assert toy.turn() == []
    toy.function("llm", desired=0)
    assert toy.turn() == [Apply("llm")]
    toy.workloads["llm"] = dataclasses.replace(toy.workloads["llm"], owner="uid-of-the-last")
    assert toy.turn() == []
    toy = Toy([stage_function(desired=0)])
    owner = toy.functions[STAGE].uid
    toy.workloads[STAGE] = Workload(name=STAGE, uid="d", owner=owner, template="t", replicas=1)
    assert toy.turn() == [RemoveWorkload(STAGE, "d")]


def test_a_pool_of_several_shapes_is_shared_key_stages_first() -> None:
    stages = [stage_function(n, desired=0) for n in range(3)]
    shapes = [dataclasses.replace(stage, shape=f"shape-{n}") for n, stage in enumerate(stages)]
    toy = Toy([router_function(), *shapes], parked=4)
    scene = dataclasses.replace(toy.scene(), key_stages={"llm": (2,)})
    from keystage.kubernetes.plan import plan

    parked = [op.shape for op in plan(scene, str) if isinstance(op, Park)]
    assert sorted(parked) == ["shape-0", "shape-1", "shape-2", "shape-2"]
