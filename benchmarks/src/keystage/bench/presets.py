"""Worlds by name for `keystage simulate`: a small demonstration, and the cells of the paper experiment.

Before it: `paper_world`, `paper_cells`. After it: the command line. A preset is the cell of `--full`,
with the terms that its table gives the policy.
"""

from __future__ import annotations

import numpy as np

from keystage.bench.config import BenchSettings
from keystage.bench.paper_arrivals import achieved_cv, bursty, load_trace
from keystage.bench.paper_cells import FULL, Cell, times_s
from keystage.bench.paper_models import MODELS
from keystage.bench.paper_policies import Traffic, policy
from keystage.bench.paper_world import Table, Terms, paper_world
from keystage.controller.domain.snapshot import Slo
from keystage.simulator.api import ArrivalSpec, LoadSpec, NodeSpec, PipelineSpec, StageSpec, World

DEMO = "demo"
DEMO_MODEL = 200
"""Arrivals of its own, apart from those of the five models."""


def presets() -> dict[str, str]:
    """Names and what they are."""
    found = {DEMO: "four stages, the third a key stage, CV 4, starts of half a second, two servers"}
    for cell in FULL.cells():
        what = "the trace" if cell.load == "trace" else f"arrivals of CV {cell.cv:g}"
        found[_name(cell)] = f"{cell.of.name} alone on the paper's cluster, {what}, {cell.duration_s:g} s"
    return found


def preset_world(name: str, policy_name: str, seed: int, table: Table) -> World:
    """A preset's world.

    Args:
        name: of `presets`.
        policy_name: who will steer: INFless sees whole models, Keystage caches key stages.
        seed: of the arrivals.
        table: A or B.

    Raises:
        KeyError: no such preset.
        PaperTraceError: the traces folder was named and cannot be used.
    """
    if name == DEMO:
        return demo_world(seed)
    cell = {_name(c): c for c in FULL.cells()}[name]
    trace = load_trace(len(MODELS), BenchSettings().trace_folder)
    terms = Terms(table) if policy_name == "none" else policy(policy_name).terms(table)
    return paper_world(cell.of, times_s(cell, trace, seed), cell.slo_ratio, terms, cell.warm_s)


def demo_world(seed: int) -> World:
    """A burst every now and then, and a stage that is twice as slow as the others."""
    times = bursty(30.0, 4.0, 3600, DEMO_MODEL, seed)
    stages = tuple(
        StageSpec(
            alpha_s=0.6 * service_s,
            beta_s=0.4 * service_s,
            most=4,
            scv=0.1,
            parameter_bytes=2_000_000_000,
            gpus=1,
            activation_bytes=1_000_000,
            max_replicas=8,
        )
        for service_s in (0.02, 0.02, 0.04, 0.02)
    )
    return World(
        pipelines=(
            PipelineSpec(
                name="demo",
                stages=stages,
                arrivals=ArrivalSpec(times_s=tuple(times.tolist())),
                slo=Slo(deadline_s=0.5),
            ),
        ),
        nodes=(NodeSpec(count=2, gpus=8, gpu_bytes=24_000_000_000),),
        load=LoadSpec(fixed_s=0.2, memory_bps=6.75e9, disk_bps=1e9, holders="key-stages"),
        hop_s=0.0001,
        network_s=0.0005,
        duration_s=float(times[-1]),
        limit_s=float(times[-1]) + 600,
        budget_replicas=16,
    )


def traffic(world: World) -> list[Traffic]:
    """Rate and CV of each pipeline's arrivals, for the policy that is told them."""
    found = []
    for pipeline in world.pipelines:
        spec = pipeline.arrivals
        if spec.times_s:
            span_s = max(spec.times_s[-1], 1e-9)
            cv = achieved_cv(np.asarray(spec.times_s))
            found.append(Traffic(pipeline.name, len(spec.times_s) / span_s, cv))
        elif spec.rate_rps > 0:
            found.append(Traffic(pipeline.name, spec.rate_rps, spec.cv))
    return found


def _name(cell: Cell) -> str:
    load = "trace" if cell.load == "trace" else f"cv{cell.cv:g}"
    return f"paper-{cell.of.name.split('-')[0].lower()}-{load}"
