"""A program's graph and profiles as modules and edges for allocation."""

import pytest

from keystage.batching.profile import LatencyProfile
from keystage.streams.allocate import allocate
from keystage.streams.demands import DemandError, demands
from keystage.streams.graph import Graph, ModuleSpec, StreamSpec
from keystage.streams.placement import Device, Edge

TEXT, LATENT, DONE, IMAGE = (StreamSpec(name, "latent") for name in ("text", "latent", "done", "image"))
GRAPH = Graph(
    TEXT,
    IMAGE,
    (
        ModuleSpec("clip", (TEXT,), (LATENT,)),
        ModuleSpec("unet", (LATENT,), (LATENT, DONE), is_stateful=True),
        ModuleSpec("vae", (DONE,), (IMAGE,)),
    ),
)
PROFILES = {
    "clip": {("gpu", 1): LatencyProfile(0.0, 0.01)},
    "unet": {("gpu", 1): LatencyProfile(0.01, 0.02)},
    "vae": {("gpu", 1): LatencyProfile(0.04, 0.04)},
}
EXECUTIONS = {"clip": 1.0, "unet": 40.0, "vae": 1.0}
BYTES = {"unet": 2**30}


def test_the_request_s_slo_is_divided_by_service_time_and_executions():
    modules, edges = demands(GRAPH, PROFILES, EXECUTIONS, BYTES, slo_s=2.58, item_s={"done": 0.005})
    assert [m.name for m in modules] == ["clip", "unet", "vae"]
    assert [m.slo_s for m in modules] == pytest.approx([0.02, 0.06, 0.16])
    assert [m.bytes for m in modules] == [0, 2**30, 0]
    # The loop's own stream is no edge, nor is the exit.
    assert edges == [Edge(0, 1, 0.0, 1.0), Edge(1, 2, 0.005, 1.0)]
    found = allocate(modules, [Device("gpu0", "gpu", 16, 24 * 2**30)], edges=edges)
    assert sum(found.spus) + found.left == 16


def test_stated_partial_slos_are_kept():
    graph = Graph(
        TEXT,
        IMAGE,
        tuple(
            ModuleSpec(m.name, m.inputs, m.outputs, partial_slo_s=s)
            for m, s in zip(GRAPH.modules, (0.1, 0.2, 0.3), strict=True)
        ),
    )
    modules, _ = demands(graph, PROFILES, EXECUTIONS, BYTES)
    assert [m.slo_s for m in modules] == [0.1, 0.2, 0.3]
    mixed = Graph(TEXT, IMAGE, (graph.modules[0], *GRAPH.modules[1:]))
    modules, _ = demands(mixed, PROFILES, EXECUTIONS, BYTES, slo_s=2.58)
    assert [m.slo_s for m in modules] == pytest.approx([0.1, 0.06, 0.16])


@pytest.mark.parametrize(
    ("profiles", "executions", "text"),
    [
        ({**PROFILES, "vae": {}}, EXECUTIONS, "module 'vae' has no profile"),
        (
            PROFILES,
            {**EXECUTIONS, "unet": 0.0},
            "'unet' needs executions above 0 a request, it has 0.0",
        ),
        (
            PROFILES,
            {"clip": 1.0, "unet": 40.0},
            "'vae' needs executions above 0 a request, it has None",
        ),
        (PROFILES, EXECUTIONS, "module 'clip' states no partial SLO, and the request has none to divide"),
    ],
)
def test_what_is_not_known_is_named(profiles, executions, text):
    with pytest.raises(DemandError, match=text):
        demands(GRAPH, profiles, executions, BYTES)
