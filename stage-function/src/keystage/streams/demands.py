"""What a stream program needs, as `streams.allocate` takes it: from its graph and its profiles. Pure.

Before it: `streams.graph` (who feeds whom), measured profiles, executions counted over requests served so far
(`streams.flow` counts them), and the request's SLO where modules state no partial one. After it: `allocate`,
`colocate`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from keystage.batching.partial_slo import partial_slos_s
from keystage.batching.profile import LatencyProfile
from keystage.streams.graph import Graph, Routes
from keystage.streams.placement import Edge, Module

Profiles = Mapping[tuple[str, int], LatencyProfile]
"""L(b) by (device type, number of devices one copy is spread over)."""


class DemandError(ValueError):
    """Something about a module that is needed and not known; names the module."""


def demands(
    graph: Graph,
    profiles: Mapping[str, Profiles],
    executions: Mapping[str, float],
    module_bytes: Mapping[str, int],
    slo_s: float = 0.0,
    item_s: Mapping[str, float] | None = None,
) -> tuple[list[Module], list[Edge]]:
    """Modules and streams of a program.

    Args:
        graph: has passed `graph_checks.check`.
        profiles: by module name.
        executions: mean executions a request, by module name; above 0.
        module_bytes: memory of one copy, by module name.
        slo_s: of a request; divided along its path where a module states no partial SLO.
        item_s: seconds that a message takes to another device, by stream name; missing ones take none.

    Returns:
        Modules in the order of the graph, and the streams between two of them. A message of a stream is
        supposed to cross once for each execution of whichever of its two modules runs less often.

    Raises:
        DemandError: a module has no profile, no executions, or neither a partial SLO nor a share of one.
    """
    for spec in graph.modules:
        if not profiles.get(spec.name):
            raise DemandError(
                f"module {spec.name!r} has no profile; measure it on the types of devices there are"
            )
        if not executions.get(spec.name, 0.0) > 0:
            raise DemandError(
                f"module {spec.name!r} needs executions above 0 a request, it has {executions.get(spec.name)}"
            )
    shares = _shares(graph, profiles, executions, slo_s)
    modules = [
        Module(
            spec.name,
            share_s,
            executions[spec.name],
            module_bytes.get(spec.name, 0),
            profiles[spec.name],
        )
        for spec, share_s in zip(graph.modules, shares, strict=True)
    ]
    routes = Routes(graph)
    edges = []
    for index, spec in enumerate(graph.modules):
        for stream in spec.outputs:
            name = routes.consumer(stream.name)
            if name and routes.stage_of[name] != index:
                crossings = min(executions[spec.name], executions[name])
                cost_s = (item_s or {}).get(stream.name, 0.0)
                edges.append(Edge(index, routes.stage_of[name], cost_s, crossings))
    return modules, edges


def _shares(
    graph: Graph, profiles: Mapping[str, Profiles], executions: Mapping[str, float], slo_s: float
) -> Sequence[float]:
    """Partial SLO of each module: its own, else what its service time is of the request's."""
    stated = [spec.partial_slo_s for spec in graph.modules]
    if all(share_s > 0 for share_s in stated):
        return stated
    if slo_s <= 0:
        missing = next(spec.name for spec in graph.modules if spec.partial_slo_s <= 0)
        raise DemandError(f"module {missing!r} states no partial SLO, and the request has none to divide")
    services = [min(p.latency_s(1) for p in profiles[spec.name].values()) for spec in graph.modules]
    visits = [executions[spec.name] for spec in graph.modules]
    divided = partial_slos_s(slo_s, services, visits)
    return [own if own > 0 else share for own, share in zip(stated, divided, strict=True)]
