"""Sends a plan's operations, and takes in what became of them.

Before it: `plan` through `reconciler`. After it: `act` and `activate`, in threads; what they will change is
expected (`expected`) until the informer shows it. An operation that failed leaves no trace: the next plan has
it again, later and later where the failure is the function's own. Belongs to the reconciler's thread.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable

from keystage.keysmanager.pod_api import Grant
from keystage.kubernetes.act import Actor, created, deleted, leaving_patch, pod_for
from keystage.kubernetes.activate import Abandoned, Activator, activation_of, activation_patch
from keystage.kubernetes.backoff import Backoff
from keystage.kubernetes.client import PODS, Object
from keystage.kubernetes.cluster_events import Events
from keystage.kubernetes.errors import (
    ClusterError,
    ClusterUnavailable,
    Conflict,
    Forbidden,
    Invalid,
    NotFound,
)
from keystage.kubernetes.expected import Expected, merged
from keystage.kubernetes.gather import Gathered, hold_key
from keystage.kubernetes.jobs import Jobs
from keystage.kubernetes.keysmanagers import KeysManagers
from keystage.kubernetes.manifests import Owner
from keystage.kubernetes.operations import (
    Activate,
    Apply,
    Create,
    Delete,
    Leave,
    Note,
    Operation,
    Park,
    RemoveWorkload,
)
from keystage.kubernetes.pod_starts import PodStarts
from keystage.kubernetes.scene import Function
from keystage.kubernetes.view import trouble_of
from keystage.local.key_stages import stages_of

DECIDED_S = 1.0
"""A pod activated within so long of the last decision was decided by that; later ones have another cause."""
PAUSE_S = 0.5
"""After the API server could not be reached."""
PARK_HOLD_S = 30.0
"""After a parked pod found no room, or ended."""
log = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True, kw_only=True)
class Sending:
    """What is being done.

    Attributes:
        jobs: calls to the API server; the key of one about a pod is the pod's name.
        activations: pods being told what to become, by name.
        actor: makes the calls.
        activator: tells pods.
        keysmanagers: of the nodes, None: none.
        pods: pods as they will be.
        deployments: Deployments as they will be.
        backoff: failures.
        events: for people.
        starts: counts how long fresh pods take.
    """

    jobs: Jobs
    activations: Jobs
    actor: Actor
    activator: Activator
    keysmanagers: KeysManagers | None
    pods: Expected
    deployments: Expected
    backoff: Backoff
    events: Events
    starts: PodStarts = dataclasses.field(default_factory=PodStarts)
    _paused_until_s: float = 0.0
    _trouble: dict[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    """By function: the template that was refused, and why."""
    _parking_held: dict[str, float] = dataclasses.field(default_factory=dict)
    _useless: set[str] = dataclasses.field(default_factory=set)
    """Pods that refused what they were told; they are being deleted."""
    _owed: list[Note] = dataclasses.field(default_factory=list)
    """What outcomes have to tell."""
    _kept: dict[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    _faults: Backoff = dataclasses.field(default_factory=Backoff)
    """Refusals by key of `jobs`: what is refused once is tried again at once, then later and later."""

    def trouble(self) -> dict[str, tuple[str, str]]:
        """By function: the template whose objects the API server refused, and its words."""
        return dict(self._trouble)

    def parking_held(self) -> dict[str, float]:
        """By pipeline: Unix seconds before which no pod is parked."""
        return dict(self._parking_held)

    def send(self, operations: Iterable[Operation], gathered: Gathered) -> bool:
        """Sends operations; those about something that is busy are left to a later plan.

        Returns:
            Whether anything is sent now: not for a moment after the API server could not be reached.
        """
        at_s = gathered.scene.at_s
        if at_s < self._paused_until_s:
            return False
        owed, self._owed = self._owed, []
        self._useless &= gathered.pods.keys()
        self._faults.keep_only({*gathered.pods, *map(_workload_key, gathered.scene.workloads)})
        self._trouble = {name: why for name, why in self._trouble.items() if name in gathered.functions}
        self._kept = {name: what for name, what in self._kept.items() if name in gathered.functions}
        for operation in (*operations, *owed):
            match operation:
                case Activate():
                    self._activate(operation, gathered)
                case Create() | Park():
                    self._create(operation, gathered)
                case Leave():
                    self._leave(operation, gathered)
                case Delete():
                    self._delete(operation, gathered)
                case Apply(function):
                    self._apply(gathered.scene.functions[function], at_s)
                case RemoveWorkload(name, uid):
                    self._remove_workload(name, uid, at_s)
                case Note():
                    self._note(operation, gathered)
        return True

    def keep(self, function: Function, gathered: Gathered) -> None:
        """Repairs what no informer follows: a Service once per leader, a budget with each decision.

        Args:
            function: whose decision stands in its status.
            gathered: of this turn.
        """
        key = f"keep {function.name}"
        stage = f"stage {function.desired}"
        wanted = (function.uid, stage if function.role == "stage" else function.template)
        was_stage = self._kept.get(function.name, ("", ""))[1].startswith("stage ")
        if gathered.scene.at_s < self._paused_until_s or self.jobs.is_busy(key):
            return
        if self._kept.get(function.name) == wanted:
            return

        def done(outcome: ClusterError | None) -> None:
            self._failed(outcome)
            if not isinstance(outcome, ClusterUnavailable):
                self._kept[function.name] = wanted

        self.jobs.submit(key, lambda: self.actor.keep(function, was_stage=was_stage), done)

    # ------------------------------------------------------------ one operation each

    def _activate(self, operation: Activate, gathered: Gathered) -> None:
        function = gathered.scene.functions[operation.function]
        pod = gathered.pods[operation.pod]
        at_s = gathered.scene.at_s
        if self._is_held(operation.pod, at_s) or self.activations.is_busy(operation.pod):
            return
        if operation.pod in self._useless:  # it was not deleted yet
            self._discard(operation, function, "it refused to become what it was told")
            return
        self._grant(function, pod)
        if operation.is_resumed:
            self._tell(operation, function, gathered.scene.pods[operation.pod].activated_s)
            return
        at_s = _decided_at_s(function, at_s)
        patch = activation_patch(pod, function, at_s)
        self.pods.send(operation.pod, merged(pod, patch))

        def done(outcome: Object | ClusterError | None) -> None:
            self._settle(operation.pod, outcome)
            if isinstance(outcome, dict):
                self._trouble.pop(function.name, None)
                self._tell(operation, function, at_s)
            elif isinstance(outcome, Invalid | Forbidden):  # as no pod of this function would be taken
                self._trouble[function.name] = (function.template, str(outcome))
                self.backoff.failed(hold_key(function.name, function.template), self.actor.now_s())

        self.jobs.submit(operation.pod, lambda: self.actor.patch(PODS, operation.pod, patch), done)

    def _tell(self, operation: Activate, function: Function, decided_at_s: float) -> None:
        wanted = activation_of(function, self.actor.settings, decided_at_s)

        def done(outcome: Object | ClusterError) -> None:
            if isinstance(outcome, dict):
                if not self.jobs.is_busy(operation.pod):  # else what is on its way is newer
                    self.pods.done(operation.pod, outcome, self.actor.now_s())
                return
            if not isinstance(outcome, ClusterUnavailable):
                self._faults.failed(operation.pod, self.actor.now_s())
            if isinstance(outcome, Abandoned | NotFound):
                return
            if isinstance(outcome, ClusterUnavailable | Conflict):
                self._failed(outcome)  # the note is missing: it is told again, and asked whether it serves
            else:
                self._refuse(operation, function, outcome)

        self.activations.submit(
            operation.pod, lambda: self.activator.tell(operation.pod, operation.uid, wanted), done
        )

    def _refuse(self, operation: Activate, function: Function, error: ClusterError) -> None:
        """A pod that cannot become what it was told is of no use to anybody."""
        self._useless.add(operation.pod)
        self._owed.append(Note(function.name, "ReplicaFailed", str(error)))
        self.backoff.failed(hold_key(function.name, function.template), self.actor.now_s())
        self._discard(operation, function, str(error))

    def _discard(self, operation: Activate, function: Function, why: str) -> None:
        key = f"delete {operation.pod}"
        if self.jobs.is_busy(key):
            return
        delete = Delete(operation.pod, operation.uid, why, function.name)

        def done(outcome: ClusterError | None) -> None:
            self._faults.failed(operation.pod, self.actor.now_s())
            self._failed(outcome)

        self.jobs.submit(key, lambda: self.actor.delete(delete), done)

    def _is_held(self, key: str, at_s: float) -> bool:
        """Whether something is being done to a pod or Deployment, or is put off after a refusal."""
        return self.jobs.is_busy(key) or at_s < self._faults.hold_until_s(key)

    def _grant(self, function: Function, pod: Object) -> None:
        """Has the node's KeysManager told, beside everything else: the pod's question waits for it."""
        keysmanagers, env = self.keysmanagers, function.deployment.envVars
        key, node = f"grant {pod['metadata']['name']}", pod.get("spec", {}).get("nodeName", "")
        if keysmanagers is None or self.jobs.is_busy(key):
            return
        grant = Grant(
            pod_uid=pod["metadata"]["uid"],
            bundle=env.get("KEYSTAGE_BUNDLE", ""),
            stages=tuple(stages_of(env.get("KEYSTAGE_STAGES", ""))),
        )

        def done(outcome: str | ClusterError) -> None:
            if outcome:
                log.warning("function %s: %s reads its bundle itself: %s", function.name, key, outcome)

        self.jobs.submit(key, lambda: keysmanagers.grant(node, grant), done)

    def _create(self, operation: Create | Park, gathered: Gathered) -> None:
        at_s = gathered.scene.at_s
        function = gathered.scene.functions[operation.function]
        of = function if isinstance(operation, Create) else gathered.scene.functions[operation.pipeline]
        body = pod_for(operation, function, Owner(of.name, of.uid), self.actor.settings)
        self.pods.send(operation.pod, created(body, at_s))
        key = hold_key(function.name, function.template)

        def done(outcome: Object | ClusterError) -> None:
            self._settle(operation.pod, outcome)
            if isinstance(outcome, dict):
                self._trouble.pop(function.name, None)
                if isinstance(operation, Create):
                    self.starts.begun(operation.pod, function.pipeline, _decided_at_s(function, at_s))
            elif not isinstance(outcome, ClusterUnavailable):
                self._trouble[function.name] = (function.template, str(outcome))
                if isinstance(operation, Park):
                    self._parking_held[operation.pipeline] = self.actor.now_s() + PARK_HOLD_S
                else:
                    self.backoff.failed(key, self.actor.now_s())

        self.jobs.submit(operation.pod, lambda: self.actor.create(body), done)

    def _leave(self, operation: Leave, gathered: Gathered) -> None:
        if self._is_held(operation.pod, gathered.scene.at_s):
            return
        patch = leaving_patch(operation, gathered.scene.at_s)
        self.pods.send(operation.pod, merged(gathered.pods[operation.pod], patch))
        log.info("pod %s leaves: %s", operation.pod, operation.why)
        self.jobs.submit(
            operation.pod,
            lambda: self.actor.patch(PODS, operation.pod, patch),
            lambda outcome: self._settle(operation.pod, outcome),
        )

    def _delete(self, operation: Delete, gathered: Gathered) -> None:
        at_s = gathered.scene.at_s
        if self._is_held(operation.pod, at_s):
            return
        if operation.is_failure:
            self._count(operation, gathered)
        self.pods.send(operation.pod, deleted(gathered.pods[operation.pod], at_s))
        log.info("pod %s is deleted: %s", operation.pod, operation.why)

        def done(outcome: ClusterError | None) -> None:
            if isinstance(outcome, ClusterError):
                self._settle(operation.pod, outcome)
            else:
                self.pods.done(operation.pod, None, self.actor.now_s())

        self.jobs.submit(operation.pod, lambda: self.actor.delete(operation), done)

    def _count(self, operation: Delete, gathered: Gathered) -> None:
        """A failure puts off the next pod of its kind."""
        at_s, pod = gathered.scene.at_s, gathered.scene.pods[operation.pod]
        if operation.function:
            self.backoff.failed(hold_key(operation.function, pod.template), at_s)
            words = (
                "; ".join(trouble_of([gathered.pods[operation.pod]])) or f"{operation.pod}: {operation.why}"
            )
            self._owed.append(Note(operation.function, "ReplicaFailed", words))
        elif pod.pipeline:
            self._parking_held[pod.pipeline] = at_s + PARK_HOLD_S

    def _apply(self, function: Function, at_s: float) -> None:
        key = _workload_key(function.name)
        if self.jobs.is_busy(key) or at_s < function.hold_until_s:
            return

        def done(outcome: Object | ClusterError) -> None:
            if isinstance(outcome, dict):
                self.deployments.done(function.name, outcome, self.actor.now_s())
                self._trouble.pop(function.name, None)
                return
            self._failed(outcome)
            if not isinstance(outcome, ClusterUnavailable):
                self._trouble[function.name] = (function.template, str(outcome))
                self.backoff.failed(hold_key(function.name, function.template), self.actor.now_s())

        self.jobs.submit(key, lambda: self.actor.deploy(function), done)

    def _remove_workload(self, name: str, uid: str, at_s: float) -> None:
        key = _workload_key(name)
        if self._is_held(key, at_s):
            return

        def done(outcome: ClusterError | None) -> None:
            if outcome is not None and not isinstance(outcome, ClusterUnavailable):
                self._faults.failed(key, self.actor.now_s())
            self._failed(outcome)

        self.jobs.submit(key, lambda: self.actor.remove_workload(name, uid), done)

    def _note(self, operation: Note, gathered: Gathered) -> None:
        known = gathered.functions.get(operation.function)
        if known is None or not self.events.is_news(known.object, operation.reason, operation.text):
            return
        key = f"event {operation.function} {operation.reason} {operation.text}"
        if not self.jobs.is_busy(key):
            self.jobs.submit(
                key,
                lambda: self.events.tell(
                    known.object, operation.reason, operation.text, is_warning=operation.is_warning
                ),
                lambda _: None,
            )

    # ------------------------------------------------------------ outcomes

    def _settle(self, pod: str, outcome: Object | ClusterError | None) -> None:
        """A pod as the API server answered; without an answer what was expected of it is forgotten."""
        if isinstance(outcome, dict):
            self.pods.done(pod, outcome, self.actor.now_s())
            return
        self.pods.failed(pod)
        if not isinstance(outcome, ClusterUnavailable):
            self._faults.failed(pod, self.actor.now_s())
        self._failed(outcome)

    def _failed(self, outcome: ClusterError | None) -> None:
        if outcome is None:
            return
        log.warning("%s", outcome)
        if isinstance(outcome, ClusterUnavailable):
            self._paused_until_s = self.actor.now_s() + PAUSE_S


def _decided_at_s(function: Function, at_s: float) -> float:
    """When what is done at `at_s` was decided: what follows from a decision follows at once."""
    decided_at_s = function.decided_at_s
    return decided_at_s if 0 <= at_s - decided_at_s <= DECIDED_S else at_s


def _workload_key(name: str) -> str:
    """Key of calls about a function's Deployment."""
    return f"apply {name}"
