"""The KeysManagers of all nodes: what is where, and what each shall keep and may give out.

Before it: their pods (`world`), key-stage lists (`wishes`), stage pods. After it: the platform reads which
parameters lie in which node's memory; `activate` tells of a pod just before it is activated. One thread goes
round: it asks each for its status once a second and tells it what changed. A KeysManager that started anew
has forgotten what it was told: it is told again. One that cannot be reached costs starts their speed, nothing
else. It must not decide what a key stage is.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from keystage.keysmanager.api import NodeStatus
from keystage.keysmanager.pod_api import GRANTS_PATH, Grant
from keystage.kubernetes.api import (
    CONTAINER,
    FUNCTION_LABEL,
    KEYSMANAGER_PORT,
    ROLE_LABEL,
)
from keystage.kubernetes.asking import Asking, NotAnswered
from keystage.kubernetes.polled import Polled
from keystage.kubernetes.view import address_of, is_ended, labels_of, spec_of_object
from keystage.kubernetes.world import World
from keystage.local.api import Deployment
from keystage.local.key_stages import resolve, stages_of
from keystage.wire.unreadable import UNREADABLE

EVERY_S = 1.0
TIMEOUT_S = 1.0
KEPT_S = 10.0
"""A status is believed for so long when no newer one comes."""
GRANT_KEPT_S = 30.0
"""A pod that is about to be activated is granted its stage before the informer shows it as a function's."""
STATUS_PATH = "/v1/status"
KEY_STAGES_PATH = "/v1/key-stages"
log = logging.getLogger(__name__)


class _Peer:
    """One KeysManager in one incarnation: what it was told, by path."""

    def __init__(self, started_at_s: float) -> None:
        self.started_at_s = started_at_s
        self.told: dict[str, bytes] = {}
        self.lock = threading.Lock()


