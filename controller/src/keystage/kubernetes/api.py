"""Names of Keystage on Kubernetes: the custom resource, labels, annotations, ports, paths. Pure.

The gateway writes functions (`functions.keystage.dev`) and intents; the controller alone writes their status
and makes pods of them. A function's number is decided by the controller and stands in `status.desired`.
`spec.replicas` is a *person's* wish (gateway, `kubectl scale`, an autoscaler): an override that expires.
Nothing here may import a client.
"""

from __future__ import annotations

import msgspec

from keystage.keysmanager.pod_api import ACTIVATE_PATH as ACTIVATE_PATH
from keystage.keysmanager.pod_api import TOKEN_PURPOSE as TOKEN_PURPOSE
from keystage.keysmanager.pod_api import Activated as Activated
from keystage.keysmanager.pod_api import Activation as Activation
from keystage.keysmanager.pod_api import Grant as Grant
from keystage.local.api import Deployment

GROUP = "keystage.dev"
VERSION = "v1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "Function"
PLURAL = "functions"

GATEWAY_MANAGER = "keystage-gateway"
"""Field manager of what was deployed (server-side apply)."""
SCALE_MANAGER = "keystage-scale"
"""Field manager of a person's wish, so that a redeploy does not take it back."""
CONTROLLER_MANAGER = "keystage-controller"

FUNCTION_LABEL = f"{GROUP}/function"
"""On every pod, Deployment and Service of a function: its name. A parked pod has none until activated."""
PIPELINE_LABEL = f"{GROUP}/pipeline"
ROLE_LABEL = f"{GROUP}/role"
STAGE_LABEL = f"{GROUP}/stage"
TEMPLATE_LABEL = f"{GROUP}/template"
"""Hash of what a pod was made from (`manifests.template_hash`): another one is replaced."""
POOL_LABEL = f"{GROUP}/pool"
"""On pods that were parked: their shape's hash. Stays when they are activated."""
OPENFAAS_LABEL = "faas_function"
SECRET_LABEL = f"{GROUP}/secret"
"""On Secrets that functions may have; others are nobody's business here. Its value does not matter."""
COMPONENT_LABEL = "app.kubernetes.io/component"
"""On Keystage's own pods: `gateway`, `controller`, `keysmanager`."""

WAKE_ANNOTATION = f"{GROUP}/wake"
"""On a function: Unix seconds at which a request began to wait for it at zero."""
OVERRIDE_UNTIL_ANNOTATION = f"{GROUP}/override-until"
"""On a function: Unix seconds at which `spec.replicas` expires; the controller adds it where it lacks."""
LEAVING_ANNOTATION = f"{GROUP}/leaving"
"""On a pod: Unix seconds since which gateways give it no request; it is deleted once they have none there."""
ACTIVATED_ANNOTATION = f"{GROUP}/activated"
"""On a pod that was parked: Unix seconds at which its activation was decided."""
SERVING_ANNOTATION = f"{GROUP}/serving"
"""On a pod that was parked: Unix seconds at which it said that it serves; before, it is starting."""
VIA_ANNOTATION = f"{GROUP}/via"
"""On an activated pod: how it started, `via/source` as in `local.api.ReplicaRecord`."""
CORES_ANNOTATION = f"{GROUP}/cores"
"""On a pod: the cores asked for last by an in-place resize."""

HTTP_PORT = 8080
WIRE_PORT = 7800
"""The router's inbox, beside its HTTP port in its Service."""
KEYSMANAGER_PORT = 7810
"""The KeysManager's TCP face (status, grants, parameters)."""
CONTAINER = "function"
"""Name of the one container in every pod of a function."""
USER = 12000
"""User and group of functions."""

WIRE_KEY_MOUNT = "/var/run/keystage/wire"
WIRE_KEY_FILE = f"{WIRE_KEY_MOUNT}/key"
NODE_MOUNT = "/var/run/keystage/node"
"""Folder of the node, mounted into stage pods: the KeysManager's socket for pods lies there."""
PODS_SOCKET = f"{NODE_MOUNT}/pods.sock"
RUN_MOUNT = "/run/keystage"
"""Memory-backed folder of a pod's own, for sockets (KEYSTAGE_RUN) and what it fetches."""
SECRETS_MOUNT = "/var/openfaas/secrets"
GPU_RESOURCE = f"{GROUP}/gpu"
"""Extended resource of GPU n is `keystage.dev/gpu<n>`; its unit is GiB."""

LOADS_PATH = "/_/loads"
"""GET on a gateway pod: list of (function, Load) as it told its backend last; needs the internal token."""
REPORT_PATH = "/_/report"
"""PUT on a gateway pod: the newest `observability.api.Report` of the controller; needs the internal token."""


class FunctionSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`spec` of the custom resource: `local.api.Deployment` without its name, and a person's wish.

    Attributes:
        replicas: a person's wish, None: none.
    """

    image: str = ""
    envProcess: str = ""  # noqa: N815  (names fixed by the OpenFaaS API)
    envVars: dict[str, str] = {}  # noqa: N815
    constraints: list[str] = []
    secrets: list[str] = []
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    limits: dict[str, str] | None = None
    requests: dict[str, str] | None = None
    readOnlyRootFilesystem: bool = False  # noqa: N815
    replicas: int | None = None


class FunctionStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`status` of the custom resource; the controller's.

    Attributes:
        desired: replicas wanted by the controller, None until it first decided.
        replicas: replicas there are, starting ones included, leaving ones not.
        ready: those that serve.
        cores: CPU cores of each replica, None: as deployed.
        selector: label selector of its pods (for the scale subresource).
        template: hash of the present template.
        trouble: why replicas fail, one line each.
        observedGeneration: newest `metadata.generation` acted on.
    """

    desired: int | None = None
    replicas: int = 0
    ready: int = 0
    cores: float | None = None
    selector: str = ""
    template: str = ""
    trouble: list[str] = []
    observedGeneration: int = 0  # noqa: N815  (Kubernetes' convention)


def deployment_of(name: str, namespace: str, spec: FunctionSpec) -> Deployment:
    """The deployment that a spec stands for."""
    fields = {f: getattr(spec, f) for f in spec.__struct_fields__ if f != "replicas"}
    return Deployment(service=name, namespace=namespace, **fields)


def spec_of(deployment: Deployment) -> FunctionSpec:
    """The spec of a deployment, without a wish."""
    fields = {f: getattr(deployment, f) for f in FunctionSpec.__struct_fields__ if f != "replicas"}
    return FunctionSpec(**fields)


def gpu_resource(index: int) -> str:
    """Extended resource of a node's GPU."""
    return f"{GPU_RESOURCE}{index}"
