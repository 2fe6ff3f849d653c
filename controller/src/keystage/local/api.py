"""Types of the local world's control socket: functions, intents, replicas.

The supervisor (`keystage up`) is to the local world what API server and kubelet are to a
cluster: it keeps function records and runs replicas as processes. The gateway writes functions
and *intents* (override, wake); the controller alone writes desired replica numbers; both may be
restarted without ending a replica. HTTP with JSON bodies over the UNIX socket `up.sock`:

    GET    /functions                      -> list[FunctionRecord]
    GET    /functions/{name}               -> FunctionRecord (404)
    PUT    /functions/{name}               Deployment -> FunctionRecord (created or replaced)
    DELETE /functions/{name}               drains and removes (404)
    PUT    /functions/{name}/intent        Intent -> FunctionRecord
    PUT    /functions/{name}/replicas      Desired -> FunctionRecord (controller only)
    PUT    /functions/{name}/cpu           Cpu -> FunctionRecord (controller only)
    PUT    /key-stages                     KeyStageList -> 204 (controller only): what is kept in memory
    PUT    /functions/{name}/load          Load -> 204 (gateways only): what one gateway has in hand
    GET    /functions/{name}/usage         -> Usage
    GET    /functions/{name}/logs?tail=&since= -> text, one line each, `replica|unix_s|line`
    GET    /secrets                        -> list[str], names only; values are never read back
    PUT    /secrets/{name}                 raw bytes -> 201 (created) or 204 (replaced); 412 if it exists and
                                              `If-None-Match: *` is given, 404 if not and `If-Match: *` is
    DELETE /secrets/{name}                 -> 204 (404)
    GET    /replicas                       -> list[ReplicaRecord]
    GET    /nodes                          -> list[NodeRecord]
    GET    /starts                         -> list[StartRecord], the newest 1000, oldest first
    PUT    /report                         Report -> 204 (controller only): `observability.api`, in memory
                                              only; what is older than the one there is is passed over
    GET    /report?controller=&since=&wait= -> Report, at once when it is another than number `since` of
                                              `controller`, else as soon as there is one, at the latest
                                              after `wait` seconds (20 at most): then 204
    GET    /watch?since=N                  -> View, at once when its version is above N, else as soon as
                                              anything changes, at the latest after 20 s
    GET    /healthz                        -> 200

Errors are JSON `{"error": "..."}` with status 400, 404 or 412.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from keystage.keysmanager.api import NodeStatus

MAX_SECRET_BYTES = 1 << 20
"""Of one secret's value; at least one."""
MAX_SECRET_NAME = 253
SUBDOMAIN = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
"""A DNS subdomain, as secrets are named in OpenFaaS and Kubernetes (RFC 1123)."""
ReplicaState = Literal["starting", "ready", "draining", "failed", "stopped"]


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """A function as OpenFaaS describes it (faas-provider `FunctionDeployment`)."""

    service: str
    image: str = ""
    namespace: str = ""
    envProcess: str = ""  # noqa: N815  (name fixed by the OpenFaaS API)
    envVars: dict[str, str] = {}  # noqa: N815
    constraints: list[str] = []
    secrets: list[str] = []
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    limits: dict[str, str] | None = None
    requests: dict[str, str] | None = None
    readOnlyRootFilesystem: bool = False  # noqa: N815


def role_of(deployment: Deployment) -> str:
    """The function's role: `KEYSTAGE_ROLE`, where that is absent label `keystage.role`, else `function`.

    Returns:
        `stage`, `router` or `function`; what is no role is refused at deploy.
    """
    return deployment.envVars.get("KEYSTAGE_ROLE") or deployment.labels.get("keystage.role") or "function"


class Override(msgspec.Struct, frozen=True):
    """A person's scale request: holds against the policy until it expires (Unix seconds)."""

    replicas: int
    expires_at_s: float


class Intent(msgspec.Struct, frozen=True, kw_only=True):
    """What the gateway may ask for. Fields left unset stay as they are.

    Attributes:
        override: a person's scale request, or None to lift it.
        wake: a request waits for a function at zero.
    """

    override: Override | msgspec.UnsetType | None = msgspec.UNSET
    wake: bool | msgspec.UnsetType = msgspec.UNSET


class Desired(msgspec.Struct, frozen=True):
    """Desired replicas, written by the controller.

    Attributes:
        replicas: how many.
        sites: nodes of the new ones, in order; where none is named the supervisor chooses.
        victims: replicas that go first when there are too many.
        decided_at_s: when that was decided (`time.monotonic`, one clock for the machine), 0: now.
    """

    replicas: int
    sites: tuple[str, ...] = ()
    victims: tuple[str, ...] = ()
    decided_at_s: float = 0.0


class Load(msgspec.Struct, frozen=True):
    """What one gateway knows of a function's load; it replaces what that gateway told before.

    Attributes:
        gateway: the gateway's own name, new with each of its starts.
        in_flight: requests it has now, waiting ones included.
        started: requests since it started, never falling.
        at_s: when the supervisor heard it (Unix seconds; set there).
        replicas: requests that replicas have from it: every replica that it may give one to, 0 included, and
            those that left the routing while they have any. One that is not named gets and has none.
    """

    gateway: str
    in_flight: int
    started: int
    at_s: float = 0.0
    replicas: dict[str, int] = {}


