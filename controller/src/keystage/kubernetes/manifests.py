"""What Keystage's objects are made from: settings, names, labels, owners, hashes. Pure.

Before it: a function (custom resource) and the chart's settings. After it: `manifests_pod` and
`manifests_workload` build whole objects of these pieces, `plan` compares hashes. Two functions with one
template hash are served by equal pods; two stages with one shape hash can use each other's parked pods.
It must not look at the cluster.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from keystage.kubernetes.api import (
    API_VERSION,
    COMPONENT_LABEL,
    FUNCTION_LABEL,
    GROUP,
    KIND,
    OPENFAAS_LABEL,
    PIPELINE_LABEL,
    ROLE_LABEL,
    STAGE_LABEL,
    TEMPLATE_LABEL,
    WIRE_PORT,
)
from keystage.local.api import Deployment, role_of
from keystage.local.checks import drain_s_of
from keystage.local.key_stages import stages_of
from keystage.local.labels import PREFIX as SCALE_PREFIX

Object = dict[str, Any]
"""A Kubernetes object as JSON."""

SITE_ANNOTATION = f"{GROUP}/site"
"""On a stage pod: the node it was given, `name` where it must run there, `~name` where it should."""
WIRE_SECRET = "keystage-wire"  # noqa: S105  (an object's name)
GPU_GIB_LABEL = "keystage.gpu_gib"
"""On a function: GiB of GPU memory for one replica, in place of what its parameters tell."""
GPU_RUNTIME_BYTES = 3 << 29
"""CUDA context, libraries and work space of one worker: 1.5 GiB."""
DEFAULT_KV_BYTES = 512 << 20
"""For each stage that a worker hosts, as `worker.config` has it."""
MOST_STAGES = 1024
"""A range beyond that is nonsense, which the worker refuses by name."""
DEFAULT_DRAIN_S = 60.0
TIMEOUT_S = 600.0
"""Longest that a function may take, where nothing else is said."""
STOP_S = 5.0
"""Over the drain, for the process to end."""
REVISION = 1
"""Raised when pods built before a change here have to be replaced."""
_HASH_LENGTH = 10
_MAX_LABEL = 63
_MAX_DIGITS = 15

Role = Literal["stage", "router", "function"]


@dataclasses.dataclass(frozen=True, slots=True)
class Bundles:
    """Where bundles lie on nodes; neither: pods fetch them from their home.

    Attributes:
        host_path: folder of every node.
        claim: name of a PersistentVolumeClaim in the functions' namespace.
        mount_path: where containers see it.
    """

    host_path: str = ""
    claim: str = ""
    mount_path: str = "/bundles"


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """What the chart says of functions' pods.

    Attributes:
        namespace: of the release.
        function_namespace: of functions and their pods.
        has_keysmanager: nodes have a KeysManager with a socket for pods.
        bundles: where bundles lie.
        image_pull_policy: `Always`, `IfNotPresent` or `Never`, empty: Kubernetes' default.
        image_pull_secrets: names of Secrets.
        wire_plain: tensors are sent unencrypted.
        parked_per_pipeline: parked pods kept for each pipeline, 0: none.
        cluster_domain: appended to Services' names, empty: the pod's search list completes them.
        requests: asked for by a stage that asks for nothing, so that its cores can be resized later.
        run_bytes: bound of a pod's memory-backed folder, which holds sockets and what it fetches.
        timeout_s: longest that a request may take.
        user: user and group of pods, 0: the image's own (plain functions only).
        gpu_runtime_class: runtime that gives stages on a GPU its driver, empty: the nodes' default one does.
        redis_secret: Secret with the address of the Redis of routers, empty: they have none.
        redis_key: of that Secret.
    """

    namespace: str
    function_namespace: str
    has_keysmanager: bool = True
    bundles: Bundles = Bundles()
    image_pull_policy: str = ""
    image_pull_secrets: tuple[str, ...] = ()
    wire_plain: bool = False
    parked_per_pipeline: int = 2
    cluster_domain: str = ""
    requests: tuple[tuple[str, str], ...] = (("cpu", "100m"), ("memory", "256Mi"))
    run_bytes: int = 1 << 30
    timeout_s: float = TIMEOUT_S
    user: int = 12000
    gpu_runtime_class: str = ""
    redis_secret: str = ""
    redis_key: str = "url"


@dataclasses.dataclass(frozen=True, slots=True)
class Owner:
    """The custom resource that an object belongs to and is removed with."""

    name: str
    uid: str


def template_hash(deployment: Deployment, settings: Settings) -> str:
    """Hash of everything that a function's pods are made from.

    Scale labels are left out: a new bound restarts nothing. Cores, places and what was computed from a bundle
    are no part of it either.
    """
    return _hash(
        REVISION,
        deployment.service,
        {k: v for k, v in deployment.labels.items() if not k.startswith(SCALE_PREFIX)},
        _made_of(deployment, settings),
        dict(deployment.envVars),
    )


def shape_hash(deployment: Deployment, settings: Settings, gpu_gib: int = 0) -> str:
    """Hash of what a parked pod is made from: a stage's pod but for which stage it is."""
    env = {key: value for key, value in deployment.envVars.items() if key != "KEYSTAGE_STAGES"}
    return _hash(REVISION, "parked", _made_of(deployment, settings), env, gpu_gib)


