"""What the supervisor tells the ledger, and what the ledger tells the supervisor.

Two closed unions of frozen values: events go in (`local.supervisor` makes them from requests and
processes), instructions come out. This module must not hold behaviour.
"""

from __future__ import annotations

import dataclasses
from typing import TypeAlias

from keystage.local.api import Deployment, Intent, Load


@dataclasses.dataclass(frozen=True, slots=True)
class Deployed:
    """A function was created or replaced."""

    deployment: Deployment


@dataclasses.dataclass(frozen=True, slots=True)
class Removed:
    """A function was deleted."""

    function: str


@dataclasses.dataclass(frozen=True, slots=True)
class Renewed:
    """A function's replicas shall be replaced, as if it were deployed anew just as it is."""

    function: str


@dataclasses.dataclass(frozen=True, slots=True)
class Intended:
    """The gateway wrote an intent."""

    function: str
    intent: Intent


@dataclasses.dataclass(frozen=True, slots=True)
class Scaled:
    """The controller wrote desired replicas; see `api.Desired`. `decided_at_s` is in Unix seconds here."""

    function: str
    replicas: int
    sites: tuple[str, ...] = ()
    victims: tuple[str, ...] = ()
    decided_at_s: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class CoresSet:
    """The controller wrote how many CPU cores each replica shall have."""

    function: str
    cores: float


@dataclasses.dataclass(frozen=True, slots=True)
class Loaded:
    """A gateway told what it has in hand for a function."""

    function: str
    load: Load


@dataclasses.dataclass(frozen=True, slots=True)
class Started:
    """A process was started; `via`, `source` and `note` as in `api.ReplicaRecord`."""

    replica: str
    pid: int
    address: str
    via: str = "process"
    source: str = ""
    note: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Answered:
    """A replica answered its readiness (while starting) or health probe."""

    replica: str


@dataclasses.dataclass(frozen=True, slots=True)
class Missed:
    """A ready replica did not answer its health probe, or not well; `is_silent`: nothing came in time."""

    replica: str
    is_silent: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Exited:
    """A process is gone, or could not be started; `reason` says how in one line."""

    replica: str
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Ticked:
    """Time passed."""


Event: TypeAlias = (
    Deployed
    | Removed
    | Renewed
    | Intended
    | Scaled
    | CoresSet
    | Loaded
    | Started
    | Answered
    | Missed
    | Exited
    | Ticked
)


@dataclasses.dataclass(frozen=True, slots=True)
class Start:
    """Start a process for this replica.

    Attributes:
        replica: replica name.
        deployment: what it runs.
        node: where.
        wanted_at_s: when it was wanted, in Unix seconds.
    """

    replica: str
    deployment: Deployment
    node: str = ""
    wanted_at_s: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Terminate:
    """Tell the process to finish its work and exit (SIGTERM)."""

    replica: str


@dataclasses.dataclass(frozen=True, slots=True)
class Kill:
    """End the process at once (SIGKILL)."""

    replica: str


@dataclasses.dataclass(frozen=True, slots=True)
class SetCores:
    """Let a running process have so many CPU cores.

    Attributes:
        replica: replica name.
        cores: how many.
        tell: whether it answers by now and is told its number of threads.
    """

    replica: str
    cores: float
    tell: bool


Instruction: TypeAlias = Start | Terminate | Kill | SetCores
