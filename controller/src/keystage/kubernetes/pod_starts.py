"""Starts of parked pods as metrics: on a cluster no KeysManager forks, so none counts them.

Before it: `activate` has a pod that serves. After it: the controller's `/metrics`. Only what this process
saw is counted. It must not hold what is gone: so many nodes, and so many histograms of each.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

from keystage.keysmanager.pod_api import Activated, Activation
from keystage.kubernetes.client import Object
from keystage.wire.metrics import Sample
from keystage.wire.start_counts import StartCounts

MOST_NODES = 1024
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

    def served(self, pod: Object, wanted: Activation, answer: Activated) -> None:
        """A parked pod became a worker."""
        node = str(pod.get("spec", {}).get("nodeName", ""))
        pipeline = wanted.env.get("KEYSTAGE_PIPELINE", "")
        reached = {phase: answer.phases[phase] for phase in PHASES if phase in answer.phases}
        reached["ready"] = self._now()
        with self._lock:
            counts = self._nodes.pop(node, None) or StartCounts()
            self._nodes[node] = counts  # the newest at the end
            if len(self._nodes) > MOST_NODES:
                del self._nodes[next(iter(self._nodes))]
            counts.starts[answer.via] += 1
            for phase, at_s in reached.items():
                counts.reached(pipeline, answer.via, phase, max(0.0, at_s - wanted.decided_at_s))

    def samples(self) -> Iterator[Sample]:
        """Everything that is known now."""
        with self._lock:
            yield from [sample for node, counts in self._nodes.items() for sample in counts.samples(node)]