class KeysManagers:
    """The link to all of them.

    Args:
        world: their pods, and the functions'.
        asking: the exchanges.
        key_stages: says the key stages of each pipeline, the most important first.
        port: of their TCP face.
    """

    def __init__(
        self,
        world: World,
        asking: Asking,
        key_stages: Callable[[], Mapping[str, Sequence[int]]],
        *,
        port: int = KEYSMANAGER_PORT,
    ) -> None:
        self._world = world
        self._asking = asking
        self._key_stages = key_stages
        self._port = port
        self._peers: dict[str, _Peer] = {}
        self._early: dict[str, tuple[str, Grant, float]] = {}
        self._guard = threading.Lock()
        self._polled = Polled(
            "keysmanagers", self._targets, self._visit, every_s=EVERY_S, now_s=world.clock.now_s
        )

    def start(self) -> None:
        """Begins to ask and to tell."""
        self._polled.start()

    def stop(self) -> None:
        """Ends."""
        self._polled.stop()

    def statuses(self) -> dict[str, NodeStatus]:
        """What each told lately, by node."""
        found: dict[str, NodeStatus] = {}
        pods = self._world.keysmanagers()
        for name, word in self._polled.heard().items():
            node = pods[name].get("spec", {}).get("nodeName", "") if name in pods else ""
            if node and word.answer is not None and self._world.clock.now_s() - word.answered_at_s <= KEPT_S:
                found[node] = word.answer
        return found

    def grant(self, node: str, grant: Grant) -> str:
        """Has a node's KeysManager give a pod these parameters, before anybody asks for them.

        Returns:
            Empty, or why that was not possible: the pod will be refused, and reads its bundle itself.
        """
        with self._guard:
            self._early[grant.pod_uid] = (node, grant, time.monotonic() + GRANT_KEPT_S)
        for name, pod in self._world.keysmanagers().items():
            if pod.get("spec", {}).get("nodeName") == node and (address := self._address(pod)):
                try:
                    self._tell_grants(name, address, node)
                except NotAnswered as error:
                    return str(error)
                return ""
        return f"node {node} has no KeysManager"

    def _targets(self) -> dict[str, str]:
        found = {name: self._address(pod) for name, pod in self._world.keysmanagers().items()}
        with self._guard:
            for gone in self._peers.keys() - found.keys():
                del self._peers[gone]
        return {name: address for name, address in found.items() if address}

    def _address(self, pod: Mapping[str, Any]) -> str:
        return "" if is_ended(pod) else address_of(pod, self._port)

    def _visit(self, name: str, address: str) -> NodeStatus:
        """Asks one, then tells it what it does not know yet."""
        body = self._asking.ask("GET", address, STATUS_PATH, timeout_s=TIMEOUT_S)
        try:
            status = msgspec.json.decode(body, type=NodeStatus)
        except UNREADABLE as error:
            raise NotAnswered(f"KeysManager {name}: {error}") from error
        peer = self._peer(name)
        if peer.started_at_s != status.started_at_s:
            peer = _Peer(status.started_at_s)
            with self._guard:
                self._peers[name] = peer
        node = self._world.keysmanagers().get(name, {}).get("spec", {}).get("nodeName", "")
        try:
            self._tell_key_stages(name, address)
            self._tell_grants(name, address, node)
        except NotAnswered as error:  # told again in the next round
            log.warning("KeysManager %s on node %s was not told: %s", name, node, error)
        return status

    def _peer(self, name: str) -> _Peer:
        with self._guard:
            return self._peers.setdefault(name, _Peer(0.0))

    def _tell_key_stages(self, name: str, address: str) -> None:
        lists = self._key_stages()
        if not lists:
            return  # a new leader has not ranked anything yet: what they keep is better than nothing
        wanted = resolve(lists, self._deployments())
        self._tell(name, address, KEY_STAGES_PATH, lambda: msgspec.json.encode(wanted))

    def _tell_grants(self, name: str, address: str, node: str) -> None:
        self._tell(name, address, GRANTS_PATH, lambda: msgspec.json.encode(self._grants(node)))

    def _tell(self, name: str, address: str, path: str, body: Callable[[], bytes]) -> None:
        """Tells one list if it is news; made under the lock, so that the newest is told last."""
        peer = self._peer(name)
        with peer.lock:
            text = body()
            if peer.told.get(path) != text:
                self._asking.ask("PUT", address, path, body=text, timeout_s=TIMEOUT_S)
                peer.told[path] = text

    def _deployments(self) -> list[Deployment]:
        found = []
        for function, obj in self._world.functions().items():
            try:
                spec = spec_of_object(obj)
            except msgspec.ValidationError:
                continue  # whoever reconciles it says so
            found.append(Deployment(service=function, envVars=spec.envVars, labels=spec.labels))
        return found

    def _grants(self, node: str) -> list[Grant]:
        with self._guard:
            now_s = time.monotonic()
            self._early = {uid: early for uid, early in self._early.items() if early[2] > now_s}
            early = [grant for where, grant, _ in self._early.values() if where == node]
        return grants_of(node, self._world.pods().values(), self._deployments(), early)


def grants_of(
    node: str,
    pods: Iterable[Mapping[str, Any]],
    deployments: Iterable[Deployment],
    early: Iterable[Grant] = (),
) -> list[Grant]:
    """What pods on a node may have; a parked pod nothing.

    Args:
        node: the node.
        pods: functions' pods.
        deployments: of the functions, for pods that were parked and do not say their stage.
        early: grants of pods that are about to be a function's.
    """
    envs = {deployment.service: deployment.envVars for deployment in deployments}
    found = {grant.pod_uid: grant for grant in early}
    for pod in pods:
        labels = labels_of(pod)
        function = labels.get(FUNCTION_LABEL)
        if not function or labels.get(ROLE_LABEL) != "stage" or is_ended(pod):
            continue
        if pod.get("spec", {}).get("nodeName") != node:
            continue
        env = {**envs.get(function, {}), **_env_of(pod)}
        stages, bundle = stages_of(env.get("KEYSTAGE_STAGES", "")), env.get("KEYSTAGE_BUNDLE", "")
        if stages and bundle:
            uid = pod["metadata"]["uid"]
            found[uid] = Grant(pod_uid=uid, bundle=bundle, stages=tuple(stages))
    return [found[uid] for uid in sorted(found)]


def _env_of(pod: Mapping[str, Any]) -> dict[str, str]:
    """What a pod's own environment says literally."""
    for container in pod.get("spec", {}).get("containers") or ():
        if container.get("name") == CONTAINER:
            return {e["name"]: e["value"] for e in container.get("env") or () if e.get("value")}
    return {}
