"""From a bundle to deployments: the router's function and one function per stage.

Used by `keystage up`, tests and benchmarks; `keystage split` writes the same functions into
stack.yml for `faas-cli`. Names and variables are documented once, in the glossary. It must not
start anything.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from keystage.bundle.api import Pipeline
from keystage.local.api import Deployment
from keystage.local.errors import BadDeployment
from keystage.local.program import MIN_LABEL

_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def deployments_for(
    bundle_dir: Path,
    pipeline: Pipeline,
    *,
    device: str | Sequence[str] = "cpu",
    threads: int = 1,
    slots: int | None = None,
    slo: Mapping[str, float] | None = None,
    replicas: Sequence[int] | None = None,
    env: Mapping[str, str] | None = None,
) -> list[Deployment]:
    """Describes every function of a pipeline.

    Args:
        bundle_dir: folder with pipeline.json.
        pipeline: its content.
        device: `cpu`, `cuda`, `cuda:N` or `emulated:alpha=..,beta=..`; one for all stages or one each.
        threads: compute threads of a stage on a CPU.
        slots: sessions or items a replica holds, None for the worker's default.
        slo: {"ttft_s": .., "tpot_s": ..} or {"deadline_s": ..}.
        replicas: least replicas per stage (label com.openfaas.scale.min), None for one each.
        env: more variables for every function.

    Returns:
        The router first, then the stages in order.

    Raises:
        BadDeployment: `device` or `replicas` does not have one entry per stage.
    """
    count = len(pipeline.stages)
    devices = [device] * count if isinstance(device, str) else list(device)
    for name, given in (("device", devices), ("replicas", [1] * count if replicas is None else replicas)):
        if len(given) != count:
            raise BadDeployment(
                f"{name} needs {count} entries, one per stage of {pipeline.name}, not {len(given)}"
            )
    common = {
        "KEYSTAGE_PIPELINE": pipeline.name,
        "KEYSTAGE_BUNDLE": bundle_dir.absolute().as_uri(),
        **({"KEYSTAGE_SLO": json.dumps(dict(slo))} if slo else {}),
        **(env or {}),
    }
    labels = {"keystage.pipeline": pipeline.name}
    router = Deployment(
        service=pipeline.name,
        image="keystage/router",
        envVars={"KEYSTAGE_ROLE": "router", **common},
        labels={**labels, "keystage.role": "router"},
    )
    stages = []
    for stage in pipeline.stages:
        variables = {
            "KEYSTAGE_ROLE": "stage",
            "KEYSTAGE_STAGES": str(stage.index),
            "KEYSTAGE_DEVICE": devices[stage.index],
            "KEYSTAGE_THREADS": str(threads),
            **common,
        }
        if pipeline.dtype in _DTYPES:
            variables["KEYSTAGE_DTYPE"] = _DTYPES[pipeline.dtype]
        if slots is not None:
            variables["KEYSTAGE_SLOTS"] = str(slots)
        own = {**labels, "keystage.role": "stage", "keystage.stage": str(stage.index)}
        if replicas is not None:
            own[MIN_LABEL] = str(replicas[stage.index])
        name = f"{pipeline.name}-stage-{stage.index}"
        stages.append(Deployment(service=name, image="keystage/stage", envVars=variables, labels=own))
    return [router, *stages]