class Usage(msgspec.Struct, frozen=True):
    """What a function's replicas use together: CPU cores over the last seconds; memory (PSS or RSS)."""

    cpu_cores: float
    memory_bytes: int


class KeyStageList(msgspec.Struct, frozen=True):
    """Key stages of one pipeline, the most important first; replaces its last list."""

    pipeline: str
    stages: tuple[int, ...]


class Cpu(msgspec.Struct, frozen=True):
    """CPU cores of every replica of a stage, written by the controller; no replica is restarted."""

    cores: float


class FunctionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A deployed function.

    Attributes:
        deployment: what was deployed.
        created_at_s: Unix seconds.
        desired: replicas wanted by the controller; None until it first decided.
        override: see `Override`.
        wake: see `Intent`.
        generation: grows with every redeploy; replicas of an older one are replaced.
        cores: CPU cores of each replica, None: as deployed (`KEYSTAGE_THREADS`, no affinity).
        loads: the newest of every gateway heard of lately; only in answers to GET /functions, in memory.
    """

    deployment: Deployment
    created_at_s: float
    desired: int | None = None
    override: Override | None = None
    wake: bool = False
    generation: int = 1
    cores: float | None = None
    loads: tuple[Load, ...] = ()


class ReplicaRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One process of a function.

    Attributes:
        replica: unique name, `<function>-<n>`.
        function: function name.
        generation: generation of the function it runs.
        state: see `ReplicaState`; `ready` only after `/_/ready` answered 200.
        pid: process id.
        address: `host:port` of its HTTP server.
        started_at_s: Unix seconds.
        ready_at_s: Unix seconds, 0 before.
        restarts: crashes of this function's replicas in a row, for the back-off.
        reason: why it is `failed`, else empty.
        node: where it runs.
        via: how it was started: `standby`, `holder`, `fork-server` (see `keysmanager.api.Via`), or `process`
            for a program of its own; empty before.
        source: where its parameters came from (see `keysmanager.api.Source`), empty: it reads them itself.
        note: why it could not be started in a better way, empty where it was.
    """

    replica: str
    function: str
    generation: int
    state: ReplicaState
    pid: int
    address: str
    started_at_s: float
    ready_at_s: float = 0.0
    restarts: int = 0
    reason: str = ""
    node: str = ""
    via: str = ""
    source: str = ""
    note: str = ""


class StartRecord(msgspec.Struct, frozen=True, kw_only=True):
    """How one replica's start went; it is kept when the replica is gone. Unix seconds, 0 for not yet.

    Attributes:
        replica: its name.
        function: function name.
        node: where.
        via: how, see `ReplicaRecord`.
        source: where its parameters came from.
        note: why not in a better way.
        wanted_at_s: decided by the controller, or by the supervisor (restart, redeploy).
        forked_at_s: its process ran.
        mapped_at_s: its parameters were in its memory.
        forward_at_s: its first forward pass was done.
        ready_at_s: it welcomed work (told by itself; `ReplicaRecord.ready_at_s` is when that was seen).
        first_item_at_s: its first item of work was computed.
    """

    replica: str
    function: str
    node: str = ""
    via: str = ""
    source: str = ""
    note: str = ""
    wanted_at_s: float = 0.0
    forked_at_s: float = 0.0
    mapped_at_s: float = 0.0
    forward_at_s: float = 0.0
    ready_at_s: float = 0.0
    first_item_at_s: float = 0.0


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One node: a machine, or a part of one.

    Attributes:
        node: its name.
        cores: CPU cores it has.
        keysmanager: UNIX socket of its KeysManager.
        status: what that told last, None if it was not heard yet or is not heard any longer.
        http: `host:port` of the KeysManager's TCP face.
    """

    node: str
    cores: float
    keysmanager: str = ""
    status: NodeStatus | None = None
    http: str = ""


class UpgradeRequest(msgspec.Struct, frozen=True):
    """The installation that a running system shall become.

    Attributes:
        python: path of its interpreter.
        path: its PYTHONPATH, empty for none.
    """

    python: str
    path: str = ""


class Successor(msgspec.Struct, frozen=True):
    """What an installation says of itself, asked whether it could go on with a running system.

    Attributes:
        version: its version.
        form: form of handovers it takes (`local.handover.FORM`).
        least: lowest wire version that it speaks.
        most: highest wire version that it speaks.
    """

    version: str
    form: int
    least: int
    most: int


class UpgradeStatus(msgspec.Struct, frozen=True):
    """How an upgrade stands.

    Attributes:
        version: of the supervisor that answers.
        step: what is being replaced, empty where nothing is.
        is_over: nothing is under way.
        error: why the last one ended before its end, empty where it did not.
    """

    version: str
    step: str
    is_over: bool
    error: str


class View(msgspec.Struct, frozen=True, kw_only=True):
    """Everything at one moment, for those who follow changes.

    Attributes:
        version: grows with every change within one incarnation.
        incarnation: changes whenever the supervisor starts.
        functions: every deployed function.
        replicas: every process, draining ones of removed functions too.
    """

    version: int
    incarnation: str
    functions: list[FunctionRecord]
    replicas: list[ReplicaRecord]
