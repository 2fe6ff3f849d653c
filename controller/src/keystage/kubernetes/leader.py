"""Who may write: one of several processes, by a Lease.

Before it: `client.Cluster` of the release's namespace. After it: the controller, which starts its loop and
its reconciler when it leads, and ends at once when it no longer does. Whether a lease has run out is judged
by this process' own monotonic clock, from when it saw the lease change: clocks of machines need not agree.
It must not know what the leader does.

`kubernetes.leaderelection` of the official client was not taken: it cannot give the lease back, so that every
restart costs its whole duration; it judges by the wall clock, which may be set; a connection that is refused
ends it; and its exchanges have no time-out that keeps the promise below.

The promise: exchanges are bounded such that whoever fails to renew for `renew_s` seconds knows it before
anybody else may take the lease (`lease_s`), if both clocks run equally fast.
"""

from __future__ import annotations

import datetime as dt
import logging
import random
import threading
import time
from collections.abc import Callable

from keystage.kubernetes.client import CONNECT_S, LEASES, Cluster, Object
from keystage.kubernetes.errors import ClusterError, Conflict, NotFound

LEASE_S = 15
RENEW_S = 10
RETRY_S = 2
"""As leaders of Kubernetes' own have them."""
LEAST_TIMEOUT_S = 1.0
_log = logging.getLogger(__name__)


class Leader:
    """One candidate; it runs once.

    Args:
        cluster: the API server; the lease is in its namespace.
        name: the lease's name.
        identity: this process' own, of no other and of no earlier one.
        lease_s: seconds after its last renewal in which nobody else may take it; whole ones.
        renew_s: seconds without a renewal after which it counts as lost; less than `lease_s`.
        retry_s: seconds between two tries.
    """

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        identity: str,
        *,
        lease_s: int = LEASE_S,
        renew_s: float = RENEW_S,
        retry_s: float = RETRY_S,
    ) -> None:
        if not 0 < retry_s < renew_s < lease_s:
            raise ValueError(
                f"lease {name}: must be 0 < retry_s < renew_s < lease_s, "
                f"not {retry_s:g}, {renew_s:g}, {lease_s}"
            )
        timeout_s = max(LEAST_TIMEOUT_S, lease_s - renew_s - CONNECT_S)
        self._cluster = cluster.within(cluster.namespace, timeout_s=timeout_s)
        self._name = name
        self._identity = identity
        self._lease_s = lease_s
        self._renew_s = renew_s
        self._retry_s = retry_s
        self._lease: Object = {}
        """As it was seen last; ours is written over it."""
        self._seen_s = 0.0
        """When it was first seen so (monotonic seconds)."""
        self._renewed_s = float("-inf")
        self._is_held = False
        self._trouble = ""
        self._released = threading.Event()

    @property
    def is_leader(self) -> bool:
        """Whether this process may write now: false as soon as the lease counts as lost."""
        return self._is_held and time.monotonic() - self._renewed_s < self._renew_s

    @property
    def holder(self) -> str:
        """Who held the lease when it was seen last, empty: nobody."""
        return str(self._lease.get("spec", {}).get("holderIdentity") or "")

    def run(self, on_lead: Callable[[], None]) -> bool:
        """Waits for the lease, then keeps it; returns when it is lost or given back.

        Args:
            on_lead: called once, when it is held; starts the work and returns.

        Returns:
            True: `release` was called. False: it is lost, and the work must end at once.
        """
        try:
            while not self._take():
                if self._released.wait(self._retry_s * random.uniform(0.8, 1.2)):
                    return True
            if self._released.is_set():  # told to end while it took the lease: nothing is begun
                return True
            _log.info("%s holds lease %s", self._identity, self._name)
            on_lead()
            while not self._released.wait(self._retry_s):
                # Not tried once it is lost: a try takes seconds, in which another may lead already.
                if not (self.is_leader and self._take()) and not self.is_leader:
                    _log.error(
                        "%s lost lease %s to %s", self._identity, self._name, self._trouble or self.holder
                    )
                    return False
            return True
        finally:
            self._give_back()

    def release(self) -> None:
        """Has `run` give the lease back and return. What writes must have ended before.

        It returns at once, and may be called in a signal's handler.
        """
        self._released.set()

    # ------------------------------------------------------------ one exchange

    def _take(self) -> bool:
        """Takes or renews the lease.

        Returns:
            Whether that was done.
        """
        began_s = time.monotonic()
        try:
            if not self._is_held:
                self._look()
                if not self._is_free():
                    return False
            self._write(self._identity, self._lease_s)
        except Conflict:
            self._lose_to_another()
            return False
        except ClusterError as error:
            if not self._trouble:
                _log.warning("lease %s cannot be %s: %s", self._name, self._verb(), error)
            self._trouble = str(error)
            return False
        self._trouble = ""
        self._renewed_s = began_s
        self._is_held = True
        return True

    def _verb(self) -> str:
        return "renewed" if self._is_held else "taken"

    def _look(self) -> None:
        try:
            found = self._cluster.get(LEASES, self._name)
        except NotFound:
            found = {}
        if _version(found) != _version(self._lease):
            self._seen_s = time.monotonic()
        self._lease = found

    def _is_free(self) -> bool:
        if self.holder in ("", self._identity):
            return True
        lasts_s = self._lease["spec"].get("leaseDurationSeconds") or self._lease_s
        return time.monotonic() - self._seen_s >= lasts_s

    def _lose_to_another(self) -> None:
        """Somebody wrote it since we saw it: another candidate, or a person who edits a label."""
        if not self._is_held:
            return
        try:
            self._look()
        except ClusterError as error:
            self._trouble = str(error)
            return
        if self.holder != self._identity:
            self._is_held = False

    def _write(self, holder: str, lasts_s: int) -> None:
        now = dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        old = self._lease.get("spec", {})
        changes = 0 if not old else (old.get("leaseTransitions") or 0) + (self.holder != holder != "")
        spec = {
            **old,
            "holderIdentity": holder,
            "leaseDurationSeconds": lasts_s,
            "renewTime": now,
            "acquireTime": old["acquireTime"] if self.holder == holder and "acquireTime" in old else now,
            "leaseTransitions": changes,
        }
        body: Object = {"apiVersion": LEASES.version, "kind": "Lease", "spec": spec}
        if self._lease:
            body["metadata"] = self._lease["metadata"]  # its version is the condition
            self._lease = self._cluster.replace(LEASES, self._name, body, manager=self._identity[:128])
        else:
            body["metadata"] = {"name": self._name}
            self._lease = self._cluster.create(LEASES, body, manager=self._identity[:128])
        self._seen_s = time.monotonic()

    def _give_back(self) -> None:
        if not self.is_leader:
            self._is_held = False
            return
        self._is_held = False
        try:
            self._write("", 1)
        except ClusterError as error:
            _log.warning("lease %s is not given back, it ends in %d s: %s", self._name, self._lease_s, error)


def _version(lease: Object) -> tuple[str, str]:
    metadata = lease.get("metadata", {})
    return metadata.get("uid", ""), metadata.get("resourceVersion", "")
