"""Which node a new replica goes to, who goes first, and since when it is wanted."""

from __future__ import annotations

import pytest

from keystage.keysmanager.api import StageName
from keystage.local.api import Deployment
from keystage.local.errors import BadDeployment
from keystage.local.events import Deployed, Instruction, Scaled, Start, Started, Terminate
from keystage.local.key_stages import resolve
from keystage.local.ledger import DECIDED_S, Bounds, Ledger
from keystage.local.site import MAX_NODES, nodes_of
from keystage.local.spread import least_used


def function(name: str) -> Deployment:
    return Deployment(service=name, envProcess="serve")


def places(instructions: list[Instruction]) -> list[tuple[str, str]]:
    return [(i.replica, i.node) for i in instructions if isinstance(i, Start)]


@pytest.mark.parametrize(
    ("running", "chosen"),
    [
        ([], "a"),
        ([("f", "a")], "b"),
        ([("f", "a"), ("f", "b")], "a"),
        ([("f", "a"), ("f", "b"), ("g", "a")], "b"),  # ties of the function: fewest in all
        ([("g", "a"), ("g", "a"), ("f", "b")], "a"),  # the function counts before all
        ([("f", "elsewhere")], "a"),
    ],
)
def test_node_with_fewest_of_the_function_then_of_all(running: list[tuple[str, str]], chosen: str) -> None:
    assert least_used(("a", "b"), running, "f") == chosen


def test_replicas_are_spread_and_records_name_the_node() -> None:
    ledger = Ledger(Bounds(), ("a", "b"))
    assert places(ledger.handle(Deployed(function("f")), 0.0)) == [("f-0", "a")]
    assert places(ledger.handle(Deployed(function("g")), 0.0)) == [("g-0", "b")]
    assert places(ledger.handle(Scaled("f", 4), 1.0)) == [("f-1", "b"), ("f-2", "a"), ("f-3", "b")]
    assert [r.node for r in ledger.replicas()] == ["a", "b", "b", "a", "b"]


def test_sites_of_the_decision_are_used_up_then_the_spread_chooses() -> None:
    ledger = Ledger(Bounds(), ("a", "b"))
    ledger.handle(Deployed(function("f")), 0.0)
    sited = ledger.handle(Scaled("f", 5, ("a", "gone", "a")), 1.0)
    assert places(sited) == [("f-1", "a"), ("f-2", "b"), ("f-3", "a"), ("f-4", "b")]
    assert places(ledger.handle(Scaled("f", 6), 2.0)) == [("f-5", "b")]


def test_named_victims_go_before_the_youngest() -> None:
    ledger = Ledger(Bounds(linger_s=0.0))
    ledger.handle(Deployed(function("f")), 0.0)
    ledger.handle(Scaled("f", 4), 1.0)
    gone = ledger.handle(Scaled("f", 2, (), ("f-1", "no-such", "f-0")), 2.0)
    assert gone == [Terminate("f-1"), Terminate("f-0")]
    assert ledger.handle(Scaled("f", 1, (), ("f-0",)), 3.0) == [Terminate("f-3")]


def test_a_start_is_wanted_since_the_decision_that_caused_it() -> None:
    ledger = Ledger(Bounds())
    (first,) = ledger.handle(Deployed(function("f")), 10.0)
    assert isinstance(first, Start)
    assert first.wanted_at_s == 10.0
    (second,) = ledger.handle(Scaled("f", 2, decided_at_s=19.9), 20.0)
    assert isinstance(second, Start)
    assert second.wanted_at_s == 19.9
    (late,) = ledger.handle(Scaled("f", 3, decided_at_s=20.0), 20.1 + DECIDED_S)
    assert isinstance(late, Start)
    assert late.wanted_at_s == 20.1 + DECIDED_S


def test_record_says_how_a_replica_was_started() -> None:
    ledger = Ledger(Bounds())
    ledger.handle(Deployed(function("f")), 0.0)
    ledger.handle(Started("f-0", 7, "127.0.0.1:1", "holder", "memory", "a note"), 0.1)
    (record,) = ledger.replicas()
    assert (record.pid, record.via, record.source, record.note) == (7, "holder", "memory", "a note")


@pytest.mark.parametrize("count", [0, -1, MAX_NODES + 1])
def test_impossible_numbers_of_nodes_are_refused(count: int) -> None:
    with pytest.raises(BadDeployment, match=rf"1\.\.{MAX_NODES}, not {count}"):
        nodes_of(count)


def test_one_node_is_called_as_told_and_several_by_number() -> None:
    assert nodes_of(1, "mine") == ("mine",)
    assert nodes_of(1) != ("",)
    assert nodes_of(3, "mine") == ("node-0", "node-1", "node-2")


def stage(pipeline: str, stages: str, device: str = "cpu") -> Deployment:
    env = {
        "KEYSTAGE_ROLE": "stage",
        "KEYSTAGE_PIPELINE": pipeline,
        "KEYSTAGE_STAGES": stages,
        "KEYSTAGE_BUNDLE": f"file:///{pipeline}",
        "KEYSTAGE_DEVICE": device,
    }
    return Deployment(service=f"{pipeline}-stage-{stages}", envVars=env)


def test_key_stages_are_dealt_in_turn_and_only_those_with_parameters() -> None:
    deployed = [stage("a", "0-1"), stage("a", "2"), stage("b", "0"), stage("e", "0", "emulated:alpha=0")]
    deployed.append(stage("bad", "x"))
    lists = {"b": (0, 5), "a": (2, 0), "e": (0,), "bad": (0,), "gone": (1,)}
    assert resolve(lists, deployed) == [
        StageName("file:///a", 2),
        StageName("file:///b", 0),
        StageName("file:///a", 0),
    ]
    assert resolve({}, deployed) == []
