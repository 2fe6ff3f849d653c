"""Output of pods' containers, as the kubelet keeps it and `pods/log` serves it."""

from __future__ import annotations

import datetime as dt
import threading
import time
from collections.abc import Mapping

from support.kube.answers import Object, bad_request


class PodLogs:
    """Lines by pod (its uid) and container."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines: dict[tuple[str, str], list[tuple[float, str]]] = {}

    def write(self, pod: Object, line: str, *, container: str = "", at_s: float | None = None) -> None:
        """One line more; the container is the first one where none is named."""
        name = container or pod["spec"]["containers"][0]["name"]
        with self._lock:
            lines = self._lines.setdefault((pod["metadata"]["uid"], name), [])
            lines.append((time.time() if at_s is None else at_s, line))

    def read(self, pod: Object, query: Mapping[str, str]) -> bytes:
        """What a reader is told.

        Raises:
            Refused: 400, there is no such container, or it has not begun.
        """
        name, names = pod["metadata"]["name"], [c["name"] for c in pod["spec"]["containers"]]
        container = query.get("container") or (names[0] if len(names) == 1 else "")
        if not container:
            listed = " ".join(names)
            raise bad_request(f"a container name must be specified for pod {name}, choose one of: [{listed}]")
        if container not in names:
            raise bad_request(f"container {container} is not valid for pod {name}")
        states = {s["name"]: s.get("state", {}) for s in pod["status"].get("containerStatuses", ())}
        state = states.get(container, {})
        if not pod["spec"].get("nodeName"):
            return b""
        if "running" not in state and "terminated" not in state:
            reason = state.get("waiting", {}).get("reason", "ContainerCreating")
            raise bad_request(f'container "{container}" in pod "{name}" is waiting to start: {reason}')
        with self._lock:
            lines = list(self._lines.get((pod["metadata"]["uid"], container), ()))
        return _formatted(lines, query)


def _formatted(lines: list[tuple[float, str]], query: Mapping[str, str]) -> bytes:
    if since := query.get("sinceSeconds"):
        if int(since) < 1:
            raise bad_request("sinceSeconds must be greater than 0")
        lines = [line for line in lines if line[0] >= time.time() - int(since)]
    if since := query.get("sinceTime"):
        start_s = dt.datetime.fromisoformat(since).timestamp()
        lines = [line for line in lines if line[0] >= start_s]
    if tail := query.get("tailLines"):
        lines = lines[-int(tail) :] if int(tail) else []
    if query.get("timestamps", "").lower() in ("1", "true"):
        return "".join(f"{_time(at_s)} {text}\n" for at_s, text in lines).encode()
    return "".join(f"{text}\n" for _, text in lines).encode()


def _time(at_s: float) -> str:
    whole = dt.datetime.fromtimestamp(int(at_s), dt.UTC).strftime("%Y-%m-%dT%H:%M:%S")
    return f"{whole}.{int(at_s % 1 * 1e9):09d}Z"
