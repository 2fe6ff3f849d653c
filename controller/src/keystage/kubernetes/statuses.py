"""Writes functions' statuses; a decision first, what follows from it afterwards.

Before it: `gather`. After it: custom resources' `status`. A function whose decision does not stand there yet
is not `settled`: nothing is done for it until it does, so that a new leader knows of all that was done.
Belongs to the reconciler's thread. It must not decide.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from keystage.kubernetes.act import Actor
from keystage.kubernetes.api import FUNCTION_LABEL, FunctionStatus
from keystage.kubernetes.backoff import Backoff
from keystage.kubernetes.client import FUNCTIONS, Object
from keystage.kubernetes.cluster_events import Events
from keystage.kubernetes.errors import ClusterError, ClusterUnavailable, Conflict
from keystage.kubernetes.function_status import is_urgent, status_of, status_patch
from keystage.kubernetes.gather import Gathered, Known
from keystage.kubernetes.jobs import Jobs
from keystage.kubernetes.view import labels_of

WORDS_EVERY_S = 2.0
"""Where only the words about trouble changed: schedulers say it anew all the time."""
RETRY_S = 0.3
log = logging.getLogger(__name__)


class Statuses:
    """What was written last, by function.

    Args:
        jobs: where calls run.
        actor: makes them.
        events: for people.
    """

    def __init__(self, jobs: Jobs, actor: Actor, events: Events) -> None:
        self._jobs = jobs
        self._actor = actor
        self._events = events
        self._written: dict[str, tuple[str, FunctionStatus, float]] = {}
        self._retry_s: dict[str, float] = {}
        self._refusals = Backoff()

    def turn(self, gathered: Gathered, refused: Mapping[str, tuple[str, str]]) -> frozenset[str]:
        """Writes what changed.

        Args:
            gathered: of this turn.
            refused: by function: template and words of what the API server did not accept.

        Returns:
            Functions whose decision stands in their status.
        """
        mine: dict[str, list[Object]] = {}
        for pod in gathered.pods.values():
            mine.setdefault(labels_of(pod).get(FUNCTION_LABEL, ""), []).append(pod)
        self._written = {name: entry for name, entry in self._written.items() if name in gathered.functions}
        self._retry_s = {name: at_s for name, at_s in self._retry_s.items() if name in gathered.functions}
        self._refusals.keep_only(set(gathered.functions))
        settled = set()
        for name, known in gathered.functions.items():
            function = gathered.scene.functions.get(name)
            template = function.template if function is not None else known.status.template
            trouble = [known.trouble] if known.trouble else []
            words = refused.get(name)
            if words is not None and words[0] == template:
                trouble.append(words[1])
            wanted = status_of(
                known.object,
                desired=known.desired,
                cores=known.cores,
                template=template,
                pods=mine.get(name, ()),
                lost=gathered.lost,
                trouble=trouble,
            )
            before = self._before(name, known)
            if _decision(before) == _decision(wanted):
                settled.add(name)
            if before != wanted:
                self._write(name, known, before, wanted, gathered.scene.at_s)
        return frozenset(settled)

    def _before(self, name: str, known: Known) -> FunctionStatus:
        """What was written last; by this leader, else as it stands there."""
        uid, status, _ = self._written.get(name, ("", known.status, 0.0))
        return status if uid == known.object["metadata"]["uid"] else known.status

    def _write(
        self, name: str, known: Known, before: FunctionStatus, wanted: FunctionStatus, at_s: float
    ) -> None:
        key = f"status {name}"
        last_s = self._written.get(name, ("", wanted, 0.0))[2]
        if self._jobs.is_busy(key) or at_s < self._retry_s.get(name, 0.0):
            return
        if not is_urgent(before, wanted) and at_s - last_s < WORDS_EVERY_S:
            return
        uid, patch = known.object["metadata"]["uid"], status_patch(wanted)

        def done(outcome: Object | ClusterError | None) -> None:
            if isinstance(outcome, ClusterError):
                log.warning("status of function %s was not written: %s", name, outcome)
                now_s = self._actor.now_s()
                if not isinstance(outcome, ClusterUnavailable | Conflict):
                    self._refusals.failed(name, now_s)
                self._retry_s[name] = max(now_s + RETRY_S, self._refusals.hold_until_s(name))
                return
            self._retry_s.pop(name, None)
            self._written[name] = (uid, wanted, at_s)

        self._jobs.submit(key, lambda: self._actor.patch(FUNCTIONS, name, patch, "status"), done)
        if before.desired is not None and wanted.desired is not None and before.desired != wanted.desired:
            text = f"replicas {before.desired} -> {wanted.desired}"
            if self._events.is_news(known.object, "Scaled", f"{text} at {at_s:.0f}"):
                self._jobs.submit(
                    f"event {name} {text} {at_s}",
                    lambda: self._events.tell(known.object, "Scaled", text, is_warning=False),
                    lambda _: None,
                )


def _decision(status: FunctionStatus) -> tuple[int | None, float | None, str]:
    return status.desired, status.cores, status.template
