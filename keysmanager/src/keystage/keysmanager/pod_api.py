"""What stage pods are told, and who tells the KeysManager which pods it serves.

    controller --PUT /v1/grants, [Grant, ...]--> KeysManager of the pod's node
    controller --POST /_/activate, Activation--> parked pod --Get, over the pods' socket--> KeysManager
    controller <--------------- Activated ------ pod, once it serves

Used by `pod`, `pod_grants` and by the controller. Both requests carry the bearer token that is derived from
the deployment's secret under `TOKEN_PURPOSE`. This module must import no transport.
"""

from __future__ import annotations

import msgspec

ACTIVATE_PATH = "/_/activate"
"""POST on a parked pod: `Activation`; answers 200 `Activated` once the worker is ready."""
GRANTS_PATH = "/v1/grants"
"""PUT on the KeysManager's TCP face: the list of `Grant`s of its node, which replaces the last one."""
TOKEN_PURPOSE = "kubernetes internal http"  # noqa: S105  (a label, no password)
"""`wire.bearer.INTERNAL`: the label under which the token of internal HTTP is derived."""


class Activation(msgspec.Struct, frozen=True, kw_only=True):
    """What a parked pod becomes.

    Attributes:
        function: the stage function.
        env: its whole `KEYSTAGE_*` environment, over what the pod has.
        decided_at_s: Unix seconds of the decision.
    """

    function: str
    env: dict[str, str]
    decided_at_s: float


class Activated(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to an activation.

    Attributes:
        via: how it started, as in `local.api.ReplicaRecord`; so are `source` and `note`.
        source: where its parameters came from, empty: it read them itself.
        note: why not in a better way.
        phases: Unix seconds of the phases of `wire.starts.StartReport` that are reached (`mapped`, ...).
    """

    via: str
    source: str = ""
    note: str = ""
    phases: dict[str, float] = {}


class PackedForm(msgspec.Struct, frozen=True, kw_only=True):
    """What goes with a memfd that holds a stage packed for CPUs, see `packed_segment`.

    Attributes:
        tag: what can use it.
        nbytes: bytes of content.
        index_bytes: bytes of the index at its end.
    """

    tag: str
    nbytes: int
    index_bytes: int


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """A pod that may have parameters of these stages from the KeysManager of its node.

    Attributes:
        pod_uid: `metadata.uid` of the pod.
        bundle: the bundle's address as the pod has it (`KEYSTAGE_BUNDLE`).
        stages: indices.
    """

    pod_uid: str
    bundle: str
    stages: tuple[int, ...]
