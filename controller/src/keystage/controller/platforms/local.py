"""The local world as a `Platform`: the supervisor's control socket and the routers' statistics.

Before and after it: `loop`. One observation fetches functions, replicas and every router's
statistics (routers in parallel, each with a short bound); `local_view` makes the snapshot of it.
A supervisor that does not answer is a `PlatformError`; a router that does not answer marks its
pipeline missing, and only that one is held. Nodes are told where there are several, and then replicas
go where the policy says. It holds no policy.
"""

from __future__ import annotations

import http.client
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar, assert_never
from urllib.parse import quote

import msgspec
import psutil

from keystage.controller.domain.decision import (
    Action,
    ClearWake,
    LiftOverride,
    PublishKeyStages,
    SetCpu,
    SetReplicas,
)
from keystage.controller.domain.platform import PlatformError
from keystage.controller.domain.snapshot import Snapshot
from keystage.controller.platforms.bundles import Bundles
from keystage.controller.platforms.local_cap import Machine
from keystage.controller.platforms.local_expiry import Expiries
from keystage.controller.platforms.local_view import Seen, snapshot_of
from keystage.controller.platforms.router_stats import RouterReader
from keystage.controller.platforms.unix_http import UnixConnection, exchange
from keystage.keysmanager import inventory
from keystage.local.api import (
    Cpu,
    Desired,
    FunctionRecord,
    Intent,
    KeyStageList,
    NodeRecord,
    ReplicaRecord,
)
from keystage.wire.unreadable import UNREADABLE

SHOWN_S = 1.0
"""Between two looks at a node that is the only one."""
T = TypeVar("T")


class LocalPlatform:
    """Functions and replicas under `keystage up`.

    Args:
        control: the supervisor's UNIX socket.
        home: state folder; the key-stage lists are kept in its `key-stages.json`.
        timeout_s: bound of one exchange, in seconds.
        budget_replicas: R_total, None for no bound.
    """

    def __init__(
        self, control: Path, home: Path, *, timeout_s: float = 0.5, budget_replicas: int | None = None
    ) -> None:
        self._control = str(control)
        self._published = home / "key-stages.json"
        self._timeout_s = timeout_s
        self._budget = budget_replicas
        self._gpus = inventory.visible(os.environ)
        self._offset_s = time.time() - time.monotonic()  # Unix seconds that never step
        self._expiries = Expiries()
        self._bundles = Bundles(home / "bundles")  # not started: those in local folders are known
        self._nodes_known: list[NodeRecord] = []
        self._nodes_at_s = -math.inf
        self._routers = RouterReader(timeout_s)

    def close(self) -> None:
        """Ends the threads."""
        self._routers.close()

    def observe(self) -> Snapshot:
        """See `Platform.observe`."""
        functions = self._expiries.steadied(
            self._get("/functions", list[FunctionRecord]), self._now_s(), time.time()
        )
        replicas = self._get("/replicas", list[ReplicaRecord])
        stats, unread = self._routers.read(functions, replicas)
        memory = psutil.virtual_memory()
        urls = {f.deployment.envVars.get("KEYSTAGE_BUNDLE", "") for f in functions}
        bundles, work = self._bundles.read(urls)
        return snapshot_of(
            Seen(
                at_s=self._now_s(),
                functions=functions,
                replicas=replicas,
                stats=stats,
                unread=unread,
                bundles=bundles,
                cpu_work=work,
                machine=Machine(len(os.sched_getaffinity(0)), memory.available, self._gpus),
                budget_replicas=self._budget,
                nodes=self._nodes(),
                tells_load=True,
            )
        )

    def apply(self, actions: Sequence[Action]) -> None:
        """See `Platform.apply`."""
        for action in actions:
            match action:
                case SetReplicas(function, replicas, sites, victims):
                    nodes = tuple(site.node for site in sites)
                    desired = Desired(replicas, nodes, victims, decided_at_s=time.monotonic())
                    self._put_to(function, "replicas", desired)
                case SetCpu(function, cores):
                    self._put_to(function, "cpu", Cpu(cores))
                case LiftOverride(function):
                    self._put_to(function, "intent", Intent(override=None))
                case ClearWake(function):
                    self._put_to(function, "intent", Intent(wake=False))
                case PublishKeyStages():
                    self._publish(action)
                case _:
                    assert_never(action)

    def _now_s(self) -> float:
        return time.monotonic() + self._offset_s

    def _nodes(self) -> list[NodeRecord]:
        """The nodes. One alone, which is no choice, is asked for now and then, for people."""
        now_s = time.monotonic()
        if len(self._nodes_known) > 1 or now_s - self._nodes_at_s >= SHOWN_S:
            self._nodes_known = self._get("/nodes", list[NodeRecord])
            self._nodes_at_s = now_s
        return self._nodes_known

    def _publish(self, action: PublishKeyStages) -> None:
        """Tells the supervisor, and keeps one entry per pipeline in a file, replaced as a whole."""
        stages = tuple(entry.stage for entry in action.ranking)
        self._put("/key-stages", KeyStageList(action.pipeline, stages))
        fresh = self._published.with_suffix(".json.new")
        try:
            try:
                lists = msgspec.json.decode(self._published.read_bytes(), type=dict[str, object])
            except (FileNotFoundError, *UNREADABLE):
                lists = {}
            fresh.write_bytes(msgspec.json.encode(lists | {action.pipeline: action.ranking}))
            fresh.replace(self._published)
        except OSError as error:
            raise PlatformError(f"{self._published} cannot be written: {error.strerror}") from error

    def _get(self, path: str, kind: type[T]) -> T:
        status, body = exchange(UnixConnection(self._control, self._timeout_s), "GET", path)
        if status != http.client.OK:
            raise PlatformError(f"GET {path} on {self._control} answered {status}: {body[:200]!r}")
        try:
            return msgspec.json.decode(body, type=kind)
        except UNREADABLE as error:
            raise PlatformError(f"GET {path} on {self._control}: {error}") from error

    def _put_to(self, function: str, what: str, body: msgspec.Struct) -> None:
        self._put(f"/functions/{quote(function, safe='')}/{what}", body)

    def _put(self, path: str, body: msgspec.Struct) -> None:
        status, answer = exchange(
            UnixConnection(self._control, self._timeout_s), "PUT", path, msgspec.json.encode(body)
        )
        if status >= http.client.MULTIPLE_CHOICES and status != http.client.NOT_FOUND:  # gone: nothing to do
            raise PlatformError(f"PUT {path} on {self._control} answered {status}: {answer[:200]!r}")
