"""`stack.yml` for `faas-cli`: the router function and one function per stage.

Written beside `pipeline.json` by `keystage split`. Names, labels and environment are those fixed
for Keystage; values are JSON strings, which YAML reads as they are, so no emitter is needed. The
file needs no editing: what differs from place to place is given to `faas-cli` (`--gateway` or
OPENFAAS_URL, `--env KEYSTAGE_DEVICE=cuda`).
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import msgspec

from keystage.bundle.api import Pipeline
from keystage.bundle.dtypes import SAFETENSORS_NAMES, short_name

STACK_FILE = "stack.yml"
GATEWAY = "http://127.0.0.1:8080"
COMMANDS = {"router": "keystage router", "stage": "keystage worker"}
"""`fprocess`: what the image runs. With it, faas-cli needs no template folder to deploy."""
ANNOTATIONS = {
    "com.openfaas.health.http.path": "/_/health",
    "com.openfaas.ready.http.path": "/_/ready",
}
"""A loading stage is alive but not ready; OpenFaaS asks the two apart where it is told both paths."""


def stack_yml(pipeline: Pipeline, bundle_dir: Path, gateway: str = GATEWAY) -> str:
    """The text of `stack.yml`.

    Args:
        pipeline: what is deployed.
        bundle_dir: absolute folder of the bundle, for `KEYSTAGE_BUNDLE`.
        gateway: address of the gateway; faas-cli puts its `OPENFAAS_URL` in place of the default one.
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
    # The controller sizes them: an OpenFaaS gateway's own alerts must leave their numbers alone.
    labels = {"keystage.pipeline": pipeline.name, "keystage.role": role, "com.openfaas.scale.factor": "0"}
    if stage is not None:
        environment["KEYSTAGE_STAGES"] = str(stage)
        labels["keystage.stage"] = str(stage)
        environment["KEYSTAGE_DEVICE"] = "emulated" if pipeline.family == "emulated" else "cpu"
        if pipeline.dtype in SAFETENSORS_NAMES:
            environment["KEYSTAGE_DTYPE"] = short_name(pipeline.dtype)
    image = f"ghcr.io/keystage/{role}:{_version()}"
    return [
        f"  {_quoted(name)}:",
        f"    lang: keystage-{role}",
        f"    handler: ./{role}",
        f"    image: {_quoted(image)}",
        "    skip_build: true",
        f"    fprocess: {COMMANDS[role]}",
        *_block("environment", environment),
        *_block("labels", labels),
        *_block("annotations", ANNOTATIONS),
    ]


def _block(name: str, values: dict[str, str]) -> list[str]:
    return [f"    {name}:", *(f"      {key}: {_quoted(value)}" for key, value in values.items())]


def _quoted(text: str) -> str:
    return msgspec.json.encode(text).decode()


def _version() -> str:
    try:
        return metadata.version("keystage")
    except metadata.PackageNotFoundError:
        return "latest"
