"""The cluster of QUART section 8.1 and the worlds of its experiments.

Before it: `paper_models`, `paper_arrivals`. After it: `paper_run` simulates them. It must hold no
policy: a world differs between policies only in what the tables' rules give them.

Cluster: 12 servers of 108 cores, 1,024 GB and 4 GPUs (the paper); 48 GB a GPU (assumed: the A40 of its
case studies). Each model is alone on it. A replica of a stage holds one whole GPU ("without sharing").
Network (assumed): 25 Gb/s and 0.5 ms between servers, 0.1 ms within one.

Staged policies (Keystage, InferLine, Cocktail, static) get the model in eight stages. INFless gets the
whole model as one function of ceil(size / GPU memory) GPUs on one server; a model larger than a GPU
(OPT-66B: three) runs as a pipeline inside its instance that works on one batch at a time, with the
execution time of Table 1, as the paper counts throughput; it has no hops.

Table A, the paper's loading: 45 s per 43 GB from disk for everybody; Keystage alone keeps parameters in
host memory where they ran (0.8 s per 5.4 GB), and nodes fetch those of key stages from their disks in
the background. A key stage is what the corrector added replicas to (QUART section 6.1); under a load of
three times one replica's capacity that is soon every stage of these evenly cut models, and all of them
together take 0.3 to 13 % of a server's memory. Every policy starts with one replica of each stage
(INFless: one instance), whose parameters lie in its node's memory, since KeysManager started it.
Table B, equal loading: every parameter lies in every host memory and is loaded at that rate by all,
so start times follow from bytes alone; INFless starts with as many whole instances as fill the GPUs
of one replica of each stage, rounded up.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from keystage.bench.paper_arrivals import Floats
from keystage.bench.paper_models import (
    BERT,
    CASE_STUDY_LAYERS,
    CORES,
    MOST_CORES,
    SERVICE_SCV,
    Model,
    stage_parts,
)
from keystage.controller.domain.snapshot import Slo
from keystage.simulator.api import ArrivalSpec, LoadSpec, NodeSpec, PipelineSpec, StageSpec, World

SERVERS = 12
GPUS = 4
CORES_A_SERVER = 108.0
HOST_BYTES = 1_024_000_000_000
GPU_BYTES = 48_000_000_000
DISK_BPS = 43e9 / 45.0
MEMORY_BPS = 5.4e9 / 0.8
NETWORK_BPS = 25e9 / 8
NETWORK_S = 0.0005
HOP_S = 0.0001
TICK_S = 0.25
STAGES = 8
KEY_STAGES = 3
"""Of the published ranking, before the corrector added any replica."""
PATIENCE_S = 3600.0
"""A run ends this long after its last arrival at the latest; what is unserved then counts as never."""

Table = Literal["A", "B"]
Cache = Literal["none", "reactive", "ahead"]
"""Nothing; key stages where they ran; whatever ran, and key stages fetched ahead."""


@dataclasses.dataclass(frozen=True, slots=True)
class Terms:
    """What a table gives a policy.

    Attributes:
        table: which.
        is_whole: the policy sees the whole model as one function.
        cache: what Table A lets it keep in host memory.
    """

    table: Table
    is_whole: bool = False
    cache: Cache = "none"


def paper_world(model: Model, times_s: Floats, slo_ratio: float, terms: Terms, warm_s: float = 0.0) -> World:
    """One model alone on the cluster.

    Args:
        model: the model.
        times_s: its arrivals, sorted.
        slo_ratio: the deadline the policy is told, in execution times.
        terms: what the table gives the policy.
        warm_s: arrivals before this do not count in the measures.
    """
    stages = (_whole(model, terms),) if terms.is_whole else staged(model)
    pipeline = PipelineSpec(
        name=model.name.lower(),
        stages=stages,
        arrivals=ArrivalSpec(times_s=tuple(times_s.tolist())),
        slo=Slo(deadline_s=slo_ratio * model.exec_s),
        tokens=model.tokens,
    )
    last_s = float(times_s[-1]) if len(times_s) else 0.0
    return World(
        pipelines=(pipeline,),
        nodes=(cluster(),),
        load=_loading(terms),
        hop_s=HOP_S,
        network_s=NETWORK_S,
        network_bps=NETWORK_BPS,
        duration_s=last_s,
        limit_s=last_s + PATIENCE_S,
        tick_s=TICK_S,
        budget_replicas=stages[0].max_replicas,  # R_total: what the cluster can hold
        warm_s=warm_s,
    )


def case_study(times_s: Floats) -> World:
    """BERT-21B in five stages on five GPUs that nobody scales (Figures 2 and 3a)."""
    stages = staged(BERT, CASE_STUDY_LAYERS)
    pipeline = PipelineSpec(
        name="bert-5",
        stages=stages,
        arrivals=ArrivalSpec(times_s=tuple(times_s.tolist())),
        tokens=BERT.tokens,
    )
    node = NodeSpec(count=5, gpus=1, gpu_bytes=GPU_BYTES, cores=CORES_A_SERVER, memory_bytes=HOST_BYTES)
    return World(
        pipelines=(pipeline,),
        nodes=(node,),
        load=_loading(Terms("A")),
        hop_s=HOP_S,
        network_s=NETWORK_S,
        network_bps=NETWORK_BPS,
        duration_s=float(times_s[-1]),
        limit_s=float(times_s[-1]) + PATIENCE_S,
        tick_s=TICK_S,
    )


def cluster() -> NodeSpec:
    """The twelve GPU servers."""
    return NodeSpec(
        count=SERVERS, gpus=GPUS, gpu_bytes=GPU_BYTES, cores=CORES_A_SERVER, memory_bytes=HOST_BYTES
    )


def staged(model: Model, layers: tuple[float, ...] | None = None) -> tuple[StageSpec, ...]:
    """The model's stages; parameters are divided evenly, times by the stage factors."""
    parts = stage_parts(model, layers)
    return tuple(
        StageSpec(
            alpha_s=alpha_s,
            beta_s=beta_s,
            most=model.most,
            scv=SERVICE_SCV,
            cpu_core_s=cpu_core_s,
            cores=CORES,
            most_cores=MOST_CORES,
            parameter_bytes=model.size_bytes // len(parts),
            gpus=1,
            activation_bytes=model.activation_bytes,
            max_replicas=SERVERS * GPUS,
        )
        for alpha_s, beta_s, cpu_core_s in parts
    )


