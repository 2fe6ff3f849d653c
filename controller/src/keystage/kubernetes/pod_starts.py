"""Starts of stages' pods as metrics: on a cluster no KeysManager forks, so none counts them.

Before it: `activate` has a parked pod that serves, `sending` has made a fresh one, and `reconciler` shows the
pods there are. After it: the controller's `/metrics`. Only what this process began and saw is counted. It
must not hold what is gone: so many nodes, so many histograms of each, and pods that are on their way.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping

from keystage.keysmanager.pod_api import Activated, Activation
from keystage.kubernetes.client import Object
from keystage.kubernetes.view import state_of
from keystage.wire.metrics import Sample
from keystage.wire.start_counts import StartCounts

MOST_NODES = 1024
UNSEEN_S = 60.0
"""A pod that was made and does not show for so long was refused."""
FRESH = "process"
"""How a pod starts that was not parked (`view.replica_of`)."""
PHASES = ("mapped", "listening", "forward")
"""Told by the pod, by its own clock; `ready` is when its answer was here."""


class PodStarts:
    """Counts by node. Heard by the threads of activations, read by those that serve.

    Args:
        now: Unix seconds.
    """

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._nodes: dict[str, StartCounts] = {}
        self._begun: dict[str, tuple[str, float]] = {}
        """Fresh pods on their way: pipeline, and when they were wanted."""

    def begun(self, pod: str, pipeline: str, decided_at_s: float) -> None:
        """A fresh pod is being made.

        Args:
            pod: its name.
            pipeline: of its stage.
            decided_at_s: when it was wanted, Unix seconds.
        """
        with self._lock:
            self._begun[pod] = (pipeline, decided_at_s)

    def look(self, pods: Mapping[str, Object]) -> None:
        """Counts fresh pods that are ready now, and forgets those that will not be."""
        if not self._begun:
            return
        now_s = self._now()
        with self._lock:
            for name, (pipeline, decided_at_s) in list(self._begun.items()):
                pod = pods.get(name)
                if pod is None:
                    if now_s - decided_at_s > UNSEEN_S:
                        del self._begun[name]
                    continue
                state = state_of(pod)
                if state != "starting":
                    del self._begun[name]
                if state == "ready":
                    self._count(_node_of(pod), pipeline, FRESH, {"ready": now_s - decided_at_s})

    def served(self, pod: Object, wanted: Activation, answer: Activated) -> None:
        """A parked pod became a worker."""
        pipeline = wanted.env.get("KEYSTAGE_PIPELINE", "")
        reached = {phase: answer.phases[phase] for phase in PHASES if phase in answer.phases}
        reached["ready"] = self._now()
        took_s = {phase: at_s - wanted.decided_at_s for phase, at_s in reached.items()}
        with self._lock:
            self._count(_node_of(pod), pipeline, answer.via, took_s)

    def _count(self, node: str, pipeline: str, via: str, took_s: Mapping[str, float]) -> None:
        counts = self._nodes.pop(node, None) or StartCounts()
        self._nodes[node] = counts  # the newest at the end
        if len(self._nodes) > MOST_NODES:
            del self._nodes[next(iter(self._nodes))]
        counts.starts[via] += 1
        for phase, seconds in took_s.items():
            counts.reached(pipeline, via, phase, max(0.0, seconds))

    def samples(self) -> Iterator[Sample]:
        """Everything that is known now."""
        with self._lock:
            yield from [sample for node, counts in self._nodes.items() for sample in counts.samples(node)]


def _node_of(pod: Object) -> str:
    return str(pod.get("spec", {}).get("nodeName", ""))
