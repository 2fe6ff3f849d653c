"""Whether a world can be: every bound, with the thing's name and its value.

Before it: a described world. After it: `platform` builds it. It repairs nothing.
"""

from __future__ import annotations

import math

from keystage.batching.choice import parse_batching
from keystage.simulator.api import ArrivalSpec, NodeSpec, PipelineSpec, StageSpec, World
from keystage.simulator.errors import WorldError

MOST_S = 1e9
"""Longest run, and the latest moment of anything in it."""
MOST_STEP_S = 1e6
"""Longest service, start without parameters, or hop: more would outlast any run that is of use."""
MOST_TICKS = 1e8
MOST_ARRIVALS = 5e7
"""Requests of a pipeline; each takes some hundred bytes."""
MOST_CV = 100.0
MOST_STEPS = 1e6
MOST_NODES = 100_000
MOST_GPUS = 1_000
MOST_REPLICAS = 100_000
MOST_STAGES = 1_000
MOST_BATCH = 1_000_000
MOST_BYTES = 1e18
LEAST_CORES = 0.01
"""As little as container quotas grant."""
MOST_SPREAD_S = 5.0


def check_world(world: World) -> None:
    """Refuses a world that cannot be, or that no machine could run.

    Raises:
        WorldError: what is wrong, with the bound and the value.
    """
    _positive("duration_s", world.duration_s)
    _positive("tick_s", world.tick_s)
    _positive("limit_s", world.limit_s)
    _at_most("duration_s", world.duration_s, MOST_S)
    _at_most("limit_s", world.limit_s, MOST_S)
    _at_most("duration_s / tick_s", world.duration_s / world.tick_s, MOST_TICKS)
    for name in ("hop_s", "network_s"):
        _within(name, getattr(world, name), MOST_STEP_S)
    _rate("network_bps", world.network_bps)
    _within("warm_s", world.warm_s, MOST_S)
    if world.budget_replicas is not None:
        _not_negative("budget_replicas", world.budget_replicas)
    _within("load.fixed_s", world.load.fixed_s, MOST_STEP_S)
    for name in ("gpu_bps", "memory_bps", "disk_bps", "remote_bps"):
        _rate(f"load.{name}", getattr(world.load, name))
    _within("load.spread_s", world.load.spread_s, MOST_SPREAD_S)
    _not_negative("load.key_stages", world.load.key_stages)
    for i, node in enumerate(world.nodes):
        for name, most in (("count", MOST_NODES), ("gpus", MOST_GPUS), ("gpu_bytes", MOST_BYTES)):
            _within(f"nodes[{i}].{name}", getattr(node, name), most)
        for name in ("cores", "memory_bytes"):
            _within(f"nodes[{i}].{name}", getattr(node, name), MOST_BYTES)
    _at_most("nodes in all", sum(node.count for node in world.nodes), MOST_NODES)
    names = [p.name for p in world.pipelines]
    if len(set(names)) < len(names):
        raise WorldError(f"pipelines must have different names, not {names}")
    for pipeline in world.pipelines:
        _check_pipeline(world, pipeline)
    _check_warm(world)
    _check_sources(world)
    _check_failures(world)


def _check_pipeline(world: World, pipeline: PipelineSpec) -> None:
    where = f"pipeline {pipeline.name}"
    if not pipeline.name or not pipeline.stages:
        raise WorldError(f"{where}: needs a name and at least one stage, has {len(pipeline.stages)}")
    _at_most(f"{where}: stages", len(pipeline.stages), MOST_STAGES)
    _check_arrivals(world, where, pipeline.arrivals)
    if pipeline.slots < 1 or not pipeline.steps >= 1 or not math.isfinite(pipeline.steps):
        raise WorldError(
            f"{where}: slots and steps must be at least 1, not {pipeline.slots}, {pipeline.steps}"
        )
    _at_most(f"{where}: slots", pipeline.slots, MOST_BATCH)
    _at_most(f"{where}: steps", pipeline.steps, MOST_STEPS)
    for name in ("deadline_s", "ttft_s", "tpot_s"):
        stated = getattr(pipeline.slo, name)
        if stated is not None:
            _positive(f"{where}: slo.{name}", stated)
    for k, stage in enumerate(pipeline.stages):
        _check_stage(world, f"{where} stage {k}", stage)
        if pipeline.execution == "looping" and (stage.after is not None or stage.shared):
            raise WorldError(
                f"{where} stage {k}: stages of a looping pipeline are a chain on GPUs of their own"
            )
        if pipeline.execution == "looping" and stage.batching != "eager":
            raise WorldError(
                f"{where} stage {k}: batching is for single-pass pipelines, a looping one steps in waves; "
                f"it is {stage.batching}"
            )
    predecessors(pipeline)


