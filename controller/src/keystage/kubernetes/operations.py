"""What can be done to the cluster, as `plan` lists it and `act` does it: a closed union of values. Pure.

Each names its object by uid where there is one, so that an operation that comes late, or twice, or from a
leader of before, hits nothing else.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from keystage.kubernetes.manifests_pod import Place


@dataclasses.dataclass(frozen=True, slots=True)
class Create:
    """Makes a stage's pod. `uses_site`: the replica that the decision's next site was for."""

    function: str
    pod: str
    place: Place
    uses_site: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Park:
    """Makes a parked pod of the shape of a stage function."""

    function: str
    pod: str
    pipeline: str
    shape: str
    place: Place


@dataclasses.dataclass(frozen=True, slots=True)
class Activate:
    """Gives a parked pod its function. `is_resumed`: it was given it already, and is told again.

    `uses_site` as of `Create`, wherever the pod is.
    """

    function: str
    pod: str
    uid: str
    is_resumed: bool = False
    uses_site: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Leave:
    """Takes a pod out of the routing; it is deleted once it has no request."""

    pod: str
    uid: str
    why: str


@dataclasses.dataclass(frozen=True, slots=True)
class Delete:
    """Deletes a pod. `is_gone`: its node no longer exists, nobody will confirm it."""

    pod: str
    uid: str
    why: str
    function: str = ""
    is_failure: bool = False
    is_gone: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Apply:
    """Makes a router's or plain function's Deployment and Service what they shall be."""

    function: str


@dataclasses.dataclass(frozen=True, slots=True)
class RemoveWorkload:
    """Removes a Deployment whose function has another role now."""

    name: str
    uid: str


@dataclasses.dataclass(frozen=True, slots=True)
class Note:
    """Tells people of something, as an Event on the function."""

    function: str
    reason: Literal["PlacementFailed", "ReplicaFailed", "ReplicaLost", "ResizeFallback", "Scaled", "Refused"]
    text: str
    is_warning: bool = True


Operation = Create | Park | Activate | Leave | Delete | Apply | RemoveWorkload | Note
