"""How long new replicas take from a decision to their first answered work item, seen from outside.

A decision is the moment in which the controller's number stands in the function's status (a watch sees it);
the first item is what the worker itself notes (`GET /_/start`), put on the clock of the day in its pod.
"""

from __future__ import annotations

import json
import threading
import time
from typing import Any, Self

from support.e2e_world import World

from keystage.kubernetes.client import FUNCTIONS, Object
from keystage.kubernetes.errors import ClusterError

_ASK = """
import json, time, urllib.request
told = json.load(urllib.request.urlopen("http://127.0.0.1:8080/_/start", timeout=10))
later = time.time() - time.monotonic()
print(json.dumps({key: value + later if value else 0 for key, value in told.items()}))
"""


class Decisions:
    """Notes when `status.desired` of a function becomes another number; times are `time.time`."""

    def __init__(self, world: World, function: str) -> None:
        self._world, self._function = world, function
        self._stop = threading.Event()
        self._version = world.functions.list(FUNCTIONS).version
        self.seen: list[tuple[float, int]] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(30)

    def _run(self) -> None:
        version = self._version
        while not self._stop.is_set():
            try:
                version = version or self._world.functions.list(FUNCTIONS).version
                for event in self._world.functions.watch(FUNCTIONS, version, timeout_s=5):
                    version = event.object["metadata"]["resourceVersion"]
                    self._note(event.object)
            except ClusterError:
                version = ""
                self._stop.wait(0.2)

    def _note(self, value: dict[str, Any]) -> None:
        desired = value.get("status", {}).get("desired")
        if value["metadata"].get("name") != self._function or desired is None:
            return
        if not self.seen or self.seen[-1][1] != desired:
            self.seen.append((time.time(), desired))

    def at(self, desired: int) -> float:
        """When it became that number last."""
        return next(at_s for at_s, number in reversed(self.seen) if number == desired)


def was_parked(pod: Object) -> bool:
    """Whether a replica began as a parked pod."""
    return "keystage.dev/activated" in pod["metadata"].get("annotations", {})


def all_serve(world: World, stage: str) -> bool:
    """Every pod that was parked has said that it serves."""
    pods = [pod for pod in world.ready_pods(stage) if was_parked(pod)]
    return all("keystage.dev/serving" in pod["metadata"]["annotations"] for pod in pods)


def phases(world: World, pod: str) -> dict[str, float]:
    """Unix seconds of a worker's phases, 0 for those not reached."""
    told: dict[str, float] = json.loads(world.python(pod, _ASK))
    return told
