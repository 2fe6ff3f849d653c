"""Whether a graph can work: every fault by name, before anything runs. Pure.

Between `graph`, which holds the data, and everybody who takes a graph from somewhere: the program that is
being made, the bundle that is being read.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from keystage.streams.graph import Graph, ModuleSpec, StreamSpec, components, successors

Fault: TypeAlias = Literal[
    "no modules",
    "bad name",
    "duplicate module",
    "duplicate stream",
    "kind mismatch",
    "missing entry",
    "missing exit",
    "two consumers",
    "no consumer",
    "no producer",
    "loop without exit",
    "join in a loop",
    "unreachable module",
    "dead end",
]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault of a graph.

    Attributes:
        fault: which.
        names: the modules or streams at fault.
        text: a sentence that names them.
    """

    fault: Fault
    names: tuple[str, ...]
    text: str


class GraphError(Exception):
    """A graph that cannot work.

    Attributes:
        problems: what is wrong, at least one; those of the first kind that was found.
    """

    http_status = 422

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("; ".join(problem.text for problem in problems))
        self.problems = tuple(problems)


def check(graph: Graph) -> None:
    """Refuses a graph that cannot work.

    Raises:
        GraphError: names every fault of the first kind that was found (others may follow from it).
    """
    for look in (_names, _kinds, _ends, _channels, _loops, _joins, _reach):
        problems = list(look(graph))
        if problems:
            raise GraphError(problems)


def _names(graph: Graph) -> Iterator[Problem]:
    if not graph.modules:
        yield Problem("no modules", (), "the program has no modules")
    for name in dict.fromkeys([*(m.name for m in graph.modules), *(s.name for s, _ in _mentions(graph))]):
        if not _NAME.fullmatch(name):
            yield Problem(
                "bad name", (name,), f"name {name!r} must be letters, digits, '_', '.', '-', at most 63"
            )
    for name, count in Counter(module.name for module in graph.modules).items():
        if count > 1:
            yield Problem("duplicate module", (name,), f"module {name} is there {count} times")
    for module in graph.modules:
        for side, streams in (("inputs", module.inputs), ("outputs", module.outputs)):
            for name, count in Counter(stream.name for stream in streams).items():
                if count > 1:
                    yield Problem(
                        "duplicate stream",
                        (module.name, name),
                        f"module {module.name} has stream {name} {count} times among its {side}",
                    )


def _kinds(graph: Graph) -> Iterator[Problem]:
    first: dict[str, tuple[str, str]] = {}
    for stream, place in _mentions(graph):
        kind, other = first.setdefault(stream.name, (stream.kind, place))
        if stream.kind != kind:
            yield Problem(
                "kind mismatch",
                (stream.name,),
                f"stream {stream.name} carries {kind!r} for {other} and {stream.kind!r} for {place}",
            )


def _ends(graph: Graph) -> Iterator[Problem]:
    entry, leave = graph.entry.name, graph.exit.name
    if entry == leave:
        yield Problem("missing exit", (leave,), f"stream {entry} is both entry and exit")
    if entry not in _consumed(graph):
        yield Problem("missing entry", (entry,), f"no module consumes the entry, stream {entry}")
    if leave not in _produced(graph):
        yield Problem("missing exit", (leave,), f"no module puts anything on the exit, stream {leave}")


def _channels(graph: Graph) -> Iterator[Problem]:
    consumed, produced = _consumed(graph), _produced(graph)
    for stream, modules in consumed.items():
        readers = [*modules, *(["the caller, as the exit"] if stream == graph.exit.name else [])]
        if len(readers) > 1:
            yield Problem(
                "two consumers",
                (stream, *modules),
                f"stream {stream} has {len(readers)} consumers: {', '.join(readers)}",
            )
        if stream not in produced and stream != graph.entry.name:
            yield Problem(
                "no producer",
                (stream, *modules),
                f"module {modules[0]} waits for stream {stream}, on which nobody puts anything",
            )
    for stream, modules in produced.items():
        if stream not in consumed and stream != graph.exit.name:
            yield Problem(
                "no consumer",
                (stream, *modules),
                f"module {modules[0]} puts messages on stream {stream}, which nobody consumes",
            )


