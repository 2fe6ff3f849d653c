"""The user's own stream programs, as the folder of a function has them: written where a test wants them."""

from __future__ import annotations

import sys
from pathlib import Path

FORK = '''
"""Numbers in, numbers out: a fork, two ways of different length, a join, and a loop that counts down."""

import json

import torch

from keystage.streams.api import Message, Program, ProgramError, Stream, StreamModule

IN, LEFT, RIGHT, MORE = Stream("in"), Stream("left"), Stream("right"), Stream("more")
SUM_A, SUM_B, AGAIN, OUT = Stream("sum-a"), Stream("sum-b"), Stream("again"), Stream("out")


class Split(StreamModule):
    def compute(self, messages):
        return [m.next({"x": m.data["x"] + 1}) for m in messages]

    def scatter(self, message):
        return ["left", "right"]


class Scale(StreamModule):
    def parameters(self):
        return {"w": torch.tensor([2.0]), "b": torch.tensor([0.5])}

    def load(self, parameters, device="cpu"):
        super().load(parameters, device)
        self.w, self.b = parameters["w"], parameters["b"]

    def compute(self, messages):
        for m in messages:
            if m.header.get("fault") == "compute":
                raise RuntimeError("bad luck")
        return [
            m.refused("this one is not wanted") if m.header.get("fault") == "refused"
            else m.next({"x": m.data["x"] * self.w + self.b})
            for m in messages
        ]


class Slow(StreamModule):
    """Two visits."""

    def compute(self, messages):
        return [m.next({"x": m.data["x"] - 3}, visits=m.header.get("visits", 0) + 1) for m in messages]

    def scatter(self, message):
        if message.header.get("fault") == "stream":
            return "nowhere"
        if message.header.get("fault") == "lost":
            return []
        return "more" if message.header["visits"] < 2 else "sum-b"


class Count(StreamModule):
    """Keeps a total and goes round `rounds` times."""

    is_stateful = True

    def compute(self, messages):
        done = []
        for m in messages:
            if m.data:
                self.state.put(m.request, "total", m.data["x"].clone())
            total = self.state.get(m.request, "total") * 1.5 + 1
            self.state.put(m.request, "total", total)
            left = m.header["rounds"] - 1
            if m.header.get("fault") == "large" and left > 0:
                done.append(m.next({"x": torch.zeros(1 << 20)}, rounds=left))
            elif m.header.get("fault") == "header":
                done.append(m.next({}, rounds=left, bad={"a": object()}))
            else:
                done.append(m.next({"x": total} if left == 0 else {}, rounds=left))
        return done

    def scatter(self, message):
        return "again" if message.header["rounds"] > 0 else "out"


def parse(body, content_type):
    found = json.loads(body)
    if "x" not in found:
        raise ProgramError("x is missing")
    return Message(
        {"rounds": found.get("rounds", 1), "fault": found.get("fault", "")}, {"x": torch.tensor(found["x"])}
    )


def render(message):
    if message.header["fault"] == "render":
        raise ValueError("cannot be shown")
    return json.dumps({"x": message.data["x"].tolist()}).encode(), "application/vnd.numbers+json"


def program(name="forked", partial_slo_s=0.0):
    modules = {
        "split": Split([IN], [LEFT, RIGHT]),
        "scale": Scale([LEFT], [SUM_A]),
        "slow": Slow([RIGHT, MORE], [MORE, SUM_B]),
        "join": Join([SUM_A, SUM_B], [Stream("joined")], join="all", merge="sum"),
        "count": Count([Stream("joined"), AGAIN], [AGAIN, OUT], partial_slo_s=partial_slo_s),
    }
    return Program(name, modules, IN, OUT, parse, render, most_steps=200)


class Join(StreamModule):
    def compute(self, messages):
        return [m.next(m.data) for m in messages]
'''


def write_fork(folder: Path) -> str:
    """A folder with `fork_handler.py`; its path. Other folders of handlers are forgotten in this process."""
    folder.mkdir(parents=True, exist_ok=True)
    sys.modules.pop("fork_handler", None)
    sys.path[:] = [path for path in sys.path if not Path(path, "fork_handler.py").exists()]
    (folder / "fork_handler.py").write_text(FORK)
    return str(folder)


PACED = '''
"""One module that keeps a number, goes round, and takes its time."""

import json
import time

import torch

from keystage.streams.api import Message, Program, Stream, StreamModule

IN, AGAIN, OUT = Stream("in"), Stream("again"), Stream("out")


class Count(StreamModule):
    is_stateful = True

    def __init__(self, inputs, outputs, pace_s):
        super().__init__(inputs, outputs)
        self.pace_s = pace_s

    def compute(self, messages):
        time.sleep(self.pace_s)
        done = []
        for m in messages:
            total = m.data["x"] if m.data else self.state.get(m.request, "total")
            total = total * 0.999 + 1
            self.state.put(m.request, "total", total)
            left = m.header["rounds"] - 1
            done.append(m.next({} if left else {"x": total}, rounds=left))
        return done

    def scatter(self, message):
        return "again" if message.header["rounds"] else "out"


def parse(body, content_type):
    found = json.loads(body)
    return Message({"rounds": found["rounds"]}, {"x": torch.tensor([float(found["x"])])})


def render(message):
    return json.dumps(message.data["x"].tolist()).encode(), "application/json"


def program(name="paced", pace_s=0.0):
    return Program(name, {"count": Count([IN, AGAIN], [AGAIN, OUT], pace_s)}, IN, OUT, parse, render)
'''


def write_paced(folder: Path) -> str:
    """A folder with `paced_handler.py`; its path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "paced_handler.py").write_text(PACED)
    return str(folder)
