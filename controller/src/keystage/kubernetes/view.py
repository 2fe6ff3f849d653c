"""From Kubernetes objects to the vocabulary of the local world: functions, replicas, trouble. Pure.

Before it: informers hold custom resources, pods and nodes as JSON. After it: the gateway's backend, the
controller's platform and `plan` read `FunctionRecord` and `ReplicaRecord`, so that they agree on what is
ready. An object may be of any age or half filled: what is missing counts as not said. It must not decide.
"""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import msgspec

from keystage.kubernetes.api import (
    ACTIVATED_ANNOTATION,
    FUNCTION_LABEL,
    HTTP_PORT,
    LEAVING_ANNOTATION,
    OVERRIDE_UNTIL_ANNOTATION,
    POOL_LABEL,
    SERVING_ANNOTATION,
    TEMPLATE_LABEL,
    VIA_ANNOTATION,
    WAKE_ANNOTATION,
    FunctionSpec,
    FunctionStatus,
    deployment_of,
)
from keystage.local.api import FunctionRecord, Override, ReplicaRecord, ReplicaState
from keystage.local.labels import MAX_REPLICAS

Object = Mapping[str, Any]
"""A Kubernetes object as JSON."""

NEVER_S = 4102444800.0
"""Unix seconds of the year 2100: a wish whose end the controller has not written yet."""
MAX_TROUBLE = 8
MAX_CORES = 10_000.0
"""More is no number of ours: somebody else wrote the status."""
MAX_LINE = 300
_QUIET = ("ContainerCreating", "PodInitializing", "")
"""Why a container waits while all is well."""
_FAILING = ("CrashLoopBackOff",)
_ENDED = ("Failed", "Succeeded")


def seconds(text: object) -> float:
    """Unix seconds of a time-stamp (RFC 3339), 0 for what is none."""
    if not isinstance(text, str):
        return 0.0
    try:
        return dt.datetime.fromisoformat(text).timestamp()
    except ValueError:
        return 0.0


def number(text: object) -> float:
    """A finite number that an annotation holds, 0 for what is none."""
    try:
        value = float(text) if isinstance(text, str) else 0.0
    except ValueError:
        return 0.0
    return value if math.isfinite(value) else 0.0


def labels_of(obj: Object) -> Mapping[str, str]:
    """Labels of an object."""
    return obj.get("metadata", {}).get("labels") or {}


def annotations_of(obj: Object) -> Mapping[str, str]:
    """Annotations of an object."""
    return obj.get("metadata", {}).get("annotations") or {}


def name_of(obj: Object) -> str:
    """Name of an object."""
    return str(obj["metadata"]["name"])


def spec_of_object(obj: Object) -> FunctionSpec:
    """What a custom resource asks for.

    Raises:
        msgspec.ValidationError: a field is of another type than the schema says.
    """
    return msgspec.convert(obj.get("spec") or {}, FunctionSpec)


def status_of_object(obj: Object) -> FunctionStatus:
    """What the controller wrote last; empty where that cannot be read."""
    try:
        status = msgspec.convert(obj.get("status") or {}, FunctionStatus)
    except msgspec.ValidationError:
        return FunctionStatus()
    is_odd = not 0 <= (status.desired or 0) <= MAX_REPLICAS or not 0 <= (status.cores or 0) <= MAX_CORES
    return FunctionStatus() if is_odd else status


def generation_of(template: str) -> int:
    """Number of a template, from its hash: equal templates have equal numbers."""
    try:
        return int(template[:8], 16)
    except ValueError:
        return 0


def record_of(obj: Object) -> FunctionRecord:
    """A function as the local world describes it.

    Raises:
        msgspec.ValidationError: the resource's spec does not fit its schema.
    """
    meta = obj["metadata"]
    spec, status = spec_of_object(obj), status_of_object(obj)
    annotations = annotations_of(obj)
    override = None
    if spec.replicas is not None:
        until_s = number(annotations.get(OVERRIDE_UNTIL_ANNOTATION))
        override = Override(max(0, spec.replicas), until_s or NEVER_S)
    return FunctionRecord(
        deployment=deployment_of(meta["name"], meta.get("namespace", ""), spec),
        created_at_s=seconds(meta.get("creationTimestamp")),
        desired=status.desired,
        override=override,
        wake=WAKE_ANNOTATION in annotations,
        generation=generation_of(status.template),
        cores=status.cores,
    )


