"""The controller on a cluster: it looks always, and steers while it holds the lease.

Before it: `app`. After it: informers, and once this process leads: loop and reconciler with what they need.
A second one stands by with a view of its own, so that it continues from what the first wrote to functions'
status, without a bump. Who loses the lease ends at once: two that write are worse than none. It must not hold
policy.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator

from keystage.controller.config import ControllerSettings
from keystage.controller.decisions import DecisionLog
from keystage.controller.health import HealthServer
from keystage.controller.loop import Loop
from keystage.controller.metrics import Counts
from keystage.controller.platforms.bundles import Bundles
from keystage.controller.platforms.kubernetes import KubernetesPlatform
from keystage.controller.telling import Telling
from keystage.kubernetes.asking import Asking, internal_bearer
from keystage.kubernetes.client import Cluster, connect
from keystage.kubernetes.cluster_events import Events
from keystage.kubernetes.gateway_loads import GatewayLoads
from keystage.kubernetes.gateway_reports import GatewayReports
from keystage.kubernetes.keysmanagers import KeysManagers
from keystage.kubernetes.leader import LEASE_S, RENEW_S, RETRY_S, Leader
from keystage.kubernetes.pod_starts import PodStarts
from keystage.kubernetes.reconciler import Links, Reconciler
from keystage.kubernetes.resize import Resizer
from keystage.kubernetes.view import name_of, status_of_object
from keystage.kubernetes.wishes import Wishes
from keystage.kubernetes.world import World
from keystage.wire.bearer import Bearer
from keystage.wire.metrics import Sample, expose

LEASE = "keystage-controller"
SILENT_S = 60.0
"""A loop that did not look for so long hangs: one tick waits for routers and nothing else."""
UNREADY_S = 60.0
"""As old as a view may be until nobody trusts it (`gateway.backend.STALE_S`)."""
JOIN_S = 10.0
"""For the loop's last tick to end."""
log = logging.getLogger(__name__)


class Lead:
    """Everything that runs while this process leads; it starts once.

    Args:
        settings: of the process.
        world: the informers.
        token: of exchanges with other pods.
        identity: of this process.
    """

    def __init__(self, settings: ControllerSettings, world: World, token: Bearer, identity: str) -> None:
        pods = settings.pod_settings()
        self._stop = threading.Event()
        self._world = world
        self._asking = Asking(token)
        self.wishes = Wishes()
        self._loads = GatewayLoads(world, self._asking)
        self._keysmanagers = KeysManagers(world, self._asking, lambda: self.wishes.read().key_stages)
        default_requests = dict(pods.requests)
        events = Events(world.cluster, identity)
        self._resizer = Resizer(
            world,
            self._asking,
            self.wishes.set_cores,
            lambda function, text: events.tell(function, "ResizeFallback", text, is_warning=True),
            default_requests=default_requests,
        )
        self._bundles = Bundles(settings.home / "bundles")
        self.platform = KubernetesPlatform(
            world,
            self.wishes,
            self._loads,
            self._keysmanagers.statuses,
            self._resizer.capped,
            self._bundles,
            default_requests=default_requests,
            beside_vendor=settings.beside_vendor_plugin,
            timeout_s=settings.stats_timeout_s,
            budget_replicas=settings.budget_replicas,
        )
        self.starts = PodStarts(world.clock.now_s)
        self._reconciler = Reconciler(
            world,
            self.wishes,
            pods,
            Links(
                asking=self._asking,
                requests_on=lambda *about: self._loads.now().requests_on(*about),
                parameter_bytes=self.platform.parameter_bytes,
                keysmanagers=self._keysmanagers if pods.has_keysmanager else None,
                starts=self.starts,
            ),
            identity=identity,
            on_crash=lambda _: self.has_failed.set(),
        )
        settings.home.mkdir(mode=0o700, parents=True, exist_ok=True)
        decisions = DecisionLog(settings.home / "decisions.jsonl", settings.decisions_bytes)
        self.counts = Counts()
        self._telling = Telling(identity, GatewayReports(world, self._asking))
        self._loop = Loop(
            self.platform,
            settings.policy_settings(),
            decisions,
            tick_s=settings.tick_s,
            telling=self._telling,
            counts=self.counts,
        )
        self._thread = threading.Thread(target=self._loop.run, args=(self._stop,), name="loop", daemon=True)
        self.has_failed = threading.Event()
        self._is_started = False

    def start(self) -> None:
        """Begins to steer."""
        self.platform.looked_at_s = self._reconciler.turned_at_s = time.monotonic()
        self._is_started = True
        for part in (self._loads, self._keysmanagers, self._bundles, self._resizer, self._reconciler):
            part.start()
        self._telling.start()
        self._thread.start()

    def stop(self) -> None:
        """Ends; nothing is begun afterwards. An activation in progress may still note that its pod serves."""
        if not self._is_started:
            return
        self._stop.set()
        if self._thread.is_alive():  # it is started last
            self._thread.join(JOIN_S)
        self._telling.stop()
        for part in (self._reconciler, self._resizer, self._keysmanagers, self._loads, self._bundles):
            part.stop()
        self.platform.close()
        self._asking.close()

    def ill(self) -> str:
        """Why it should be started anew, empty while it is well."""
        if self.has_failed.is_set():
            return "a thread ended by a bug"
        if not self._is_started:
            return ""
        turned_s = {"loop": self.platform.looked_at_s, "reconciler": self._reconciler.turned_at_s}
        for what, at_s in turned_s.items():
            silent_s = time.monotonic() - at_s
            if silent_s > SILENT_S:
                return f"the {what} turned {silent_s:.0f} s ago last, at most {SILENT_S:g} s are well"
        return ""


