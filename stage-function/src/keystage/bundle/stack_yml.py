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
REGISTRY = "ghcr.io/keystage"
COMMANDS = {"router": "keystage router", "stage": "keystage worker"}
"""`fprocess`: what the image runs. With it, faas-cli needs no template folder to deploy."""
ANNOTATIONS = {
    "com.openfaas.health.http.path": "/_/health",
    "com.openfaas.ready.http.path": "/_/ready",
}
"""A loading stage is alive but not ready; OpenFaaS asks the two apart where it is told both paths."""


def stack_yml(
    pipeline: Pipeline, home: Path | str, gateway: str = GATEWAY, registry: str = REGISTRY, tag: str = ""
) -> str:
    """The text of `stack.yml`.

    Args:
        pipeline: what is deployed.
        home: absolute folder of the bundle, or its address (`file://`, `http(s)://`) where it will run.
        gateway: address of the gateway; faas-cli puts its `OPENFAAS_URL` in place of the default one.
        registry: where the images `router` and `stage` are.
        tag: of the images, empty: this version.
    """
    address = home if isinstance(home, str) else home.as_uri()
    image = f"{registry.rstrip('/')}/ROLE:{tag or _version()}"
    lines = ["version: 1.0", "provider:", "  name: openfaas", f"  gateway: {_quoted(gateway)}", "functions:"]
    lines += _function(pipeline, address, image, "router", None)
    for stage in pipeline.stages:
        lines += _function(pipeline, address, image, "stage", stage.index)
    return "\n".join(lines) + "\n"


def _function(pipeline: Pipeline, home: str, image: str, role: str, stage: int | None) -> list[str]:
    name = pipeline.name if stage is None else f"{pipeline.name}-stage-{stage}"
    environment = {
        "KEYSTAGE_ROLE": role,
        "KEYSTAGE_PIPELINE": pipeline.name,
        "KEYSTAGE_BUNDLE": home,
    }
    # The controller sizes them: an OpenFaaS gateway's own alerts must leave their numbers alone.
    labels = {"keystage.pipeline": pipeline.name, "keystage.role": role, "com.openfaas.scale.factor": "0"}
    if stage is not None:
        environment["KEYSTAGE_STAGES"] = str(stage)
        labels["keystage.stage"] = str(stage)
        environment["KEYSTAGE_DEVICE"] = "emulated" if pipeline.family == "emulated" else "cpu"
        if pipeline.dtype in SAFETENSORS_NAMES:
            environment["KEYSTAGE_DTYPE"] = short_name(pipeline.dtype)
    return [
        f"  {_quoted(name)}:",
        f"    lang: keystage-{role}",
        f"    handler: ./{role}",
        f"    image: {_quoted(image.replace('ROLE', role))}",
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
