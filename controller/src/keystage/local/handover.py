"""What a supervisor hands over to its successor, another version of the program in the same process.

`exec` keeps process id, children and inheritable descriptors: replicas, gateway and the rest go on, their
lifeline stays whole, their output pipes and listening sockets stay open. Everything that cannot be read anew
from the state folder is in a `Handover`, which travels in a memfd. Before it: `local.upgrades`. After it:
`local.resume`. It must not stop or start anything.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import NoReturn

import msgspec

from keystage.local.ledger import Bounds
from keystage.local.replica import Replica

FORM = 1
"""Raised when a field changes its meaning; one more with a default raises nothing."""
MODULE = "keystage.local.resume"


class KeptProcess(msgspec.Struct, frozen=True):
    """A running process.

    Attributes:
        pid: process id; it is our child.
        address: `host:port` it serves on, empty if it serves nothing.
        pipe: read end of its output.
        lifeline: write end of a lifeline of its own, -1: it watches ours.
    """

    pid: int
    address: str
    pipe: int
    lifeline: int = -1


class KeptReplica(msgspec.Struct, frozen=True):
    """A replica as the ledger knows it, and its process; None: it has none now."""

    replica: Replica
    process: KeptProcess | None


class KeptSystem(msgspec.Struct, frozen=True):
    """A process of `local.system`; see `SystemProcess`."""

    name: str
    process: KeptProcess
    started_at_s: float
    restarts: int


class Handover(msgspec.Struct, frozen=True, kw_only=True):
    """Everything.

    Attributes:
        form: see `FORM`.
        home: state folder.
        run: run folder.
        lock: descriptor of the lock.
        lifeline: read and write end.
        offset_s: Unix seconds minus `time.monotonic`: moments stay comparable.
        bounds: time limits of replicas.
        env: variables of gateway, controller and KeysManagers that a caller gave.
        nodes: names of the nodes.
        faces: listening sockets of their KeysManagers.
        gateway: listening socket of the gateway, -1: there is none.
        controller: whether there is one.
        system: gateway, controller and KeysManagers that run.
        sweeper: process id of the sweeper.
        replicas: all of them.
        numbers: next number of a replica by function.
        routers: inbox addresses by pipeline.
    """

    form: int
    home: str
    run: str
    lock: int
    lifeline: tuple[int, int]
    offset_s: float
    bounds: Bounds
    env: dict[str, str]
    nodes: tuple[str, ...]
    faces: tuple[int, ...]
    gateway: int
    controller: bool
    system: tuple[KeptSystem, ...]
    sweeper: int
    replicas: tuple[KeptReplica, ...]
    numbers: dict[str, int]
    routers: dict[str, str]

    def descriptors(self) -> Iterator[int]:
        """All that must stay open."""
        yield from (self.lock, *self.lifeline, *self.faces)
        yield from (self.gateway,) if self.gateway >= 0 else ()
        of_replicas = (one.process for one in self.replicas if one.process is not None)
        for process in (*(one.process for one in self.system), *of_replicas):
            yield process.pipe
            yield from (process.lifeline,) if process.lifeline >= 0 else ()


def hand_over(handover: Handover, python: str, env: Mapping[str, str]) -> NoReturn:
    """Becomes the successor.

    Args:
        handover: what it is given.
        python: its interpreter.
        env: its environment.

    Raises:
        OSError: it cannot be executed; then everything is as before.
    """
    carrier = os.memfd_create("keystage-handover", 0)
    kept = list(handover.descriptors())
    try:
        os.write(carrier, msgspec.json.encode(handover))
        os.lseek(carrier, 0, os.SEEK_SET)
        for fd in kept:
            os.set_inheritable(fd, True)
        os.execve(python, [python, "-m", MODULE, str(carrier)], dict(env))  # noqa: S606  (no shell is wanted)
    finally:
        os.close(carrier)
        for fd in kept:
            with contextlib.suppress(OSError):
                os.set_inheritable(fd, False)


def take_over(carrier: int) -> Handover:
    """What the predecessor handed over; the descriptors are ours alone again.

    Raises:
        msgspec.ValidationError: it is of another form.
    """
    with os.fdopen(carrier, "rb") as file:
        handover = msgspec.json.decode(file.read(), type=Handover)
    for fd in handover.descriptors():
        os.set_inheritable(fd, False)
    return handover