def run_clustered(settings: ControllerSettings, stop: threading.Event) -> bool:
    """Looks, and steers while it leads, until `stop` is set.

    Returns:
        False: the loop failed. Where the lease was lost it does not return: the process has ended.

    Raises:
        ClusterUnavailable: nothing says where the API server is.
        WireError: the deployment's secret cannot be used.
        OSError: the health port is taken.
    """
    assert settings.wire_key_file is not None
    token = internal_bearer(settings.wire_key_file)
    functions = Cluster(connect(settings.kubeconfig), settings.functions_in)
    system = functions.within(settings.system_in)
    world = World(functions, system, sees_all_pods=settings.node_pods)
    identity = f"{socket.gethostname()}_{secrets.token_hex(4)}"
    leader = Leader(
        system,
        LEASE,
        identity,
        lease_s=settings.lease_s,
        renew_s=settings.lease_s * RENEW_S / LEASE_S,
        retry_s=settings.lease_s * RETRY_S / LEASE_S,
    )
    lead = Lead(settings, world, token, identity)
    health = HealthServer(
        settings.health_port,
        ill=lambda: lead.ill() or ("" if world.is_alive() else "an informer ended"),
        unready=lambda: unready(world),
        metrics=lambda: expose(
            [
                *samples(world, is_leader=leader.is_leader),
                *lead.counts.samples(),
                *lead.starts.samples(),
            ]
        ),
    )
    threading.excepthook = lambda crash: _crashed(crash, lead)
    health.start()
    world.start()
    log.info("health and metrics on port %d", health.port)
    try:
        while not world.wait_synced(1.0):
            if stop.is_set() or lead.has_failed.is_set():
                return stop.is_set()
            log.warning("the cluster is not seen yet: %s", world.trouble() or "no answer")
        return _lead(leader, lead, stop)
    finally:
        lead.stop()
        world.stop()
        health.stop()
        functions.close()


def unready(world: World) -> str:
    """Why this process is not to be counted on, empty while it is."""
    age_s = world.age_s()
    if age_s <= UNREADY_S:
        return ""
    return f"the cluster was seen {age_s:.0f} s ago last: {world.trouble() or 'no answer'}"


def samples(world: World, *, is_leader: bool) -> Iterator[Sample]:
    """The controller's metrics."""
    yield Sample("keystage_view_age_seconds", {}, world.age_s())
    yield Sample("keystage_leader", {}, float(is_leader))
    for obj in world.functions().values():
        status, name = status_of_object(obj), {"function_name": name_of(obj)}
        if status.desired is not None:
            yield Sample("keystage_function_desired_replicas", name, status.desired)
        yield Sample("keystage_function_ready_replicas", name, status.ready)


def _crashed(crash: threading.ExceptHookArgs, lead: Lead) -> None:
    """A bug in any thread ends the process: it is started anew, and goes on from what the cluster shows."""
    name = crash.thread.name if crash.thread is not None else "a thread"
    error = crash.exc_value
    log.critical("%s ended by a bug", name, exc_info=error if error is not None else True)
    lead.has_failed.set()


def _lead(leader: Leader, lead: Lead, stop: threading.Event) -> bool:
    """Waits for the lease, steers, and gives the lease back after the last write."""

    def end() -> None:
        while not stop.wait(0.2) and not lead.has_failed.is_set():
            pass
        lead.stop()
        leader.release()

    threading.Thread(target=end, name="end", daemon=True).start()
    if not leader.run(lead.start):
        log.critical("the lease is lost: this process ends now, another one decides")
        os._exit(1)  # what runs must not write any more, not even to end well
    return not lead.has_failed.is_set()
