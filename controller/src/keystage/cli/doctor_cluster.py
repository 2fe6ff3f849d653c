"""What `keystage doctor --kubernetes` makes of what an API server told. Pure."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterator

from keystage.cli import doctor_clock, doctor_versions
from keystage.cli.doctor_chain import Link
from keystage.cli.doctor_kubernetes import Seen
from keystage.cli.doctor_report import Check, Level, judged
from keystage.kubernetes.api import COMPONENT_LABEL, GPU_RESOURCE
from keystage.kubernetes.client import Object

AREA = "kubernetes"
LEAST_VERSION = (1, 33)
"""Pods of plain functions wait by `preStop.sleep`, on by default since then."""
LEAST_KERNEL = (5, 1)
VENDOR_RESOURCE = "nvidia.com/gpu"
LEASE_S = 30.0
"""Twice as long as a lease that nobody renews is held."""
SHOWN = 5
_NGINX = "nginx.ingress.kubernetes.io/proxy-"
_NGINX_READ_S = 60.0


def checks(seen: Seen, now: dt.datetime, *, is_whole: bool = True) -> list[Check]:
    """Everything about a cluster.

    Args:
        seen: what it told.
        now: with a zone.
        is_whole: whether Keystage has its own gateway there; else its controller steers another one, and
            neither pods nor nodes are its business.
    """
    found = [_version(seen)]
    if is_whole:
        found += [_definition(seen), _resize(seen), _metrics(seen)]
        found += _rights(seen)
        found += _nodes(seen)
        found += _part(seen, "gateway", "nobody answers requests")
    found += _part(seen, "controller", "nothing is scaled")
    if is_whole:
        found += _keysmanagers(seen)
        found += _lease(seen, now)
        found += _functions(seen)
        found += _admission(seen)
        found += _ingresses(seen)
        found += _versions(seen)
        found += _clocks(seen, now)
    if seen.hidden:
        found.append(
            _check("warn", "what this account may see", "everything", "; ".join(seen.hidden), "not looked at")
        )
    return found


def gateway_timeout_s(seen: Seen) -> float | None:
    """KEYSTAGE_TIMEOUT_S of the gateway's pods, None: not seen."""
    for pod in _component(seen, "gateway"):
        for container in pod["spec"]["containers"]:
            for variable in container.get("env", ()):
                if variable["name"] == "KEYSTAGE_TIMEOUT_S" and "value" in variable:
                    return float(variable["value"])
    return None


def _check(level: Level, thing: str, bound: str, actual: str, advice: str = "") -> Check:
    return Check(area=AREA, level=level, thing=thing, bound=bound, actual=actual, advice=advice)


