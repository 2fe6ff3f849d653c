"""`stack.yml` for `faas-cli`: the router function and one function per stage.

Written beside `pipeline.json` by `keystage split`. Names, labels and environment are those fixed
for Keystage; values are JSON strings, which YAML reads as they are, so no emitter is needed.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from keystage.bundle.api import Pipeline
from keystage.bundle.dtypes import SAFETENSORS_NAMES, short_name

STACK_FILE = "stack.yml"
GATEWAY = "http://127.0.0.1:8080"
IMAGE = "ghcr.io/keystage/{role}:0.1.0"


def stack_yml(pipeline: Pipeline, bundle_dir: Path, gateway: str = GATEWAY) -> str:
    """The text of `stack.yml`.

    Args:
        pipeline: what is deployed.
        bundle_dir: absolute folder of the bundle, for `KEYSTAGE_BUNDLE`.
        gateway: address of the gateway.
    """
    lines = ["version: 1.0", "provider:", "  name: openfaas", f"  gateway: {_quoted(gateway)}", "functions:"]
    lines += _function(pipeline, bundle_dir, pipeline.name, "router", None)
    for stage in pipeline.stages:
        lines += _function(pipeline, bundle_dir, f"{pipeline.name}-stage-{stage.index}", "stage", stage.index)
    return "\n".join(lines) + "\n"


def _function(pipeline: Pipeline, bundle_dir: Path, name: str, role: str, stage: int | None) -> list[str]:
    environment = {
        "KEYSTAGE_ROLE": role,
        "KEYSTAGE_PIPELINE": pipeline.name,
        "KEYSTAGE_BUNDLE": bundle_dir.as_uri(),
    }
    labels = {"keystage.pipeline": pipeline.name, "keystage.role": role}
    if stage is not None:
        environment["KEYSTAGE_STAGES"] = str(stage)
        labels["keystage.stage"] = str(stage)
        if pipeline.dtype in SAFETENSORS_NAMES:
            environment["KEYSTAGE_DTYPE"] = short_name(pipeline.dtype)
    lines = [
        f"  {_quoted(name)}:",
        f"    lang: keystage-{role}",
        f"    handler: ./{role}",
        f"    image: {_quoted(IMAGE.format(role=role))}",
        "    skip_build: true",
        "    environment:",
    ]
    lines += [f"      {key}: {_quoted(value)}" for key, value in environment.items()]
    lines.append("    labels:")
    lines += [f"      {key}: {_quoted(value)}" for key, value in labels.items()]
    return lines


def _quoted(text: str) -> str:
    return msgspec.json.encode(text).decode()
