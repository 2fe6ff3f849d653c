"""The graph of a stream program in plain data: modules, streams, loops. Pure; no torch.

Made from a `keystage.streams.api.Program`, written into `pipeline.json`, and read by the router, which asks
`Routes` for each message: who consumes the stream it was put on, does its request leave a loop, is it the
exit. `graph_checks` says whether a graph can work at all. What a module computes is not known here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import msgspec

Join: TypeAlias = Literal["any", "all"]
"""What a module with several input streams waits for: a message of any of them, or one of each."""

MOST_STEPS = 100_000
"""Module executions after which a request is given up: a loop that it never leaves."""


class StreamSpec(msgspec.Struct, frozen=True):
    """A named channel between modules.

    Attributes:
        name: unique in a program.
        kind: name of the type of its messages; both ends must state the same.
    """

    name: str
    kind: str


class ModuleSpec(msgspec.Struct, frozen=True):
    """A module as the graph sees it.

    Attributes:
        name: unique in a program.
        inputs: streams it consumes; nobody else does.
        outputs: streams it may put messages on.
        join: with `all` it takes one message of each input stream of a request at a time.
        is_stateful: whether it keeps something of a request between visits, which binds the request to a
            replica.
        partial_slo_s: the module's share of a request's SLO, each time it passes; 0: none stated.
    """

    name: str
    inputs: tuple[StreamSpec, ...]
    outputs: tuple[StreamSpec, ...]
    join: Join = "any"
    is_stateful: bool = False
    partial_slo_s: float = 0.0


class Graph(msgspec.Struct, frozen=True):
    """A stream program without its code.

    Attributes:
        entry: where requests come in.
        exit: where answers leave; consumed by no module.
        modules: in the order of the program; the position of a module is the index of its stage.
        most_steps: module executions after which a request is refused.
    """

    entry: StreamSpec
    exit: StreamSpec
    modules: tuple[ModuleSpec, ...]
    most_steps: int = MOST_STEPS


class ProgramReference(msgspec.Struct, frozen=True):
    """Where the code of a program is.

    Attributes:
        path: `package.module:function`; the function returns a `keystage.streams.api.Program`.
        options: keyword arguments of the function, JSON values.
    """

    path: str
    options: dict[str, Any] = {}


class Routes:
    """Look-ups in a graph that has passed `graph_checks.check`.

    A *loop* is a strongly connected component: the modules that can reach one another. A module that
    is in no loop is alone in its component, and what holds for leaving a loop holds for leaving it.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.modules: Mapping[str, ModuleSpec] = {module.name: module for module in graph.modules}
        self.stage_of: Mapping[str, int] = {module.name: i for i, module in enumerate(graph.modules)}
        self._consumers = {s.name: module.name for module in graph.modules for s in module.inputs}
        self._components = components(successors(graph))
        self._upstream = upstreams(successors(graph))
        self._component_of = {name: number for number, names in enumerate(self._components) for name in names}

    def consumer(self, stream: str) -> str:
        """The module that consumes a stream; empty for the exit.

        Raises:
            KeyError: no such stream.
        """
        return "" if self.is_exit(stream) else self._consumers[stream]

    def is_exit(self, stream: str) -> bool:
        """Whether a message on this stream is an answer."""
        return stream == self.graph.exit.name

    def has_output(self, module: str, stream: str) -> bool:
        """Whether a module may put messages on a stream."""
        return any(output.name == stream for output in self.modules[module].outputs)

    def region(self, module: str) -> Sequence[str]:
        """The modules of its loop, or the module alone."""
        return self._components[self._component_of[module]]

    def upstream(self, module: str) -> frozenset[str]:
        """The modules from which a message can come to this one, and the module itself."""
        return self._upstream[module]

    def is_loop(self, module: str) -> bool:
        """Whether a message can come back to the module."""
        outputs = {output.name for output in self.modules[module].outputs}
        return len(self.region(module)) > 1 or any(
            stream.name in outputs for stream in self.modules[module].inputs
        )

    def leaves_loop(self, module: str, stream: str) -> bool:
        """Whether a message that the module puts on the stream has left the module's loop for good.

        True of every output of a module that is in no loop, and of the exit.
        """
        consumer = self.consumer(stream)
        return not consumer or self._component_of[consumer] != self._component_of[module]


def successors(graph: Graph) -> dict[str, list[str]]:
    """The modules that each module may send to, in order, without repetition."""
    consumers = {stream.name: module.name for module in graph.modules for stream in module.inputs}
    return {
        module.name: list(dict.fromkeys(consumers[s.name] for s in module.outputs if s.name in consumers))
        for module in graph.modules
    }


def upstreams(edges: Mapping[str, Sequence[str]]) -> dict[str, frozenset[str]]:
    """For every node the nodes from which it can be reached, itself included."""
    found: dict[str, set[str]] = {name: {name} for name in edges}
    for name in edges:
        waiting = [name]
        seen: set[str] = set()
        while waiting:
            for following in edges[waiting.pop()]:
                if following not in seen:
                    seen.add(following)
                    found[following].add(name)
                    waiting.append(following)
    return {name: frozenset(names) for name, names in found.items()}


def components(edges: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Strongly connected components, by Tarjan's algorithm without recursion.

    Args:
        edges: successors of every node; each is a key too.

    Returns:
        Each component in the order of `edges`, successors' components first.
    """
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    is_open: set[str] = set()
    found: list[list[str]] = []
    for root in edges:
        if root in number:
            continue
        path: list[tuple[str, Iterator[str]]] = [_enter(root, edges, number, low, stack, is_open)]
        while path:
            node, rest = path[-1]
            following = next(rest, None)
            if following is None:
                path.pop()
                if path:
                    low[path[-1][0]] = min(low[path[-1][0]], low[node])
                if low[node] == number[node]:
                    found.append(_close(node, stack, is_open, number))
            elif following not in number:
                path.append(_enter(following, edges, number, low, stack, is_open))
            elif following in is_open:
                low[node] = min(low[node], number[following])
    order = {name: place for place, name in enumerate(edges)}
    return [sorted(names, key=order.__getitem__) for names in found]


def _enter(
    node: str,
    edges: Mapping[str, Sequence[str]],
    number: dict[str, int],
    low: dict[str, int],
    stack: list[str],
    is_open: set[str],
) -> tuple[str, Iterator[str]]:
    number[node] = low[node] = len(number)
    stack.append(node)
    is_open.add(node)
    return node, iter(edges[node])


def _close(node: str, stack: list[str], is_open: set[str], number: Mapping[str, int]) -> list[str]:
    names: list[str] = []
    while stack and number[stack[-1]] >= number[node]:
        names.append(stack.pop())
    is_open.difference_update(names)
    return names