def _numbers(text: str) -> tuple[int, int]:
    """First two numbers of a version; (0, 0) where there are none."""
    found = re.match(r"v?(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _version(seen: Seen) -> Check:
    major, minor = LEAST_VERSION
    return judged(
        AREA,
        "version",
        f"{major}.{minor} or newer",
        seen.version,
        "fail",
        "upgrade the cluster",
        is_met=_numbers(seen.version) >= LEAST_VERSION,
    )


def _definition(seen: Seen) -> Check:
    needed = {"functions", "functions/status", "functions/scale"}
    return judged(
        AREA,
        "custom resource functions.keystage.dev",
        "served as keystage.dev/v1 with status and scale",
        "absent" if seen.ours is None else ", ".join(sorted(seen.ours)),
        "fail",
        "helm install with crds.install=true",
        is_met=seen.ours is not None and needed <= seen.ours,
    )


def _resize(seen: Seen) -> Check:
    is_met = "pods/resize" in seen.core
    return judged(
        AREA,
        "in-place resize",
        "subresource pods/resize (beta since 1.33, stable since 1.35)",
        "served" if is_met else f"not served by {seen.version}",
        "warn",
        "the CPU compensator cannot act, replicas are added instead",
        is_met=is_met,
    )


def _metrics(seen: Seen) -> Check:
    return judged(
        AREA,
        "metrics.k8s.io",
        "a metrics server",
        "served" if seen.has_metrics else "absent",
        "warn",
        "`faas-cli describe` shows no CPU and memory; nothing else needs it",
        is_met=seen.has_metrics,
    )


def _rights(seen: Seen) -> Iterator[Check]:
    if seen.missing is None:
        return
    person = seen.taken_for not in ("gateway", "controller")
    yield judged(
        AREA,
        f"rights of {seen.user}",
        f"those of {seen.taken_for}",
        "all" if not seen.missing else f"lacks {_named(list(seen.missing))}",
        "warn" if person else "fail",
        "ask who may make roles"
        if person
        else "the chart's roles are not those of this version: helm upgrade",
        is_met=not seen.missing,
    )


def _nodes(seen: Seen) -> Iterator[Check]:
    if seen.nodes is None:
        return
    names = [_name(node) for node in seen.nodes]
    unready = [_name(node) for node in seen.nodes if not _is_condition(node, "Ready")]
    yield judged(
        AREA,
        "nodes",
        "all Ready",
        f"{len(names) - len(unready)} of {len(names)}" + (f", not {_named(unready)}" if unready else ""),
        "fail" if len(unready) == len(names) else "warn",
        "no stages are placed there",
        is_met=bool(names) and not unready,
    )
    twice = [_name(node) for node in seen.nodes if _vendor_units(node) > 0 and _gpus(node)]
    yield judged(
        AREA,
        "GPUs handed out",
        f"by {VENDOR_RESOURCE} or by {GPU_RESOURCE}<n> on a node, never by both",
        f"{sum(map(_gpus, seen.nodes))} by Keystage"
        if not twice
        else f"{VENDOR_RESOURCE} too on {_named(twice)}",
        "fail",
        "two pods may get the same GPU: label these nodes nvidia.com/gpu.deploy.device-plugin=false",
        is_met=not twice,
    )
    unused = [_name(node) for node in seen.nodes if _vendor_units(node) > 0 and not _gpus(node)]
    if unused:
        yield _check(
            "warn",
            "GPUs for stages",
            f"{GPU_RESOURCE}<n> from Keystage's device plugin",
            f"{VENDOR_RESOURCE} alone on {_named(unused)}",
            "GPU stages are not placed there: gpu.enabled=true, and take them from the vendor's plugin",
        )
    old = [
        f"{_name(node)} ({node['status']['nodeInfo']['kernelVersion']})"
        for node in seen.nodes
        if _numbers(node["status"].get("nodeInfo", {}).get("kernelVersion", "")) < LEAST_KERNEL
    ]
    yield judged(
        AREA,
        "kernels",
        "Linux 5.1 or newer (sealed memory files)",
        "all" if not old else _named(old),
        "warn",
        "stages there load their parameters themselves",
        is_met=not old,
    )


def _part(seen: Seen, part: str, advice: str) -> Iterator[Check]:
    if seen.system is None:
        return
    pods = _component(seen, part)
    good = sum(_is_condition(pod, "Ready") for pod in pods)
    yield judged(
        AREA,
        f"{part} in {seen.namespace}",
        "1 ready pod or more",
        f"{good} of {len(pods)}",
        "fail",
        f"{advice}; is {seen.namespace} the release's namespace?",
        is_met=good > 0,
    )


def _keysmanagers(seen: Seen) -> Iterator[Check]:
    if seen.system is None or seen.nodes is None:
        return
    there = {
        pod["spec"].get("nodeName") for pod in _component(seen, "keysmanager") if _is_condition(pod, "Ready")
    }
    without = [
        _name(node) for node in seen.nodes if _is_condition(node, "Ready") and _name(node) not in there
    ]
    yield judged(
        AREA,
        "KeysManagers",
        "a ready one on every ready node",
        f"{len(there)}" + (f", none on {_named(without)}" if without else ""),
        "warn",
        "parked pods there load parameters themselves, and slower",
        is_met=not without,
    )


def _lease(seen: Seen, now: dt.datetime) -> Iterator[Check]:
    if seen.lease is None:
        return
    spec = seen.lease.get("spec", {})
    if not spec.get("renewTime"):
        if _component(seen, "controller"):
            yield _check("fail", "leading controller", "one", "none", "see the controllers' logs")
        return
    age_s = (now - dt.datetime.fromisoformat(spec["renewTime"])).total_seconds()
    yield judged(
        AREA,
        "leading controller",
        f"renewed within {LEASE_S:g} s",
        f"{spec.get('holderIdentity') or 'nobody'}, {age_s:.0f} s ago",
        "fail",
        "nothing is scaled; see the controllers' logs",
        is_met=age_s <= LEASE_S and bool(spec.get("holderIdentity")),
    )


def _functions(seen: Seen) -> Iterator[Check]:
    for function in seen.functions or ():
        status = function.get("status", {})
        trouble = list(status.get("trouble", ()))
        if status.get("observedGeneration", 0) < function["metadata"].get("generation", 0):
            trouble.append("its present state was not acted on by a controller yet")
        if trouble:
            ready = f"{status.get('ready', 0)} of {status.get('desired', 0)} ready"
            yield _check(
                "warn", f"function {_name(function)}", "no trouble", f"{ready}: {_named(trouble)}", ""
            )


def _admission(seen: Seen) -> Iterator[Check]:
    """Stage pods have a folder of their node (hostPath), which both stricter standards refuse."""
    if seen.labels is None:
        return
    level = seen.labels.get("pod-security.kubernetes.io/enforce", "privileged")
    has_keysmanager = bool(_component(seen, "keysmanager"))
    yield judged(
        AREA,
        f"pod security of {seen.function_namespace}",
        "privileged where there are KeysManagers or bundles.hostPath (stages mount a folder of the node)",
        level,
        "fail",
        "stage pods are refused: label it privileged, or set keysmanager.enabled=false",
        is_met=level == "privileged" or not has_keysmanager,
    )


def _ingresses(seen: Seen) -> Iterator[Check]:
    """Time-outs and buffers of whoever stands before the gateway, where its annotations tell."""
    timeout_s = gateway_timeout_s(seen) or 600.0
    for ingress in _nginx(seen):
        annotations = ingress["metadata"].get("annotations", {})
        read_s = _seconds(annotations.get(_NGINX + "read-timeout", ""))
        yield judged(
            AREA,
            f"read time-out of ingress {_name(ingress)}",
            f"more than the gateway's {timeout_s:g} s",
            f"{read_s:g} s",
            "warn",
            f"longer answers are cut off with 504: annotation {_NGINX}read-timeout",
            is_met=read_s > timeout_s,
        )
        buffering = annotations.get(_NGINX + "buffering", "off")
        yield judged(
            AREA,
            f"buffering of ingress {_name(ingress)}",
            "off",
            buffering,
            "warn",
            "streamed tokens arrive in lumps",
            is_met=buffering == "off",
        )


def _versions(seen: Seen) -> Iterator[Check]:
    """Versions of the release's parts, by their images' tags."""
    if seen.system is None:
        return
    parts = {
        part: doctor_versions.of_image(pod["spec"]["containers"][0].get("image", ""))
        for part in ("gateway", "controller", "keysmanager")
        for pod in _component(seen, part)
    }
    if any(parts.values()):
        yield doctor_versions.check(AREA, {doctor_versions.HERE: doctor_versions.own(), **parts})


def _clocks(seen: Seen, now: dt.datetime) -> Iterator[Check]:
    if seen.nodes is not None:
        yield doctor_clock.check(AREA, doctor_clock.of_cluster(seen.nodes, seen.lease, now))


def ingress_links(seen: Seen) -> tuple[Link, ...]:
    """The ingress that waits least for an answer, where annotations tell; none where there is none."""
    found = [
        Link(
            f"ingress {_name(ingress)}",
            f"annotation {_NGINX}read-timeout",
            _seconds(ingress["metadata"].get("annotations", {}).get(_NGINX + "read-timeout", "")),
        )
        for ingress in _nginx(seen)
    ]
    return (min(found, key=lambda link: link.seconds),) if found else ()


def _nginx(seen: Seen) -> list[Object]:
    """Ingresses that ingress-nginx serves."""
    return [
        ingress
        for ingress in seen.ingresses or ()
        if "nginx" in ingress["spec"].get("ingressClassName", "")
        or any(name.startswith(_NGINX) for name in ingress["metadata"].get("annotations", {}))
    ]


def _seconds(text: str) -> float:
    """A time-out of ingress-nginx; it takes its default in place of what is no number."""
    return float(text) if text.isdecimal() else _NGINX_READ_S


def _component(seen: Seen, name: str) -> list[Object]:
    return [
        pod
        for pod in seen.system or ()
        if pod["metadata"].get("labels", {}).get(COMPONENT_LABEL) == name
        and "deletionTimestamp" not in pod["metadata"]
    ]


def _name(value: Object) -> str:
    name: str = value["metadata"]["name"]
    return name


def _named(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _is_condition(value: Object, kind: str) -> bool:
    conditions = value.get("status", {}).get("conditions", ())
    return any(c["type"] == kind and c["status"] == "True" for c in conditions)


def _vendor_units(node: Object) -> int:
    return int(node["status"].get("allocatable", {}).get(VENDOR_RESOURCE, "0"))


def _gpus(node: Object) -> int:
    """GPUs that Keystage's plugin advertises there."""
    allocatable = node["status"].get("allocatable", {})
    return sum(name.startswith(GPU_RESOURCE) and int(units) > 0 for name, units in allocatable.items())
