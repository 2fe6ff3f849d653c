"""One request's way through a graph: joins, lost branches, the exit, eviction, cancellation."""

from __future__ import annotations

from keystage.streams.flow import RequestFlow, Step
from keystage.streams.graph import Graph, ModuleSpec, Routes, StreamSpec
from keystage.streams.graph_checks import check


def _spec(text: str) -> tuple[StreamSpec, ...]:
    return tuple(StreamSpec(name, "x") for name in text.split())


def _flow(*modules: tuple[str, str, str], joins: str = "", most: int = 100) -> RequestFlow[str]:
    specs = tuple(
        ModuleSpec(
            name, _spec(inputs), _spec(outputs), "all" if name in joins.split() else "any", is_stateful=True
        )
        for name, inputs, outputs in modules
    )
    graph = Graph(StreamSpec("in", "x"), StreamSpec("out", "x"), specs, most)
    check(graph)
    return RequestFlow(Routes(graph))


def _fork() -> RequestFlow[str]:
    return _flow(("a", "in", "l r"), ("b", "l", "bl"), ("c", "r", "cr"), ("j", "bl cr", "out"), joins="j")


def _ready(step: Step[str]) -> list[str]:
    return [work.module for work in step.ready]


def test_a_chain_answers_and_evicts_each_module_as_it_is_left() -> None:
    flow = _flow(("a", "in", "s"), ("b", "s", "out"))
    step = flow.enter("m0")
    assert _ready(step) == ["a"]
    step = flow.done(step.ready[0], [("s", "m1")])
    assert (_ready(step), step.evict) == (["b"], ["a"])
    assert step.ready[0].parts == (("s", "m1"),)
    step = flow.done(step.ready[0], [("out", "m2")])
    assert (step.answer, step.is_over, step.evict, step.dropped) == ("m2", True, ["b"], [])
    assert flow.executed == {"a": 1, "b": 1}


def test_state_of_a_loop_stays_until_the_loop_is_left() -> None:
    flow = _flow(("a", "in", "s"), ("b", "s", "t"), ("c", "t", "s u"), ("d", "u", "out"))
    step = flow.enter("m")
    evicted = []
    for stream in ("s", "t", "s", "t", "u", "out"):
        step = flow.done(step.ready[0], [(stream, "m")])
        evicted.append(step.evict)
    assert evicted == [["a"], [], [], [], ["b", "c"], ["d"]]


def test_a_join_waits_for_all_and_lists_parts_in_the_order_of_its_inputs() -> None:
    flow = _fork()
    step = flow.done(flow.enter("m").ready[0], [("l", "left"), ("r", "right")])
    left, right = step.ready
    step = flow.done(right, [("cr", "R")])
    assert (_ready(step), step.is_over, flow.parked) == ([], False, ["R"])
    assert step.evict == ["c"]
    step = flow.done(left, [("bl", "L")])
    assert step.ready[0].parts == (("bl", "L"), ("cr", "R"))
    assert flow.done(step.ready[0], [("out", "both")]).answer == "both"


def test_a_lost_branch_ends_the_request_by_the_name_of_the_join() -> None:
    flow = _fork()
    step = flow.done(flow.enter("m").ready[0], [("l", "left"), ("r", "right")])
    left, right = step.ready
    assert not flow.done(left, [("bl", "L")]).is_over
    step = flow.done(right, [])
    assert step.is_over
    assert step.refusal.startswith("a branch was lost: module j waits for a message of stream cr")
    assert step.dropped == ["L"]
    assert flow.moving == []


def test_a_message_scattered_to_nothing_ends_the_request() -> None:
    flow = _flow(("a", "in", "out"))
    step = flow.done(flow.enter("m").ready[0], [])
    assert (step.is_over, step.refusal) == (True, "its last message was scattered to no stream")


def test_a_second_message_at_the_exit_is_refused() -> None:
    flow = _flow(("a", "in", "l out"), ("b", "l", "out"))
    step = flow.done(flow.enter("m").ready[0], [("out", "first"), ("l", "m")])
    assert (step.is_over, _ready(step)) == (False, ["b"])
    step = flow.done(step.ready[0], [("out", "second")])
    assert step.is_over
    assert "a second message came to the exit, stream out" in step.refusal
    assert sorted(step.dropped) == ["first", "second"]


def test_an_early_answer_waits_for_what_still_moves() -> None:
    flow = _flow(("a", "in", "l out"), ("b", "l", "out"))
    step = flow.done(flow.enter("m").ready[0], [("out", "first"), ("l", "m")])
    step = flow.done(step.ready[0], [])
    assert (step.answer, step.refusal, step.dropped) == ("first", "", [])


def test_an_unknown_stream_ends_the_request_by_name() -> None:
    flow = _flow(("a", "in", "s out"), ("b", "s", "out"))
    step = flow.done(flow.enter("m").ready[0], [("s", "x"), ("in", "y"), ("out", "z")])
    assert step.refusal == "module a scattered to stream 'in', it has s, out"
    assert sorted(step.dropped) == ["x", "y", "z"]
    assert step.ready == []


def test_a_loop_that_is_never_left_is_bounded() -> None:
    flow = _flow(("a", "in", "in out"), most=5)
    step = flow.enter("m")
    for _ in range(4):
        step = flow.done(step.ready[0], [("in", "m")])
        assert not step.is_over
    step = flow.done(step.ready[0], [("in", "m")])
    assert step.refusal == "not answered after 5 module executions, the bound of this program"


def test_the_last_step_within_the_bound_answers() -> None:
    flow = _flow(("a", "in", "in out"), most=1)
    assert flow.done(flow.enter("m").ready[0], [("out", "m")]).answer == "m"


def test_a_cancelled_request_gives_everything_back_and_late_results_are_dropped() -> None:
    flow = _fork()
    step = flow.done(flow.enter("m").ready[0], [("l", "left"), ("r", "right")])
    left, right = step.ready
    flow.done(left, [("bl", "L")])
    step = flow.end("cancelled")
    assert (step.refusal, sorted(step.evict), sorted(step.dropped)) == (
        "cancelled",
        ["c"],
        ["L", "right"],
    )
    assert flow.done(right, [("cr", "R")]).dropped == ["R"]
    assert flow.end("again") == Step()
    assert flow.is_over


def test_state_stays_where_another_branch_can_still_come() -> None:
    flow = _flow(
        ("a", "in", "l r"), ("b", "l", "s"), ("c", "r", "t"), ("d", "s t", "u out"), ("e", "u", "out")
    )
    step = flow.done(flow.enter("m").ready[0], [("l", "left"), ("r", "right")])
    left, right = step.ready
    step = flow.done(left, [("s", "L")])
    step = flow.done(step.ready[0], [("u", "U")])
    assert step.evict == []
    last = step.ready[0]
    step = flow.done(right, [])
    assert step.evict == ["c", "d"]
    assert flow.done(last, [("out", "E")]).evict == ["e"]
