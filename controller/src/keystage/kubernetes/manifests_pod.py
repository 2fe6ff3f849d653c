"""Pods of workers: a stage's, and parked ones that may become any stage of their shape. Pure.

Before it: `manifests` (settings, names, hashes), `manifests_parts`. After it: `act` creates them. They meet
the restricted Pod Security Standard but for the folder of the node that they mount read-only (bundles, the
KeysManager's socket). It must not choose a place.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from keystage.kubernetes.api import (
    CORES_ANNOTATION,
    GPU_RESOURCE,
    HTTP_PORT,
    NODE_MOUNT,
    PIPELINE_LABEL,
    PODS_SOCKET,
    POOL_LABEL,
    ROLE_LABEL,
    gpu_resource,
)
from keystage.kubernetes.cores import base_cores, deployed_resources, threads_of, with_cores
from keystage.kubernetes.manifests import (
    SITE_ANNOTATION,
    STOP_S,
    Object,
    Owner,
    Settings,
    drain_s,
    function_labels,
    metadata,
    pipeline_of,
    router_address,
)
from keystage.kubernetes.manifests_parts import common_env, http_probe, pod_spec
from keystage.kubernetes.room import GPU_TOLERATION
from keystage.local.api import Deployment
from keystage.wire.threads import SPIN

STAGE_COMMAND = ("python", "-m", "keystage.keysmanager.pod")
_HOSTNAME = "kubernetes.io/hostname"
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where a new pod goes.

    Attributes:
        node: name of the node, empty: the scheduler chooses.
        gpu: index of its GPU, None: it takes none.
        is_required: nowhere else; otherwise elsewhere rather than not at all.
    """

    node: str = ""
    gpu: int | None = None
    is_required: bool = True


def stage_pod(
    deployment: Deployment,
    settings: Settings,
    owner: Owner,
    *,
    name: str,
    template: str,
    place: Place = Place(),
    gpu_gib: int = 0,
    cores: float | None = None,
) -> Object:
    """A worker's pod.

    Args:
        deployment: the stage function.
        settings: of the chart.
        owner: its custom resource.
        name: of the pod, and of the replica.
        template: see `manifests.template_hash`.
        place: where it goes.
        gpu_gib: GiB of GPU memory it takes, 0: no GPU.
        cores: that the policy gives each replica, None: as deployed.
    """
    annotations = _notes(place)
    if cores is not None:
        annotations[CORES_ANNOTATION] = f"{cores:g}"
    meta = metadata(name, settings, owner, function_labels(deployment, template), annotations)
    env = stage_env(deployment, settings, cores=cores)
    return _bare(meta, _stage_spec(deployment, settings, env, place, gpu_gib, cores))


def parked_pod(
    deployment: Deployment,
    settings: Settings,
    owner: Owner,
    *,
    name: str,
    shape: str,
    place: Place = Place(),
    gpu_gib: int = 0,
) -> Object:
    """A pod that waits to become a worker of any stage of its shape.

    Args:
        deployment: a stage of that shape.
        settings: of the chart.
        owner: custom resource of the pipeline's router.
        name: of the pod.
        shape: see `manifests.shape_hash`.
        place: where it goes.
        gpu_gib: as for `stage_pod`.
    """
    labels = {POOL_LABEL: shape, ROLE_LABEL: "stage", PIPELINE_LABEL: pipeline_of(deployment)}
    env = {**stage_env(deployment, settings), "KEYSTAGE_PARKED": "1"}
    del env["OPENFAAS_NAME"]
    env.pop("KEYSTAGE_STAGES", None)
    spec = _stage_spec(deployment, settings, env, place, gpu_gib, None)
    spec["topologySpreadConstraints"] = [
        {
            "maxSkew": 1,
            "topologyKey": _HOSTNAME,
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": {POOL_LABEL: shape}},
        }
    ]
    return _bare(metadata(name, settings, owner, labels, _notes(place)), spec)


