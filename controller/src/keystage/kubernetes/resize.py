"""CPU cores of running stage pods: changed in place, without a restart.

Before it: the policy gave a function's replicas cores (`status.cores`). After it: the `resize` subresource of
each pod, and the worker's number of threads over HTTP. What can go wrong, and what is done (seen with v1.36):

    the API server refuses (403: more than the node has; 422: another class)   as infeasible
    condition PodResizePending/Infeasible                                      as infeasible
    condition PodResizePending/Deferred: others have the cores now             awaited, then infeasible
    condition PodResizeInProgress that does not end                            awaited, then infeasible

Infeasible: the function keeps the cores that all its pods have, and counts as capped for a while; the policy
then takes a replica more. The worker has as many threads as it has cores: fewer before cores are taken from
it, more once it has them. Only CPU is resized.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from keystage.kubernetes.api import CONTAINER, CONTROLLER_MANAGER, CORES_ANNOTATION, FUNCTION_LABEL
from keystage.kubernetes.asking import Asking, NotAnswered
from keystage.kubernetes.client import PODS, Object
from keystage.kubernetes.cores import (
    asked_of,
    base_cores,
    cores_in,
    cpu_of,
    deployed_resources,
    given_to,
    threads_of,
    with_cores,
)
from keystage.kubernetes.errors import ClusterError, ClusterUnavailable, Conflict, NotFound
from keystage.kubernetes.view import address_of, condition, labels_of, record_of, seconds, state_of
from keystage.kubernetes.world import World
from keystage.local.api import FunctionRecord, role_of
from keystage.wire.threads import MAX_THREADS, THREADS_PATH, Threads

EVERY_S = 0.5
DEFERRED_S = 10.0
"""Cores that others leave are gone again by the time that a new pod is ready (some seconds)."""
IN_PROGRESS_S = 60.0
"""The kubelet needs a second; some versions never end."""
CAPPED_S = 120.0
"""After that the policy may try again: nodes change."""
TELL_S = 1.0
FIRST_PAUSE_S, MOST_PAUSE_S = 0.5, 10.0
"""Before a worker that did not answer is told again."""
Progress = Literal["settled", "moving", "deferred", "infeasible"]
log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Capped:
    """A function that cannot have more cores now.

    Attributes:
        cores: what all its pods have.
        reason: in the server's or the kubelet's words.
        until_s: `time.monotonic` from which it may be tried again.
    """

    cores: float
    reason: str
    until_s: float


def progress_of(pod: Mapping[str, Any], now_s: float) -> tuple[Progress, str]:
    """How far a pod's last resize is, and the kubelet's words.

    Args:
        pod: as it is.
        now_s: Unix seconds.
    """
    pending = condition(pod, "PodResizePending")
    if pending.get("status") == "True":
        words = f"{pending.get('reason')}: {pending.get('message', '')}"
        if pending.get("reason") == "Infeasible":
            return "infeasible", words
        if now_s - (seconds(pending.get("lastTransitionTime")) or now_s) >= DEFERRED_S:
            return "infeasible", f"{words} (for {DEFERRED_S:g} s)"
        return "deferred", words
    moving = condition(pod, "PodResizeInProgress")
    if moving.get("status") == "True":
        words = f"{moving.get('reason') or 'in progress'}: {moving.get('message', '')}"
        if now_s - (seconds(moving.get("lastTransitionTime")) or now_s) >= IN_PROGRESS_S:
            return "infeasible", f"{words} (for {IN_PROGRESS_S:g} s)"
        return "moving", words
    return ("settled" if cpu_of(given_to(pod)) == cpu_of(asked_of(pod)) else "moving"), ""


def resize_patch(
    pod: Mapping[str, Any], cores: float, deployed: Mapping[str, Any], base: float
) -> Object | None:
    """The patch that gives a pod other cores, None where it asks for them already (or states none).

    Args:
        pod: as it is.
        cores: wanted.
        deployed: resources that its function's pods are made with.
        base: cores that these stand for.
    """
    wanted = with_cores(deployed, cores, base)
    if cpu_of(wanted) == cpu_of(asked_of(pod)):
        return None
    cpu = {name: {"cpu": part["cpu"]} for name, part in wanted.items() if "cpu" in part}
    if not cpu:
        return None
    return {"spec": {"containers": [{"name": CONTAINER, "resources": cpu}]}}


class Resizer:
    """The thread of the leader.

    Args:
        world: functions and pods.
        asking: for the workers.
        withdraw: states that a function's replicas shall have these cores after all.
        tell: tells people of a function (its custom resource) that it is so, and why.
        default_requests: of a stage that states no resources (`manifests.Settings.requests`).
    """

    def __init__(
        self,
        world: World,
        asking: Asking,
        withdraw: Callable[[str, float], None],
        tell: Callable[[Object, str], None],
        *,
        default_requests: Mapping[str, str],
    ) -> None:
        self._world = world
        self._asking = asking
        self._withdraw = withdraw
        self._say = tell
        self._default = dict(default_requests)
        self._capped: dict[str, Capped] = {}
        self._told: dict[str, int] = {}
        self._untold: dict[str, tuple[int, float]] = {}
        self._stop = threading.Event()
        self._woken = threading.Event()
        self._thread = threading.Thread(target=self._run, name="resize", daemon=True)

    def start(self) -> None:
        """Begins."""
        self._world.on_change(self._woken.set)
        self._thread.start()

    def stop(self) -> None:
        """Ends after the exchange in progress."""
        self._stop.set()
        self._woken.set()
        if self._thread.is_alive():
            self._thread.join()

    def capped(self) -> dict[str, Capped]:
        """Functions that cannot have more cores now."""
        now_s = time.monotonic()
        return {name: capped for name, capped in self._capped.items() if now_s < capped.until_s}

    def round(self) -> None:
        """Looks at every pod of every function whose cores were set, and does what is missing."""
        self._capped = self.capped()
        pods = self._pods()
        uids = {pod["metadata"]["uid"] for pod in pods}
        self._told = {uid: threads for uid, threads in self._told.items() if uid in uids}
        self._untold = {uid: tries for uid, tries in self._untold.items() if uid in uids}
        for obj in self._world.functions().values():
            try:
                record = record_of(obj)
            except msgspec.ValidationError:
                continue  # whoever reconciles it says so
            name = record.deployment.service
            if record.cores is None or role_of(record.deployment) != "stage":
                continue
            mine = [p for p in pods if labels_of(p)[FUNCTION_LABEL] == name]
            self._function(obj, record, mine)

    def _run(self) -> None:
        while not self._stop.is_set():
            self._woken.clear()
            try:
                self.round()
            except ClusterError as error:
                log.warning("cores are not changed now: %s", error)
            self._stop.wait(EVERY_S / 5)  # changes come in bursts
            self._woken.wait(EVERY_S)

    def _pods(self) -> list[Object]:
        """Those that run and stay."""
        return [
            pod
            for pod in self._world.pods().values()
            if labels_of(pod).get(FUNCTION_LABEL) and state_of(pod) in ("ready", "starting") and _runs(pod)
        ]

    def _function(self, obj: Object, record: FunctionRecord, pods: list[Object]) -> None:
        deployment = record.deployment
        deployed, base = deployed_resources(deployment, self._default), base_cores(deployment)
        capped = self._capped.get(deployment.service)
        wanted = record.cores or base
        cores = wanted if capped is None else min(wanted, capped.cores)
        least = min((_given(pod, deployed, base, cores) for pod in pods), default=cores)
        for pod in pods:
            if self._stop.is_set():
                return
            now = _given(pod, deployed, base, cores)
            if state_of(pod) == "ready":
                self._tell(pod, threads_of(min(cores, now)))
            trouble = ""
            patch = resize_patch(pod, cores, deployed, base)
            if patch is not None:
                trouble = self._resize(pod, patch, cores)
            else:
                progress, words = progress_of(pod, self._world.clock.now_s())
                trouble = words if progress == "infeasible" and cores > least else ""
            if trouble:
                self._cap(obj, record, least, trouble)
                return

    def _resize(self, pod: Object, patch: Object, cores: float) -> str:
        """Asks for it; answers why it can never be, in the server's words."""
        name, cluster = pod["metadata"]["name"], self._world.cluster
        try:
            cluster.patch_strategic(PODS, name, patch, manager=CONTROLLER_MANAGER, subresource="resize")
            note: Object = {"metadata": {"annotations": {CORES_ANNOTATION: f"{cores:g}"}}}
            cluster.patch(PODS, name, note, manager=CONTROLLER_MANAGER)
        except (NotFound, Conflict):
            return ""  # gone, or changed meanwhile: the next round sees
        except ClusterUnavailable:
            raise
        except ClusterError as error:
            return str(error)
        log.info("pod %s is asked to have %g cores", name, cores)
        return ""

    def _cap(self, obj: Object, record: FunctionRecord, cores: float, reason: str) -> None:
        name = record.deployment.service
        self._capped = {**self._capped, name: Capped(cores, reason, time.monotonic() + CAPPED_S)}
        self._withdraw(name, cores)
        self._say(obj, f"{name} keeps {cores:g} cores a replica, {record.cores:g} cannot be had: {reason}")

    def _tell(self, pod: Object, threads: int) -> None:
        uid, threads, now_s = pod["metadata"]["uid"], min(MAX_THREADS, threads), time.monotonic()
        tries, again_s = self._untold.get(uid, (0, 0.0))
        if self._told.get(uid) == threads or now_s < again_s:
            return
        body = msgspec.json.encode(Threads(threads))
        try:
            self._asking.ask("PUT", address_of(pod), THREADS_PATH, body=body, timeout_s=TELL_S)
        except NotAnswered as error:
            if not tries:
                log.warning("%s was not told its %d threads: %s", pod["metadata"]["name"], threads, error)
            if not 400 <= error.status < 500:
                self._untold[uid] = (
                    tries + 1,
                    now_s + min(MOST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(tries, 10)),
                )
                return
        self._untold.pop(uid, None)
        self._told[uid] = threads


def _runs(pod: Object) -> bool:
    return any(
        entry.get("name") == CONTAINER and "running" in entry.get("state", {})
        for entry in pod.get("status", {}).get("containerStatuses") or ()
    )


def _given(pod: Object, deployed: Mapping[str, Any], base: float, cores: float) -> float:
    """Cores a pod has; where it states none it has what it is told."""
    found = cores_in(given_to(pod), deployed, base)
    return cores if found is None else found
