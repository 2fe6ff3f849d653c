"""Makes a parked pod a worker: from the decision to its first item in a fraction of a second.

Before it: the reconciler has written onto the pod whose it is, on the condition that nobody changed it, and
has the node's KeysManager told what the pod may have. After it: annotations say that it serves, and how it
started; gateways and the policy then count it as ready. A pod that was told before (the last leader had no
time to note its answer) is asked whether it serves. It must not choose pods.
"""

from __future__ import annotations

import dataclasses
import http.client
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from keystage.keysmanager.pod_api import Activated, Activation
from keystage.kubernetes.api import (
    ACTIVATE_PATH,
    ACTIVATED_ANNOTATION,
    CONTROLLER_MANAGER,
    SERVING_ANNOTATION,
    VIA_ANNOTATION,
)
from keystage.kubernetes.asking import Asking, NotAnswered
from keystage.kubernetes.client import PODS, Cluster, Object
from keystage.kubernetes.errors import ClusterError
from keystage.kubernetes.manifests import Owner, Settings, function_labels, owner_reference
from keystage.kubernetes.manifests_pod import stage_env
from keystage.kubernetes.scene import Function
from keystage.kubernetes.view import address_of, is_ended, is_leaving
from keystage.wire.unreadable import UNREADABLE

READY_PATH = "/_/ready"
ANSWER_S = 10.0
"""Longest wait for one answer; a load that takes longer goes on, and is asked about."""
ASK_S = 2.0
LIMIT_S = 600.0
"""As for any start."""
FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 0.5
_PREFIX = "KEYSTAGE_"
_RESUMED = "standby"
"""How a pod counts as started whose own word was lost."""


class ActivationFailed(ClusterError):
    """The pod said that it cannot become what was asked; it ends, and another takes its place."""


class Abandoned(ClusterError):
    """The pod is gone or is to go: nobody waits for it any longer."""


def activation_patch(pod: Mapping[str, Any], function: Function, at_s: float) -> Object:
    """What makes a parked pod a function's, on condition that it is as it was seen.

    Args:
        pod: as seen.
        function: whose it becomes.
        at_s: Unix seconds of the decision.
    """
    meta = pod["metadata"]
    owner = owner_reference(Owner(function.name, function.uid))
    return {
        "metadata": {
            "uid": meta["uid"],
            "resourceVersion": meta["resourceVersion"],
            "labels": function_labels(function.deployment, function.template),
            "annotations": {ACTIVATED_ANNOTATION: f"{at_s:.3f}"},
            "ownerReferences": [owner],
        }
    }


def activation_of(function: Function, settings: Settings, decided_at_s: float) -> Activation:
    """What the pod is told."""
    env = stage_env(function.deployment, settings, cores=function.cores)
    own = {key: value for key, value in env.items() if key.startswith(_PREFIX)}
    return Activation(function=function.name, env=own, decided_at_s=decided_at_s)


@dataclasses.dataclass(frozen=True, slots=True)
class Activator:
    """Tells pods what to become.

    Attributes:
        cluster: the functions' namespace.
        asking: exchanges with pods.
        now: a pod as the informer shows it.
        stopped: set when this controller ends: nobody waits any longer.
        served: told of each pod that serves: as it is now, what was asked, and its answer.
    """

    cluster: Cluster
    asking: Asking
    now: Callable[[str], Object | None]
    stopped: threading.Event = dataclasses.field(default_factory=threading.Event)
    served: Callable[[Object, Activation, Activated], object] = lambda *_: None

    def tell(self, name: str, uid: str, wanted: Activation) -> Object:
        """Tells one pod, waits until it serves, and notes that on it.

        Returns:
            The pod with the note.

        Raises:
            Abandoned: it went, or was chosen to go.
            ActivationFailed: it cannot become this; its own words.
            ClusterError: the note could not be written; doing all of it again does no harm.
        """
        answer = self._until_it_serves(name, uid, msgspec.json.encode(wanted))
        via = f"{answer.via}/{answer.source}" if answer.source else answer.via
        notes = {SERVING_ANNOTATION: f"{self.cluster.clock.now_s():.3f}", VIA_ANNOTATION: via}
        patch: Object = {"metadata": {"uid": uid, "annotations": notes}}
        pod = self.cluster.patch(PODS, name, patch, manager=CONTROLLER_MANAGER)
        self.served(pod, wanted, answer)
        return pod

    def _until_it_serves(self, name: str, uid: str, body: bytes) -> Activated:
        end_s, pause_s = time.monotonic() + LIMIT_S, FIRST_PAUSE_S
        reason = "it has no address"
        is_told = False
        while time.monotonic() < end_s:
            address = self._address(name, uid)
            if address:
                try:
                    if is_told:
                        if self._serves(address):
                            return Activated(via=_RESUMED)
                    else:
                        told = self.asking.ask("POST", address, ACTIVATE_PATH, body=body, timeout_s=ANSWER_S)
                        return msgspec.json.decode(told, type=Activated)
                except NotAnswered as error:
                    reason = str(error)
                    is_told = is_told or error.status == http.client.CONFLICT
                    if error.status not in (0, http.client.CONFLICT, http.client.SERVICE_UNAVAILABLE):
                        raise ActivationFailed(f"pod {name}: {error}", error.status) from error
                except UNREADABLE as error:
                    raise ActivationFailed(f"pod {name} answered no Activated: {error}") from error
            if self.stopped.wait(pause_s):
                raise Abandoned("the controller ends")
            pause_s = min(LONGEST_PAUSE_S, 1.5 * pause_s)
        raise ActivationFailed(f"pod {name} did not serve within {LIMIT_S:g} s: {reason}")

    def _address(self, name: str, uid: str) -> str:
        pod = self.now(name)
        if pod is None or pod["metadata"].get("uid") != uid or is_leaving(pod) or is_ended(pod):
            raise Abandoned(f"pod {name} is to go")
        return address_of(pod)

    def _serves(self, address: str) -> bool:
        """Whether a pod that was told before is a worker by now."""
        answer = self.asking.ask("GET", address, READY_PATH, timeout_s=ASK_S)
        try:
            said = msgspec.json.decode(answer, type=dict[str, Any])
        except UNREADABLE:
            return True
        return not said.get("parked")
