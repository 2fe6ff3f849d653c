"""Pod templates of routers and plain functions. Pure.

Before it: `manifests_parts`. After it: `manifests_workload` puts them into Deployments.
"""

from __future__ import annotations

import math

from keystage.kubernetes.api import CONTAINER, HTTP_PORT, WIRE_PORT
from keystage.kubernetes.cores import deployed_resources
from keystage.kubernetes.manifests import (
    STOP_S,
    Object,
    Settings,
    drain_s,
    function_labels,
    role,
    router_address,
)
from keystage.kubernetes.manifests_parts import (
    common_env,
    container_security,
    http_probe,
    mount_secrets,
    pod_spec,
    pod_wide,
)
from keystage.local.api import Deployment
from keystage.local.checks import HEALTH_ANNOTATION, READY_ANNOTATION
from keystage.local.durations import go_duration

ROUTER_COMMAND = ("python", "-m", "keystage.router.app")
PRE_STOP_S = 3
"""A plain function is told to stop so long after it left the routing: gateways see that within it."""
LOST_S = 5
_LOST = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
_TIMEOUT_VARIABLES = ("read_timeout", "write_timeout", "exec_timeout")


def template_of(deployment: Deployment, settings: Settings, template: str) -> Object:
    """Pod template of a router or a plain function, for its Deployment."""
    spec = (
        _router_spec(deployment, settings)
        if role(deployment) == "router"
        else _plain_spec(deployment, settings)
    )
    # A Deployment's pod on a node that is lost is replaced at once, not after the default of five minutes.
    spec["tolerations"] = [
        {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": LOST_S}
        for key in _LOST
    ]
    meta: Object = {"labels": function_labels(deployment, template)}
    if deployment.annotations:
        meta["annotations"] = {
            k: v for k, v in deployment.annotations.items() if k.startswith("prometheus.io")
        }
    return {"metadata": meta, "spec": spec}


def _router_spec(deployment: Deployment, settings: Settings) -> Object:
    env = common_env(deployment, settings)
    env["KEYSTAGE_ROUTER"] = router_address(deployment, settings)
    env["KEYSTAGE_WIRE_BIND"] = "0.0.0.0"  # noqa: S104  (behind the Service's name; CURVE refuses strangers)
    env.setdefault("KEYSTAGE_DEADLINE_S", f"{settings.timeout_s:.10g}")
    env.setdefault("KEYSTAGE_INSTALLATION", f"{settings.namespace}/{settings.function_namespace}")
    spec = pod_spec(deployment, settings, env, command=ROUTER_COMMAND)
    container = spec["containers"][0]
    if settings.redis_secret and "KEYSTAGE_REDIS" not in env:
        source = {"name": settings.redis_secret, "key": settings.redis_key}
        container["env"].append({"name": "KEYSTAGE_REDIS", "valueFrom": {"secretKeyRef": source}})
    container["ports"] = [
        {"name": "http", "containerPort": HTTP_PORT},
        {"name": "wire", "containerPort": WIRE_PORT},
    ]
    container["readinessProbe"] = http_probe("/_/ready", period_s=1, failures=3)
    container["livenessProbe"] = http_probe("/_/health", period_s=5, failures=6)
    spec["terminationGracePeriodSeconds"] = math.ceil(drain_s(deployment) + STOP_S)
    return spec


def _plain_spec(deployment: Deployment, settings: Settings) -> Object:
    env: dict[str, str] = {
        **dict.fromkeys(_TIMEOUT_VARIABLES, go_duration(settings.timeout_s)),
        "OPENFAAS_NAME": deployment.service,
        "OPENFAAS_NAMESPACE": settings.function_namespace,
        "PORT": str(HTTP_PORT),
        **deployment.envVars,
    }
    if deployment.envProcess:
        env["fprocess"] = deployment.envProcess
    container: Object = {
        "name": CONTAINER,
        "image": deployment.image,
        "env": [{"name": key, "value": value} for key, value in sorted(env.items())],
        "ports": [{"name": "http", "containerPort": HTTP_PORT}],
        "resources": deployed_resources(deployment, {}),
        "securityContext": container_security(is_read_only=deployment.readOnlyRootFilesystem),
        "readinessProbe": _plain_probe(deployment.annotations.get(READY_ANNOTATION), period_s=1),
        "lifecycle": {"preStop": {"sleep": {"seconds": PRE_STOP_S}}},
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],  # noqa: S108
    }
    if HEALTH_ANNOTATION in deployment.annotations:
        path = deployment.annotations[HEALTH_ANNOTATION]
        container["livenessProbe"] = http_probe(path, period_s=5, failures=6)
    spec = pod_wide(deployment, settings, container, user=settings.user)
    spec["volumes"] = [{"name": "tmp", "emptyDir": {}}]
    spec["terminationGracePeriodSeconds"] = math.ceil(drain_s(deployment) + PRE_STOP_S + STOP_S)
    mount_secrets(deployment, spec)
    return spec


def _plain_probe(path: str | None, *, period_s: int) -> Object:
    """Where it tells its readiness, else an open port: a foreign program need not know our paths."""
    if path:
        return http_probe(path, period_s=period_s, failures=3)
    return {"tcpSocket": {"port": HTTP_PORT}, "periodSeconds": period_s, "failureThreshold": 3}