def gpus_of_whole(model: Model) -> int:
    """GPUs of an instance of the whole model."""
    return math.ceil(model.size_bytes / GPU_BYTES)


def instances_of_whole(model: Model) -> int:
    """Instances of the whole model that the cluster holds, each within one server."""
    return SERVERS * (GPUS // gpus_of_whole(model))


def whole_rps(model: Model) -> float:
    """Requests a second of a cluster full of whole-model instances, with the largest batches."""
    return instances_of_whole(model) * model.most / model.service_s(model.most)


def _whole(model: Model, terms: Terms) -> StageSpec:
    parts = stage_parts(model)
    gpus = gpus_of_whole(model)
    return StageSpec(
        alpha_s=sum(alpha_s for alpha_s, _, _ in parts),
        beta_s=sum(beta_s for _, beta_s, _ in parts),
        most=model.most,
        scv=SERVICE_SCV / STAGES,  # a sum of eight independent times
        cpu_core_s=sum(cpu_core_s for _, _, cpu_core_s in parts),
        cores=CORES,
        most_cores=MOST_CORES,
        parameter_bytes=model.size_bytes,
        gpus=gpus,
        activation_bytes=model.activation_bytes,
        max_replicas=instances_of_whole(model),
        replicas=1 if terms.table == "A" else math.ceil(STAGES / gpus),
    )


def _loading(terms: Terms) -> LoadSpec:
    if terms.table == "B":
        return LoadSpec(memory_bps=MEMORY_BPS, disk_bps=DISK_BPS, holders="all", key_stages=KEY_STAGES)
    if terms.cache == "none":
        return LoadSpec(disk_bps=DISK_BPS)
    return LoadSpec(
        memory_bps=MEMORY_BPS,
        disk_bps=DISK_BPS,
        holders="ran" if terms.cache == "ahead" else "key-stages",
        key_stages=KEY_STAGES,
        prewarm=terms.cache == "ahead",
    )


def one_replica_rps(model: Model) -> float:
    """Requests a second of one replica of each stage without batches, were the stages equal."""
    return STAGES / model.exec_s