def stage_env(deployment: Deployment, settings: Settings, *, cores: float | None = None) -> dict[str, str]:
    """Environment of a worker but for what each pod knows of itself; an activation tells it again."""
    env = common_env(deployment, settings)
    if cores is not None:
        env["KEYSTAGE_THREADS"] = str(threads_of(cores))
    threads = env.get("KEYSTAGE_THREADS")
    if threads and threads != "0":
        env = SPIN | env | dict.fromkeys(_THREAD_VARIABLES, threads)
    if env.get("KEYSTAGE_DEVICE", "").startswith("cuda"):
        env["KEYSTAGE_DEVICE"] = "cuda:0"  # the device plugin shows a pod its one GPU
    env.setdefault("KEYSTAGE_ROUTER", router_address(deployment, settings))
    if settings.has_keysmanager:
        env["KEYSTAGE_KEYSMANAGER_PODS"] = PODS_SOCKET
    return env


def _stage_spec(
    deployment: Deployment,
    settings: Settings,
    env: Mapping[str, str],
    place: Place,
    gpu_gib: int,
    cores: float | None,
) -> Object:
    spec = pod_spec(deployment, settings, env, command=STAGE_COMMAND)
    container = spec["containers"][0]
    container["ports"] = [{"name": "http", "containerPort": HTTP_PORT}]
    container["resources"] = _stage_resources(deployment, settings, place, gpu_gib, cores)
    # A change of its cores never restarts it; its memory is not changed in place.
    container["resizePolicy"] = [{"resourceName": "cpu", "restartPolicy": "NotRequired"}]
    container["readinessProbe"] = http_probe("/_/ready", period_s=1, failures=3)
    container["livenessProbe"] = http_probe("/_/health", period_s=5, failures=6)
    spec["restartPolicy"] = "Never"
    spec["terminationGracePeriodSeconds"] = math.ceil(drain_s(deployment) + STOP_S)
    affinity = _affinity(place)
    if affinity:
        spec["affinity"] = affinity
    if gpu_gib:
        spec["tolerations"] = [dict(GPU_TOLERATION)]
        if settings.gpu_runtime_class:
            spec["runtimeClassName"] = settings.gpu_runtime_class
    if settings.has_keysmanager:
        folder = f"/run/keystage/{settings.namespace}"
        spec["volumes"].append({"name": "node", "hostPath": {"path": folder, "type": "DirectoryOrCreate"}})
        container["volumeMounts"].append({"name": "node", "mountPath": NODE_MOUNT, "readOnly": True})
    return spec


def _stage_resources(
    deployment: Deployment, settings: Settings, place: Place, gpu_gib: int, cores: float | None
) -> dict[str, Any]:
    resources = deployed_resources(deployment, dict(settings.requests))
    if cores is not None:
        resources = with_cores(resources, cores, base_cores(deployment))
    if gpu_gib:
        wanted = {gpu_resource(place.gpu or 0): str(gpu_gib)}
        resources["limits"] = {**resources.get("limits", {}), **wanted}
        resources["requests"] = {**resources.get("requests", {}), **wanted}
    return resources


def gpu_of_pod(pod: Mapping[str, Any]) -> tuple[int, int] | None:
    """Index of the GPU that a pod asks for and its GiB, None: none."""
    for container in pod.get("spec", {}).get("containers") or ():
        for key, value in (container.get("resources", {}).get("limits") or {}).items():
            index = key.removeprefix(GPU_RESOURCE)
            if index != key and index.isdigit() and str(value).isdigit():
                return int(index), int(value)
    return None


def _affinity(place: Place) -> Object:
    if not place.node:
        return {}
    # By field, not by label: a node's label may differ from its name.
    terms = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [place.node]}]}
    if place.is_required:
        return {
            "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [terms]}}
        }
    return {
        "nodeAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "preference": terms}]
        }
    }


def _notes(place: Place) -> dict[str, str]:
    return {SITE_ANNOTATION: place.node if place.is_required else f"~{place.node}"} if place.node else {}


def _bare(meta: Object, spec: Object) -> Object:
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}
