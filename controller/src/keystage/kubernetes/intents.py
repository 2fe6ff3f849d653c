"""A person's wish and a wake, as they stand on the custom resource: given an end, and taken back when over.

Before it: `kubectl scale` or the gateway wrote them; the policy decided that they are over. After it: the
custom resource. Each change is on condition that nobody changed the resource since. Belongs to the
reconciler's thread. It must not decide when a wish is over.
"""

from __future__ import annotations

import logging

from keystage.kubernetes.act import Actor
from keystage.kubernetes.api import OVERRIDE_UNTIL_ANNOTATION, WAKE_ANNOTATION
from keystage.kubernetes.client import FUNCTIONS, Object
from keystage.kubernetes.errors import ClusterError, Conflict
from keystage.kubernetes.gather import Gathered, Known
from keystage.kubernetes.jobs import Jobs
from keystage.kubernetes.view import annotations_of, number
from keystage.kubernetes.wishes import Wish, Wishes

OVERRIDE_S = 600.0
"""How long a wish holds that says no end itself (`kubectl scale`, an autoscaler)."""
RETRY_S = 0.3
log = logging.getLogger(__name__)


class Intents:
    """Changes to custom resources.

    Args:
        jobs: where calls run.
        actor: makes them.
        wishes: what the policy says is over.
    """

    def __init__(self, jobs: Jobs, actor: Actor, wishes: Wishes) -> None:
        self._jobs = jobs
        self._actor = actor
        self._wishes = wishes
        self._retry_s: dict[str, float] = {}

    def turn(self, gathered: Gathered) -> None:
        """Does what is missing."""
        wished = self._wishes.read().functions
        self._retry_s = {name: at_s for name, at_s in self._retry_s.items() if name in gathered.functions}
        for name, known in gathered.functions.items():
            if gathered.scene.at_s < self._retry_s.get(name, 0.0):
                continue
            self._function(name, known, wished.get(name, Wish()), gathered.scene.at_s)

    def _function(self, name: str, known: Known, wish: Wish, at_s: float) -> None:
        annotations = annotations_of(known.object)
        has_wish = (known.object.get("spec") or {}).get("replicas") is not None
        is_ended = OVERRIDE_UNTIL_ANNOTATION in annotations
        if wish.is_lifting:
            if has_wish or is_ended:
                patch: Object = {
                    "metadata": {"annotations": {OVERRIDE_UNTIL_ANNOTATION: None}},
                    "spec": {"replicas": None},
                }
                self._change(name, known, patch, at_s, lifted=True)
            else:
                self._wishes.done(name, lifted=True)
        elif has_wish and not number(annotations.get(OVERRIDE_UNTIL_ANNOTATION)):  # none, or no number
            until = f"{at_s + OVERRIDE_S:.3f}"
            self._change(name, known, {"metadata": {"annotations": {OVERRIDE_UNTIL_ANNOTATION: until}}}, at_s)
        elif is_ended and not has_wish:  # a person took it back: its end must not hold for the next one
            self._change(name, known, {"metadata": {"annotations": {OVERRIDE_UNTIL_ANNOTATION: None}}}, at_s)
        if wish.is_awake:
            if WAKE_ANNOTATION in annotations:
                self._change(
                    name, known, {"metadata": {"annotations": {WAKE_ANNOTATION: None}}}, at_s, awake=True
                )
            else:
                self._wishes.done(name, awake=True)

    def _change(
        self,
        name: str,
        known: Known,
        patch: Object,
        at_s: float,
        *,
        lifted: bool = False,
        awake: bool = False,
    ) -> None:
        key = f"intent {name}"
        if self._jobs.is_busy(key):
            return
        patch["metadata"]["resourceVersion"] = known.object["metadata"]["resourceVersion"]

        def done(outcome: Object | ClusterError | None) -> None:
            if not isinstance(outcome, ClusterError):
                self._wishes.done(name, lifted=lifted, awake=awake)
                self._retry_s[name] = at_s + RETRY_S  # until the informer shows it
                return
            if not isinstance(outcome, Conflict):
                log.warning("function %s: its wish is not changed: %s", name, outcome)
            self._retry_s[name] = self._actor.now_s() + RETRY_S

        self._jobs.submit(key, lambda: self._actor.patch(FUNCTIONS, name, patch), done)
