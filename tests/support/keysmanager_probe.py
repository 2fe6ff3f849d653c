"""The function that forked children run in tests: answers questions about itself over its "HTTP" socket.

Imported in the fork server's children only. A question is a JSON list [name, arguments...] in one
SEQPACKET message, the answer one JSON value. End of file on the lifeline ends it, as a worker.
"""

from __future__ import annotations

import json
import os
import random
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import torch

from keystage.bundle import store
from keystage.keysmanager.fork_check import has_cuda
from keystage.models.base import Row
from keystage.models.loading import synchronize
from keystage.wire.endpoints import watch_lifeline


def draws() -> list[float]:
    import numpy as np

    return [random.random(), float(np.random.random()), float(torch.rand(1, dtype=torch.float64))]


class Probe:
    """What can be asked."""

    def __init__(self, supply: Any) -> None:
        self.supply = supply
        self.model: Any = None
        self.loaded: list[Any] = []
        self.draws = draws()

    def facts(self) -> dict[str, Any]:
        fds = {}
        for entry in Path("/proc/self/fd").iterdir():
            try:
                fds[entry.name] = str(entry.readlink())
            except OSError:
                continue
        return {
            "pid": os.getpid(),
            "parent": os.getppid(),
            "group": os.getpgid(0),
            "fds": fds,
            "env": dict(os.environ),
            "draws": self.draws,
            "argv": sys.argv,
            "threads": torch.get_num_threads(),
            "tasks": len(list(Path("/proc/self/task").iterdir())),
            "name": Path("/proc/self/comm").read_text().strip(),
            "bad_cuda": torch.cuda._is_in_bad_fork(),
        }

    def modules(self) -> list[str]:
        return sorted(sys.modules)

    def has_cuda(self) -> bool:
        return has_cuda()

    def load(self, bundle: str, stage: int, device: str, dtype: str) -> str:
        """Takes a stage from the supply; its device, or empty: the supply has none."""
        self.model = self.supply.stage(store.load(bundle), stage, device, dtype)
        self.loaded.append(self.model)
        return "" if self.model is None else str(self.model.device)

    def logits(self, ids: list[int]) -> list[list[float]]:
        """Prefill and one decode step of the whole model in one stage."""
        self.model.open(1, len(ids) + 1)
        first = self.model.forward(torch.tensor(ids), [Row(1, 0, len(ids))], [0])
        second = self.model.forward(torch.tensor(ids[:1]), [Row(1, len(ids), 1)], [0])
        self.model.close(1)
        synchronize(self.model)
        return [first[0].tolist(), second[0].tolist()]

    def report(self, phase: Any) -> None:
        self.supply.report(phase)

    def release(self) -> None:
        self.supply.release()

    def cuda(self) -> float:
        return float(torch.ones(4, device="cuda").sum())

    def say(self, text: str) -> None:
        print(text)
        print(text, file=sys.stderr)

    def end(self, code: int) -> None:
        raise SystemExit(code)

    def crash(self) -> None:
        raise RuntimeError("asked to crash")


def main(supply: Any) -> int:
    watch_lifeline(int(os.environ["KEYSTAGE_LIFELINE_FD"]))
    asked = socket.socket(fileno=int(os.environ["KEYSTAGE_HTTP"].removeprefix("fd://")))
    probe = Probe(supply)
    assert threading.active_count() == 2
    while body := asked.recv(1 << 16):
        name, *arguments = json.loads(body)
        asked.send(json.dumps(getattr(probe, name)(*arguments)).encode())
    return 0