def replica_of(pod: Object, now_s: float, lost: Collection[str] = ()) -> ReplicaRecord | None:
    """A pod as a replica.

    Args:
        pod: the pod.
        now_s: Unix seconds, for what says no time.
        lost: names of nodes that are not heard from (`lost_nodes`): their replicas have failed.

    Returns:
        None for a pod that is of no function, as a parked one.
    """
    labels, annotations = labels_of(pod), annotations_of(pod)
    function = labels.get(FUNCTION_LABEL)
    if not function:
        return None
    node = pod.get("spec", {}).get("nodeName", "")
    state = "failed" if node in lost and not is_leaving(pod) else state_of(pod)
    reason = ""
    if state == "failed":
        reason = f"node {node} is not ready" if node in lost else next(_words(pod), "it ended")
    via, _, source = annotations.get(VIA_ANNOTATION, "" if POOL_LABEL in labels else "process").partition("/")
    started_s = number(annotations.get(ACTIVATED_ANNOTATION)) or seconds(
        pod["metadata"].get("creationTimestamp")
    )
    return ReplicaRecord(
        replica=pod["metadata"]["name"],
        function=function,
        generation=generation_of(labels.get(TEMPLATE_LABEL, "")),
        state=state,
        pid=0,
        address=address_of(pod),
        started_at_s=started_s or now_s,
        ready_at_s=_ready_at_s(pod) if state == "ready" else 0.0,
        restarts=sum(s.get("restartCount", 0) for s in _containers(pod)),
        reason=reason,
        node=node,
        via=via,
        source=source,
    )


def state_of(pod: Object) -> ReplicaState:
    """State of a function's pod; a parked one that was given a function is ready once it said so."""
    if is_leaving(pod):
        return "draining"
    if is_ended(pod):
        return "failed"
    is_told = POOL_LABEL not in labels_of(pod) or SERVING_ANNOTATION in annotations_of(pod)
    if is_ready(pod) and is_told:
        return "ready"
    waits = (s.get("state", {}).get("waiting", {}).get("reason") for s in _containers(pod))
    return "failed" if any(reason in _FAILING for reason in waits) else "starting"


def is_leaving(pod: Object) -> bool:
    """Whether it gets no new requests: it is being deleted, or was chosen to go."""
    return is_deleted(pod) or LEAVING_ANNOTATION in annotations_of(pod)


def is_deleted(obj: Object) -> bool:
    """Whether its deletion has begun, whoever asked for it."""
    return bool(obj["metadata"].get("deletionTimestamp"))


def is_ended(pod: Object) -> bool:
    """Whether its program has ended for good."""
    return pod.get("status", {}).get("phase") in _ENDED


def is_ready(pod: Object) -> bool:
    """Whether the kubelet says that it answers on `/_/ready`."""
    return condition(pod, "Ready").get("status") == "True"


def unschedulable_since_s(pod: Object) -> float:
    """Unix seconds since which the scheduler finds no place for a pod, 0: it has not said that."""
    told = condition(pod, "PodScheduled")
    if told.get("status") == "False" and told.get("reason") == "Unschedulable":
        return seconds(told.get("lastTransitionTime"))
    return 0.0


def condition(obj: Object, kind: str) -> Mapping[str, Any]:
    """One condition of an object, empty where there is none of that type."""
    for entry in obj.get("status", {}).get("conditions") or ():
        if entry.get("type") == kind:
            return dict(entry)
    return {}


def address_of(pod: Object, port: int = HTTP_PORT) -> str:
    """`host:port` of its HTTP server, empty before it has an address."""
    ip = pod.get("status", {}).get("podIP", "")
    if not ip:
        return ""
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"


def lost_nodes(nodes: Iterable[Object], now_s: float, patience_s: float) -> frozenset[str]:
    """Nodes that have not been ready for so long: nothing on them can be counted on."""
    lost = set()
    for node in nodes:
        told = condition(node, "Ready")
        if told.get("status") in ("False", "Unknown"):
            since_s = seconds(told.get("lastTransitionTime"))
            if now_s - since_s >= patience_s:
                lost.add(name_of(node))
    return frozenset(lost)


def trouble_of(pods: Iterable[Object]) -> tuple[str, ...]:
    """Why pods do not come up, in the words of scheduler, kubelet and runtime; each line once."""
    lines: dict[str, None] = {}
    for pod in pods:
        if is_leaving(pod):
            continue
        for words in _words(pod):
            lines[f"{name_of(pod)}: {words}"[:MAX_LINE]] = None
    return tuple(lines)[:MAX_TROUBLE]


def _words(pod: Object) -> Iterator[str]:
    status = pod.get("status", {})
    if status.get("reason"):
        yield _joined(status["reason"], status.get("message"))
    told = condition(pod, "PodScheduled")
    if told.get("status") == "False":
        yield _joined(told.get("reason", "Unschedulable"), told.get("message"))
    for entry in _containers(pod):
        state = entry.get("state", {})
        waiting = state.get("waiting", {})
        if waiting.get("reason", "") not in _QUIET:
            yield _joined(waiting["reason"], waiting.get("message"))
        ended = state.get("terminated") or (waiting and entry.get("lastState", {}).get("terminated"))
        if ended:
            why = _joined(ended.get("reason"), ended.get("message"))
            yield f"ended with code {ended.get('exitCode')} ({why})"


def _joined(reason: str | None, message: str | None) -> str:
    first = " ".join((message or "").split())
    return f"{reason or 'no reason given'}: {first}" if first else reason or "no reason given"


def _containers(pod: Object) -> list[dict[str, Any]]:
    return pod.get("status", {}).get("containerStatuses") or []


def _ready_at_s(pod: Object) -> float:
    told_s = number(annotations_of(pod).get(SERVING_ANNOTATION))
    return told_s or seconds(condition(pod, "Ready").get("lastTransitionTime"))