def _loops(graph: Graph) -> Iterator[Problem]:
    edges = successors(graph)
    outputs = {module.name: module.outputs for module in graph.modules}
    for names in components(edges):
        if len(names) == 1 and names[0] not in edges[names[0]]:
            continue
        inside = {following for name in names for following in edges[name]} <= set(names)
        if inside and not any(s.name == graph.exit.name for name in names for s in outputs[name]):
            yield Problem("loop without exit", tuple(names), f"no stream leaves the loop of {_listed(names)}")


def _joins(graph: Graph) -> Iterator[Problem]:
    """A join in a loop must get all its inputs in every round, and all or none from outside."""
    produced = _produced(graph)
    for names in components(successors(graph)):
        loop = set(names)
        for module in (m for m in graph.modules if m.name in loop and m.join == "all" and len(m.inputs) > 1):
            inner = [s.name for s in module.inputs if loop & set(produced.get(s.name, ()))]
            outer = [s.name for s in module.inputs if _is_from_outside(graph, s, produced, loop)]
            if not inner:
                continue  # in no loop
            lacking = [s.name for s in module.inputs if s.name not in inner]
            if lacking:
                yield Problem(
                    "join in a loop",
                    (module.name, *lacking),
                    f"module {module.name} joins all its inputs in every round of its loop, "
                    f"but stream {lacking[0]} comes only from outside the loop",
                )
            elif outer and len(outer) < len(module.inputs):
                lacking = [s.name for s in module.inputs if s.name not in outer]
                yield Problem(
                    "join in a loop",
                    (module.name, *lacking),
                    f"module {module.name} joins all its inputs when a request enters its loop by stream "
                    f"{outer[0]}, but stream {lacking[0]} comes only from inside the loop",
                )


def _is_from_outside(
    graph: Graph, stream: StreamSpec, produced: Mapping[str, Sequence[str]], loop: set[str]
) -> bool:
    return stream.name == graph.entry.name or bool(set(produced.get(stream.name, ())) - loop)


def _reach(graph: Graph) -> Iterator[Problem]:
    edges = successors(graph)
    starts = [m.name for m in graph.modules if graph.entry.name in {s.name for s in m.inputs}]
    ends = [m.name for m in graph.modules if graph.exit.name in {s.name for s in m.outputs}]
    backwards: dict[str, list[str]] = {name: [] for name in edges}
    for name, following in edges.items():
        for other in following:
            backwards[other].append(name)
    reached, leading = _closure(starts, edges), _closure(ends, backwards)
    for module in graph.modules:
        if module.name not in reached:
            yield Problem(
                "unreachable module",
                (module.name,),
                f"module {module.name} cannot be reached from the entry, stream {graph.entry.name}",
            )
        elif module.name not in leading:
            yield Problem(
                "dead end",
                (module.name,),
                f"no way leads from module {module.name} to the exit, stream {graph.exit.name}",
            )


def _closure(starts: Iterable[str], edges: Mapping[str, Sequence[str]]) -> set[str]:
    seen = set(starts)
    waiting = list(seen)
    while waiting:
        new = set(edges[waiting.pop()]) - seen
        seen |= new
        waiting.extend(new)
    return seen


def _mentions(graph: Graph) -> Iterator[tuple[StreamSpec, str]]:
    """Every place where a stream is named, and whose it is."""
    yield graph.entry, "the entry"
    for module in graph.modules:
        for stream in (*module.inputs, *module.outputs):
            yield stream, f"module {module.name}"
    yield graph.exit, "the exit"


def _consumed(graph: Graph) -> dict[str, list[str]]:
    return _by_stream((stream, module) for module in graph.modules for stream in module.inputs)


def _produced(graph: Graph) -> dict[str, list[str]]:
    return _by_stream((stream, module) for module in graph.modules for stream in module.outputs)


def _by_stream(pairs: Iterable[tuple[StreamSpec, ModuleSpec]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for stream, module in pairs:
        found.setdefault(stream.name, []).append(module.name)
    return found


def _listed(names: Sequence[str]) -> str:
    return f"module {names[0]}" if len(names) == 1 else f"modules {', '.join(names)}"