def _check_arrivals(world: World, where: str, arrivals: ArrivalSpec) -> None:
    _not_negative(f"{where}: arrivals.rate_rps", arrivals.rate_rps)
    _not_negative(f"{where}: arrivals.cv", arrivals.cv)
    _at_most(f"{where}: arrivals.cv", arrivals.cv, MOST_CV)
    _not_negative(f"{where}: arrivals.count", arrivals.count)
    times = arrivals.times_s or ()
    for before, after in zip((0.0, *times), times, strict=False):
        if not 0 <= before <= after < math.inf:
            raise WorldError(f"{where}: arrivals.times_s must ascend from 0, {after} follows {before}")
    expected = float(arrivals.count or arrivals.rate_rps * world.duration_s)
    if arrivals.times_s is not None:
        expected = len(times)
    _at_most(f"{where}: arrivals expected", expected, MOST_ARRIVALS)
    _at_most(f"{where}: arrivals end (s)", _end_s(world, arrivals), MOST_S)


def _end_s(world: World, arrivals: ArrivalSpec) -> float:
    """When arrivals are expected to end."""
    if arrivals.times_s is not None:
        return arrivals.times_s[-1] if arrivals.times_s else 0.0
    if arrivals.count and arrivals.rate_rps > 0:
        return arrivals.count / arrivals.rate_rps
    return world.duration_s


def _check_warm(world: World) -> None:
    end_s = max((world.duration_s, *(_end_s(world, p.arrivals) for p in world.pipelines)))
    if world.warm_s > end_s:
        raise WorldError(f"warm_s must be at most {end_s} (arrivals end then), not {world.warm_s}")


def _check_stage(world: World, where: str, stage: StageSpec) -> None:
    for name in ("alpha_s", "beta_s", "cpu_core_s"):
        _within(f"{where}: {name}", getattr(stage, name), MOST_STEP_S)
    _within(f"{where}: scv", stage.scv, MOST_CV**2)
    for name in ("parameter_bytes", "activation_bytes"):
        _within(f"{where}: {name}", getattr(stage, name), MOST_BYTES)
    _within(f"{where}: gpus", stage.gpus, MOST_GPUS)
    for name in ("cores", "most_cores", "most"):
        _positive(f"{where}: {name}", getattr(stage, name))
    _at_most(f"{where}: most", stage.most, MOST_BATCH)
    if stage.cores < LEAST_CORES:
        raise WorldError(f"{where}: cores must be at least {LEAST_CORES}, not {stage.cores}")
    try:
        is_eager = parse_batching(stage.batching).policy == "eager"
    except ValueError as error:
        raise WorldError(f"{where}: batching: {error}") from None
    if stage.shared and not is_eager:
        raise WorldError(
            f"{where}: stages that take turns on shared GPUs are eager, batching is {stage.batching}"
        )
    if not 0 <= stage.min_replicas <= stage.max_replicas:
        raise WorldError(f"{where}: min_replicas {stage.min_replicas} .. max_replicas {stage.max_replicas}")
    _at_most(f"{where}: max_replicas", stage.max_replicas, MOST_REPLICAS)
    _within(f"{where}: replicas", stage.replicas, MOST_REPLICAS)
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
        if load.prewarm and not (on_disk or load.remote_bps > 0):
            raise WorldError(
                f"nodes[{i}]: load.prewarm needs a source to fetch from: a disk with disk_bps "
                f"(disk={node.disk}, disk_bps={load.disk_bps}) or remote_bps (now {load.remote_bps})"
            )


def _check_failures(world: World) -> None:
    functions = {f"{p.name}-stage-{k}" for p in world.pipelines for k in range(len(p.stages))}
    nodes = {f"node-{i}" for i in range(sum(n.count for n in world.nodes))}
    for i, failure in enumerate(world.failures):
        _within(f"failures[{i}].at_s", failure.at_s, MOST_S)
        _within(f"failures[{i}].for_s", failure.for_s, MOST_S)
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


def _at_most(name: str, value: float, most: float) -> None:
    if not value <= most:
        raise WorldError(f"{name} must be at most {most:g}, not {value:g}")


def _within(name: str, value: float, most: float) -> None:
    _not_negative(name, value)
    _at_most(name, value, most)


def _rate(name: str, value: float) -> None:
    _not_negative(name, value)
    if 0 < value < 1:
        raise WorldError(f"{name} must be 0 (none) or at least 1 byte a second, not {value}")
