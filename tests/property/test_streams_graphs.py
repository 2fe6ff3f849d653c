"""Random programs run to their ends in any order and any batches; mutated ones are refused by name."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.stream_programs import RandomProgram

from keystage.streams.graph import Graph, ModuleSpec, Routes, StreamSpec, components, successors
from keystage.streams.graph_checks import Fault, GraphError, check
from keystage.streams.local import run_local
from keystage.streams.runtime import LocalRuntime

PROGRAMS = st.builds(RandomProgram.of, st.integers(0, 10_000), st.integers(1, 4))
NUMBERS = st.lists(st.integers(0, 50), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(PROGRAMS, NUMBERS, st.integers(0, 1000), st.integers(0, 4))
def test_valid_programs_answer_the_same_in_any_order_and_leave_nothing(
    made: RandomProgram, numbers: list[int], seed: int, batch: int
) -> None:
    bodies = [msgspec.json.encode(number) for number in numbers]
    expected = [made.answer(number) for number in numbers]
    for order in (None, seed):
        program = made.program()
        run = run_local(program, bodies, seed=order, batch=batch, is_strict=True)
        assert [int(answer.body) for answer in run.answers] == [answer for answer, _ in expected]
        assert run.executed == [visits for _, visits in expected]
        assert [module.state.requests for module in program.modules.values()] == [[] for _ in program.modules]
        assert all(len(step.requests) <= (batch or len(numbers)) for step in run.trace)


@settings(max_examples=60, deadline=None)
@given(PROGRAMS, NUMBERS, st.integers(0, 1000))
def test_cancellations_at_any_moment_leave_nothing(
    made: RandomProgram, numbers: list[int], seed: int
) -> None:
    choose = random.Random(seed)
    runtime = LocalRuntime(made.program(), is_strict=True)
    cancelled = set()
    for number in numbers:
        runtime.submit(msgspec.json.encode(number))
    while runtime.waiting:
        if choose.random() < 0.2:
            victim = choose.randrange(len(numbers))
            if runtime.answer(victim) is None:
                cancelled.add(victim)
            runtime.cancel(victim)
        elif runtime.waiting:
            runtime.step(choose.choice(list(runtime.waiting)), choose=choose)
    assert runtime.held == {}
    for number, value in enumerate(numbers):
        answer = runtime.answer(number)
        assert answer is not None
        if number in cancelled:
            assert answer.refusal == "cancelled"
        else:
            assert int(answer.body) == made.answer(value)[0]


@settings(max_examples=60, deadline=None)
@given(PROGRAMS)
def test_every_stream_of_a_valid_program_has_one_reader_and_loops_are_where_they_were_put(
    made: RandomProgram,
) -> None:
    graph = msgspec.json.decode(msgspec.json.encode(made.program().graph), type=Graph)
    check(graph)
    routes = Routes(graph)
    looping = {name for block in _blocks(made.plan) if block[0] in ("loop", "pair") for name in block[1:]}
    assert {module.name for module in graph.modules if routes.is_loop(module.name)} == looping
    for module in graph.modules:
        for stream in module.outputs:
            consumer = routes.consumer(stream.name)
            assert routes.leaves_loop(module.name, stream.name) == (
                not consumer or module.name not in _reachable(graph, consumer)
            )


def _blocks(plan: list[list[object]]) -> list[list[str]]:
    found: list[list[str]] = []
    for block in plan:
        if block[0] == "fork":
            found += [["plain", str(block[1])], ["plain", str(block[3])]]
            assert isinstance(block[2], list)
            found += _blocks(block[2])
        else:
            found.append([str(part) for part in block])
    return found


def _reachable(graph: Graph, start: str) -> set[str]:
    edges, seen, waiting = successors(graph), {start}, [start]
    while waiting:
        for name in edges[waiting.pop()]:
            if name not in seen:
                seen.add(name)
                waiting.append(name)
    return seen


def _with(graph: Graph, *modules: ModuleSpec, first_outputs: tuple[StreamSpec, ...] = ()) -> Graph:
    first, *rest = graph.modules
    entered = ModuleSpec(first.name, first.inputs, (*first.outputs, *first_outputs), first.join)
    return msgspec.structs.replace(graph, modules=(entered, *rest, *modules))


X = StreamSpec("x", "tensors")


def _no_consumer(graph: Graph) -> Graph:
    return _with(graph, first_outputs=(X,))


def _no_producer(graph: Graph) -> Graph:
    return _with(graph, ModuleSpec("mx", (X,), (graph.exit,)))


def _two_consumers(graph: Graph) -> Graph:
    return _with(graph, ModuleSpec("mx", (graph.modules[0].inputs[0],), (graph.exit,)))


def _kind_mismatch(graph: Graph) -> Graph:
    other = StreamSpec(graph.modules[0].outputs[0].name, "other")
    return _with(graph, ModuleSpec("mx", (X,), (other,)))


def _loop_without_exit(graph: Graph) -> Graph:
    return _with(graph, ModuleSpec("mx", (X,), (X,)), first_outputs=(X,))


def _unreachable(graph: Graph) -> Graph:
    return _with(graph, ModuleSpec("mx", (X,), (X, graph.exit)))


def _dead_end(graph: Graph) -> Graph:
    return _with(graph, ModuleSpec("mx", (X,), ()), first_outputs=(X,))


def _missing_entry(graph: Graph) -> Graph:
    return msgspec.structs.replace(graph, entry=StreamSpec("gone", "tensors"))


def _missing_exit(graph: Graph) -> Graph:
    return msgspec.structs.replace(graph, exit=StreamSpec("gone", "tensors"))


def _duplicate(graph: Graph) -> Graph:
    return _with(graph, graph.modules[-1])


MUTATIONS: list[tuple[Callable[[Graph], Graph], Fault, str]] = [
    (_no_consumer, "no consumer", "x"),
    (_no_producer, "no producer", "x"),
    (_two_consumers, "two consumers", "mx"),
    (_kind_mismatch, "kind mismatch", ""),
    (_loop_without_exit, "loop without exit", "mx"),
    (_unreachable, "unreachable module", "mx"),
    (_dead_end, "dead end", "mx"),
    (_missing_entry, "missing entry", "gone"),
    (_missing_exit, "missing exit", "gone"),
    (_duplicate, "duplicate module", ""),
]


@pytest.mark.parametrize(("mutate", "fault", "name"), MUTATIONS, ids=[fault for _, fault, _ in MUTATIONS])
@settings(max_examples=25, deadline=None)
@given(PROGRAMS)
def test_mutated_programs_are_refused_by_the_right_name(
    mutate: Callable[[Graph], Graph], fault: Fault, name: str, made: RandomProgram
) -> None:
    graph = made.program().graph
    check(graph)
    with pytest.raises(GraphError) as caught:
        check(mutate(graph))
    assert [problem.fault for problem in caught.value.problems] == [fault]
    assert name in caught.value.problems[0].names or not name


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 9).flatmap(lambda n: st.lists(st.lists(st.integers(0, n - 1)), min_size=n, max_size=n)))
def test_components_are_the_modules_that_reach_one_another(rows: list[list[int]]) -> None:
    edges = {str(node): [str(other) for other in row] for node, row in enumerate(rows)}

    def reach(start: str) -> set[str]:
        seen, waiting = set(), list(edges[start])
        while waiting:
            node = waiting.pop()
            if node not in seen:
                seen.add(node)
                waiting += edges[node]
        return seen | {start}

    reached = {node: reach(node) for node in edges}
    expected = {frozenset(b for b in edges if b in reached[a] and a in reached[b]) for a in edges}
    found = components(edges)
    assert {frozenset(names) for names in found} == expected
    place = {name: number for number, names in enumerate(found) for name in names}
    assert all(place[b] <= place[a] for a in edges for b in edges[a]), "successors come first"
