"""Whether a world can be: every bound, with the thing's name and its value.

Before it: a described world. After it: `platform` builds it. It repairs nothing.
"""

from __future__ import annotations

import math

from keystage.simulator.api import NodeSpec, PipelineSpec, StageSpec, World
from keystage.simulator.errors import WorldError


def check_world(world: World) -> None:
    """Refuses a world that cannot be.

    Raises:
        WorldError: what is wrong, with the bound and the value.
    """
    _positive("duration_s", world.duration_s)
    _positive("tick_s", world.tick_s)
    _positive("limit_s", world.limit_s)
    for name in ("hop_s", "network_s", "network_bps", "warm_s"):
        _not_negative(name, getattr(world, name))
    for name in ("fixed_s", "gpu_bps", "memory_bps", "disk_bps", "remote_bps", "spread_s", "key_stages"):
        _not_negative(f"load.{name}", getattr(world.load, name))
    for i, node in enumerate(world.nodes):
        for name in ("count", "gpus", "gpu_bytes", "cores", "memory_bytes"):
            _not_negative(f"nodes[{i}].{name}", getattr(node, name))
    names = [p.name for p in world.pipelines]
    if len(set(names)) < len(names):
        raise WorldError(f"pipelines must have different names, not {names}")
    for pipeline in world.pipelines:
        _check_pipeline(world, pipeline)
    _check_sources(world)
    _check_failures(world)


def _check_pipeline(world: World, pipeline: PipelineSpec) -> None:
    where = f"pipeline {pipeline.name}"
    if not pipeline.name or not pipeline.stages:
        raise WorldError(f"{where}: needs a name and at least one stage, has {len(pipeline.stages)}")
    _not_negative(f"{where}: arrivals.rate_rps", pipeline.arrivals.rate_rps)
    _not_negative(f"{where}: arrivals.cv", pipeline.arrivals.cv)
    _not_negative(f"{where}: arrivals.count", pipeline.arrivals.count)
    times = pipeline.arrivals.times_s or ()
    for before, after in zip((0.0, *times), times, strict=False):
        if not 0 <= before <= after < math.inf:
            raise WorldError(f"{where}: arrivals.times_s must ascend from 0, {after} follows {before}")
    if pipeline.slots < 1 or not pipeline.steps >= 1 or not math.isfinite(pipeline.steps):
        raise WorldError(
            f"{where}: slots and steps must be at least 1, not {pipeline.slots}, {pipeline.steps}"
        )
    for k, stage in enumerate(pipeline.stages):
        _check_stage(world, f"{where} stage {k}", stage)
        if pipeline.execution == "looping" and (stage.after is not None or stage.shared):
            raise WorldError(
                f"{where} stage {k}: stages of a looping pipeline are a chain on GPUs of their own"
            )
    predecessors(pipeline)


def _check_stage(world: World, where: str, stage: StageSpec) -> None:
    for name in ("alpha_s", "beta_s", "scv", "cpu_core_s", "parameter_bytes", "gpus", "activation_bytes"):
        _not_negative(f"{where}: {name}", getattr(stage, name))
    for name in ("cores", "most_cores", "most"):
        _positive(f"{where}: {name}", getattr(stage, name))
    if not 0 <= stage.min_replicas <= stage.max_replicas:
        raise WorldError(f"{where}: min_replicas {stage.min_replicas} .. max_replicas {stage.max_replicas}")
    _not_negative(f"{where}: replicas", stage.replicas)
    if world.nodes and not any(_fits(node, stage) for node in world.nodes):
        need_bytes = -(-stage.parameter_bytes // max(1, stage.gpus))
        raise WorldError(
            f"{where}: no node has {stage.gpus} GPUs of at least {need_bytes} bytes and {stage.cores} cores; "
            f"the largest has {max(n.gpus for n in world.nodes)} GPUs of "
            f"{max(n.gpu_bytes for n in world.nodes)} bytes and {max(n.cores for n in world.nodes)} cores"
        )


def _fits(node: NodeSpec, stage: StageSpec) -> bool:
    if node.count < 1 or node.gpus < stage.gpus or node.cores < stage.cores:
        return False
    return not stage.gpus or node.gpu_bytes * stage.gpus >= stage.parameter_bytes


def _check_sources(world: World) -> None:
    load = world.load
    has_rates = any((load.gpu_bps, load.memory_bps, load.disk_bps, load.remote_bps))
    in_memory = load.memory_bps > 0 and load.holders == "all"
    for i, node in enumerate(world.nodes):
        on_disk = node.disk and load.disk_bps > 0
        if has_rates and not (on_disk or in_memory or load.remote_bps > 0):
            raise WorldError(
                f"nodes[{i}]: parameters have no source (disk={node.disk}, disk_bps={load.disk_bps}, "
                f"remote_bps={load.remote_bps}, holders={load.holders}); give remote_bps"
            )


def _check_failures(world: World) -> None:
    functions = {f"{p.name}-stage-{k}" for p in world.pipelines for k in range(len(p.stages))}
    nodes = {f"node-{i}" for i in range(sum(n.count for n in world.nodes))}
    for i, failure in enumerate(world.failures):
        _not_negative(f"failures[{i}].at_s", failure.at_s)
        _not_negative(f"failures[{i}].for_s", failure.for_s)
        if bool(failure.function) == bool(failure.node):
            raise WorldError(f"failures[{i}]: needs either a function or a node")
        if failure.function and failure.function not in functions:
            raise WorldError(f"failures[{i}]: there is no function {failure.function}")
        if failure.node and failure.node not in nodes:
            raise WorldError(f"failures[{i}]: there is no node {failure.node}")


def predecessors(pipeline: PipelineSpec) -> list[tuple[int, ...]]:
    """Per stage the stages whose output it takes, in order; empty for those that take the request.

    Raises:
        WorldError: an index that is none, or a cycle.
    """
    count = len(pipeline.stages)
    found = [
        ((k - 1,) if k else ()) if stage.after is None else tuple(sorted(set(stage.after)))
        for k, stage in enumerate(pipeline.stages)
    ]
    for k, before in enumerate(found):
        for j in before:
            if not 0 <= j < count:
                raise WorldError(
                    f"pipeline {pipeline.name} stage {k}: after names {j}, stages are 0..{count - 1}"
                )
    done: set[int] = set()
    while len(done) < count:
        ready = [k for k in range(count) if k not in done and done.issuperset(found[k])]
        if not ready:
            rest = sorted(set(range(count)) - done)
            raise WorldError(f"pipeline {pipeline.name}: stages {rest} wait for each other (cycle in after)")
        done.update(ready)
    return found


def _positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise WorldError(f"{name} must be positive and finite, not {value}")


def _not_negative(name: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise WorldError(f"{name} must be 0 or more and finite, not {value}")
