"""What pods of all roles share: environment, mounts, security, resources, probes. Pure.

Before it: `manifests`. After it: `manifests_pod` makes workers' pods of it, `manifests_template` those of
routers and plain functions. It must not know a role.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from keystage.kubernetes.api import (
    CONTAINER,
    HTTP_PORT,
    RUN_MOUNT,
    SECRETS_MOUNT,
    USER,
    WIRE_KEY_FILE,
    WIRE_KEY_MOUNT,
)
from keystage.kubernetes.cores import deployed_resources
from keystage.kubernetes.manifests import WIRE_SECRET, Object, Settings
from keystage.local.api import Deployment

_CONSTRAINT = re.compile(r"\s*([^\s=]+)\s*={1,2}\s*([^\s=]*)\s*")


def common_env(deployment: Deployment, settings: Settings) -> dict[str, str]:
    """Environment of routers and stages, but for what each pod knows of itself."""
    env = {
        "OPENFAAS_NAME": deployment.service,
        "OPENFAAS_NAMESPACE": settings.function_namespace,
        **deployment.envVars,
        "KEYSTAGE_HTTP": f"0.0.0.0:{HTTP_PORT}",
        "KEYSTAGE_RUN": RUN_MOUNT,
        "KEYSTAGE_WIRE_KEY_FILE": WIRE_KEY_FILE,
    }
    if settings.wire_plain:
        env["KEYSTAGE_WIRE_PLAIN"] = "1"
    return env


def pod_spec(
    deployment: Deployment, settings: Settings, env: Mapping[str, str], *, command: tuple[str, ...]
) -> Object:
    """What routers and stages have in common."""
    container: Object = {
        "name": CONTAINER,
        "image": deployment.image,
        "command": list(command),
        "env": [*_plain(env), *_SELF],
        "resources": deployed_resources(deployment, {}),
        "securityContext": container_security(is_read_only=True),
        "volumeMounts": [
            {"name": "run", "mountPath": RUN_MOUNT},
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108
            {"name": "wire", "mountPath": WIRE_KEY_MOUNT, "readOnly": True},
        ],
    }
    spec = pod_wide(deployment, settings, container, user=USER)
    limit = str(settings.run_bytes)
    spec["volumes"] = [
        {"name": "run", "emptyDir": {"medium": "Memory", "sizeLimit": limit}},
        {"name": "tmp", "emptyDir": {}},
        {"name": "wire", "secret": {"secretName": WIRE_SECRET, "defaultMode": 0o440}},
    ]
    bundles = settings.bundles
    if bundles.host_path or bundles.claim:
        source: Object = (
            {"hostPath": {"path": bundles.host_path, "type": "Directory"}}
            if bundles.host_path
            else {"persistentVolumeClaim": {"claimName": bundles.claim, "readOnly": True}}
        )
        spec["volumes"].append({"name": "bundles", **source})
        container["volumeMounts"].append(
            {"name": "bundles", "mountPath": bundles.mount_path, "readOnly": True}
        )
    # Our programs are not process 1 there, to which SIGTERM does nothing before Python has come to a handler:
    # a pod that is deleted while it starts would last for its whole grace period.
    spec["shareProcessNamespace"] = True
    mount_secrets(deployment, spec)
    return spec


def pod_wide(deployment: Deployment, settings: Settings, container: Object, *, user: int) -> Object:
    """What every pod has: who it runs as, and no token of a service account."""
    if settings.image_pull_policy:
        container["imagePullPolicy"] = settings.image_pull_policy
    security: Object = {"seccompProfile": {"type": "RuntimeDefault"}}
    if user:
        security |= {"runAsNonRoot": True, "runAsUser": user, "runAsGroup": user, "fsGroup": user}
    spec: Object = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": security,
        "containers": [container],
    }
    if settings.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in settings.image_pull_secrets]
    selector = node_selector(deployment)
    if selector:
        spec["nodeSelector"] = selector
    return spec


def node_selector(deployment: Deployment) -> dict[str, str]:
    """Constraints `label=value` (OpenFaaS) as a node selector; what has another form is left out."""
    found = (_CONSTRAINT.fullmatch(text) for text in deployment.constraints)
    return {match[1]: match[2] for match in found if match}


def mount_secrets(deployment: Deployment, spec: Object) -> None:
    """Mounts a function's secrets where OpenFaaS has them."""
    if not deployment.secrets:
        return
    sources = [{"secret": {"name": name}} for name in deployment.secrets]
    spec["volumes"].append({"name": "secrets", "projected": {"defaultMode": 0o440, "sources": sources}})
    mount = {"name": "secrets", "mountPath": SECRETS_MOUNT, "readOnly": True}
    spec["containers"][0]["volumeMounts"].append(mount)


def container_security(*, is_read_only: bool) -> Object:
    """Rights of a container: none beyond its user's."""
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": is_read_only,
        "capabilities": {"drop": ["ALL"]},
    }


def http_probe(path: str, *, period_s: int, failures: int) -> Object:
    """A probe by HTTP."""
    return {
        "httpGet": {"path": path, "port": HTTP_PORT},
        "periodSeconds": period_s,
        "timeoutSeconds": 2,
        "failureThreshold": failures,
    }


def _plain(env: Mapping[str, str]) -> list[Object]:
    """Variables but for those that a pod knows of itself: no name may be there twice."""
    own = {entry["name"] for entry in _SELF}
    return [{"name": key, "value": value} for key, value in sorted(env.items()) if key not in own]


def _field(name: str, path: str) -> Object:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


_SELF = (
    _field("KEYSTAGE_REPLICA", "metadata.name"),
    _field("KEYSTAGE_NODE", "metadata.uid"),
    _field("KEYSTAGE_WIRE_HOST", "status.podIP"),
    _field("KEYSTAGE_POD_NAMESPACE", "metadata.namespace"),
    _field("KEYSTAGE_NODE_NAME", "spec.nodeName"),
)
"""What a pod knows of itself; a deployment that sets one of these is overruled."""