def gpu_gib_of(deployment: Deployment, parameter_bytes: int) -> int:
    """GiB of GPU memory that one replica of a stage takes, 0: it uses no GPU.

    Args:
        deployment: the stage.
        parameter_bytes: size of its parameters, 0 where unknown.
    """
    env = deployment.envVars
    if role_of(deployment) != "stage" or not env.get("KEYSTAGE_DEVICE", "").startswith("cuda"):
        return 0
    told = deployment.labels.get(GPU_GIB_LABEL, "")
    if _whole(told):
        return _whole(told)
    kv = env.get("KEYSTAGE_KV_BYTES", "")
    stages = stages_of(env.get("KEYSTAGE_STAGES", ""))
    hosted = min(max(1, stages.stop - stages.start), MOST_STAGES)
    kv_bytes = (_whole(kv) if kv.isascii() and kv.isdigit() else 0) or DEFAULT_KV_BYTES * hosted
    return math.ceil((parameter_bytes + kv_bytes + GPU_RUNTIME_BYTES) / (1 << 30))


def _whole(text: str) -> int:
    """A whole number, 0 for what is none that a machine could hold."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS else 0


def role(deployment: Deployment) -> Role:
    """The role; what is no role counts as `function`, as the gateway refuses it at deploy."""
    told = role_of(deployment)
    return "stage" if told == "stage" else "router" if told == "router" else "function"


def pipeline_of(deployment: Deployment) -> str:
    """Pipeline of a router or a stage, empty for none."""
    return deployment.envVars.get("KEYSTAGE_PIPELINE") or deployment.labels.get("keystage.pipeline", "")


def drain_s(deployment: Deployment) -> float:
    """Seconds that a replica may take to finish after SIGTERM."""
    try:
        value = drain_s_of(deployment)
    except ValueError:
        return DEFAULT_DRAIN_S
    return DEFAULT_DRAIN_S if value is None else value


def router_address(deployment: Deployment, settings: Settings) -> str:
    """Inbox of the pipeline's router, as its workers and the router itself are told it."""
    domain = f".{settings.cluster_domain}" if settings.cluster_domain else ""
    host = f"{pipeline_of(deployment)}.{settings.function_namespace}.svc{domain}"
    return f"tcp://{host}:{WIRE_PORT}"


def function_labels(deployment: Deployment, template: str) -> dict[str, str]:
    """Labels of a function's pods and of what makes them; its own, but for those of scaling, among them."""
    # Bounds of the policy, and names that say something here: gateways are found, and trusted, by theirs.
    others = (SCALE_PREFIX, f"{GROUP}/", COMPONENT_LABEL)
    own = {key: value for key, value in deployment.labels.items() if not key.startswith(others)}
    labels = {
        **own,
        FUNCTION_LABEL: deployment.service,
        OPENFAAS_LABEL: deployment.service,
        ROLE_LABEL: role(deployment),
        TEMPLATE_LABEL: template,
    }
    pipeline = pipeline_of(deployment)
    if pipeline:
        labels[PIPELINE_LABEL] = pipeline[:_MAX_LABEL]
    stages = deployment.envVars.get("KEYSTAGE_STAGES", "")
    if labels[ROLE_LABEL] == "stage" and stages:
        labels[STAGE_LABEL] = stages
    return labels


def selector_of(function: str) -> dict[str, str]:
    """Label selector of a function's pods."""
    return {FUNCTION_LABEL: function}


def selector_text(function: str) -> str:
    """The same as text, for the scale subresource."""
    return f"{FUNCTION_LABEL}={function}"


def owner_reference(owner: Owner) -> Object:
    """Owner reference: the object goes when its function does, and never holds up that function's removal."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": owner.name,
        "uid": owner.uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }


def metadata(
    name: str,
    settings: Settings,
    owner: Owner,
    labels: Mapping[str, str],
    annotations: Mapping[str, str] | None = None,
) -> Object:
    """Metadata of an object in the functions' namespace."""
    meta: Object = {
        "name": name,
        "namespace": settings.function_namespace,
        "labels": dict(labels),
        "ownerReferences": [owner_reference(owner)],
    }
    if annotations:
        meta["annotations"] = dict(annotations)
    return meta


def _made_of(deployment: Deployment, settings: Settings) -> Object:
    """What any pod of a function is made from, but for its environment and labels."""
    fields = ("image", "envProcess", "constraints", "secrets", "limits", "requests", "readOnlyRootFilesystem")
    annotations = {k: v for k, v in deployment.annotations.items() if k.startswith("com.openfaas.")}
    own = dataclasses.asdict(settings)
    for unrelated in ("parked_per_pipeline", "timeout_s"):
        del own[unrelated]
    if role(deployment) != "router" or not settings.redis_secret:
        del own["redis_secret"], own["redis_key"]  # no pod of it says anything of them
    return {
        **{field: getattr(deployment, field) for field in fields},
        "annotations": annotations,
        "role": role(deployment),
        "settings": own,
    }


def _hash(*parts: object) -> str:
    text = msgspec.json.encode(parts, order="deterministic")
    return hashlib.sha256(text).hexdigest()[:_HASH_LENGTH]
