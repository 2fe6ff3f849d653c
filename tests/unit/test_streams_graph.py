"""Graphs of stream programs: every fault by its name, look-ups, loops, plain data."""

from __future__ import annotations

import msgspec
import pytest

from keystage.streams.graph import Graph, Join, ModuleSpec, Routes, StreamSpec, components, successors
from keystage.streams.graph_checks import Fault, GraphError, check


def _graph(*modules: ModuleSpec, entry: str = "in", leave: str = "out") -> Graph:
    return Graph(_stream(entry), _stream(leave), modules)


def _stream(text: str) -> StreamSpec:
    name, _, kind = text.partition(":")
    return StreamSpec(name, kind or "tensors")


def _module(name: str, inputs: str, outputs: str, join: Join = "any") -> ModuleSpec:
    return ModuleSpec(
        name,
        tuple(map(_stream, inputs.split())),
        tuple(map(_stream, outputs.split())),
        join,
        is_stateful=True,
    )


DIFFUSION = _graph(
    _module("text", "in", "latent"),
    _module("denoiser", "latent", "latent done"),
    _module("decoder", "done", "out"),
)

BROKEN: list[tuple[Fault, str, Graph]] = [
    ("no modules", "no modules", _graph()),
    ("bad name", "'a b'", _graph(_module("a b", "in", "out"))),
    (
        "duplicate module",
        "module a is there 2 times",
        _graph(_module("a", "in", "s"), _module("a", "s", "out")),
    ),
    ("duplicate stream", "stream out 2 times", _graph(_module("a", "in", "out out"))),
    (
        "kind mismatch",
        "stream s carries 'latent' for module a and 'text' for module b",
        _graph(_module("a", "in", "s:latent"), _module("b", "s:text", "out")),
    ),
    ("missing entry", "no module consumes the entry, stream in", _graph(_module("a", "s", "out"))),
    ("missing exit", "no module puts anything on the exit, stream out", _graph(_module("a", "in", "s"))),
    ("missing exit", "both entry and exit", _graph(_module("a", "in", "in"), leave="in")),
    (
        "two consumers",
        "stream s has 2 consumers: b, c",
        _graph(_module("a", "in", "s"), _module("b", "s", "out"), _module("c", "s", "out")),
    ),
    (
        "two consumers",
        "the caller, as the exit",
        _graph(_module("a", "in", "out"), _module("b", "out", "out")),
    ),
    ("no producer", "module a waits for stream s", _graph(_module("a", "in s", "out"))),
    ("no consumer", "module a puts messages on stream s", _graph(_module("a", "in", "s out"))),
    (
        "loop without exit",
        "no stream leaves the loop of modules b, c",
        _graph(_module("a", "in", "s out"), _module("b", "s t", "u"), _module("c", "u", "t")),
    ),
    (
        "loop without exit",
        "no stream leaves the loop of module b",
        _graph(_module("a", "in", "s out"), _module("b", "s", "s")),
    ),
    (
        "unreachable module",
        "module b cannot be reached from the entry, stream in",
        _graph(_module("a", "in", "out"), _module("b", "s", "s out")),
    ),
    (
        "dead end",
        "no way leads from module b to the exit, stream out",
        _graph(_module("a", "in", "s out"), _module("b", "s", "")),
    ),
    (
        "join in a loop",
        "stream s comes only from outside the loop",
        _graph(_module("a", "in", "s t"), _module("b", "s t", "t out", "all")),
    ),
    (
        "join in a loop",
        "stream u comes only from inside the loop",
        _graph(_module("a", "in", "s"), _module("b", "s u", "s u out", "all")),
    ),
]


@pytest.mark.parametrize(("fault", "words", "graph"), BROKEN, ids=[f"{f}: {w[:30]}" for f, w, _ in BROKEN])
def test_what_cannot_work_is_refused_by_name(fault: Fault, words: str, graph: Graph) -> None:
    with pytest.raises(GraphError) as caught:
        check(graph)
    assert {problem.fault for problem in caught.value.problems} == {fault}
    assert words in str(caught.value)


def test_every_fault_has_an_example() -> None:
    from typing import get_args

    assert {fault for fault, _, _ in BROKEN} == set(get_args(Fault))


def test_all_faults_of_a_kind_are_named_at_once() -> None:
    with pytest.raises(GraphError) as caught:
        check(_graph(_module("a", "in", "out"), _module("b", "s", "s out"), _module("c", "t", "t out")))
    assert [problem.names for problem in caught.value.problems] == [("b",), ("c",)]


def test_a_join_in_a_loop_that_gets_all_its_inputs_in_each_round_is_fine() -> None:
    check(_graph(_module("a", "in", "s t"), _module("b", "s t", "s t out", "all")))


def test_routes_of_the_diffusion_graph() -> None:
    check(DIFFUSION)
    routes = Routes(DIFFUSION)
    assert [routes.consumer(name) for name in ("in", "latent", "done", "out")] == [
        "text", "denoiser", "decoder", "",
    ]  # fmt: skip
    assert routes.stage_of == {"text": 0, "denoiser": 1, "decoder": 2}
    assert [routes.is_loop(name) for name in routes.stage_of] == [False, True, False]
    assert not routes.leaves_loop("denoiser", "latent")
    assert routes.leaves_loop("denoiser", "done")
    assert routes.leaves_loop("text", "latent")
    assert routes.leaves_loop("decoder", "out")
    assert routes.has_output("text", "latent")
    assert not routes.has_output("text", "done")
    assert routes.upstream("denoiser") == {"text", "denoiser"}
    assert routes.upstream("text") == {"text"}


def test_a_loop_of_several_modules_is_one_region() -> None:
    graph = _graph(
        _module("a", "in", "s"),
        _module("b", "s", "t"),
        _module("c", "t", "s u"),
        _module("d", "u", "out"),
    )
    check(graph)
    routes = Routes(graph)
    assert list(routes.region("b")) == ["b", "c"]
    assert not routes.leaves_loop("b", "t")
    assert routes.leaves_loop("c", "u")
    assert components(successors(graph)) == [["d"], ["b", "c"], ["a"]]


def test_a_graph_is_plain_data() -> None:
    encoded = msgspec.json.encode(DIFFUSION)
    assert msgspec.json.decode(encoded, type=Graph) == DIFFUSION
    assert hash(DIFFUSION) == hash(msgspec.json.decode(encoded, type=Graph))
