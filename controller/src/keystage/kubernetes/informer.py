"""Follows one kind of object: a view in memory that a list starts and a watch keeps right.

Before it: `client.Cluster`. After it: the gateway's backend, the controller's world, both of which read
`items` as often as they like. A watch that broke, was silent for too long, or whose version is gone is never
trusted again: everything is listed anew and the difference taken, so that no DELETED can be missed for good.
It must not write, nor interpret what it holds.

`kubernetes.informer` of the official client was not taken: it has no time-out for a silent connection, goes
on from its last version after an error of any kind, cannot be stopped while a watch is quiet, does not tell
whether or how long ago it was right, and keeps models that drop fields which the client does not know.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType

from keystage.kubernetes.client import Cluster, Event, Kind, Object
from keystage.kubernetes.errors import ClusterError, ClusterUnavailable, Gone

WATCH_S = 15.0
"""The server ends a watch after so long: its regular end proves that nothing was missed, so that a view
of a well cluster is never much older than this."""
SILENCE_S = 5.0
"""Beyond `WATCH_S` a connection is dead: a third of the age at which nobody trusts a view (60 s)."""
RELIST_S = 600.0
"""Everything is listed again so often, in case a server lost events without knowing it."""
SHORT_S = 1.0
"""A watch that ends by itself within this, without an event, counts as broken."""
LEAST_PAUSE_S = 0.1
MOST_PAUSE_S = 5.0
STOP_S = 5.0
"""For the thread to end; what it waits for then is a server that does not answer, and it is a daemon."""
_log = logging.getLogger(__name__)


class Informer:
    """The view of one kind.

    Args:
        cluster: the API server, and the namespace if the kind has one.
        kind: what is followed.
        labels: label selector.
        fields: field selector.
        changed: called on the informer's thread after the view changed; must be quick.
        watch_s: see `WATCH_S`.
        relist_s: see `RELIST_S`.
    """

    def __init__(
        self,
        cluster: Cluster,
        kind: Kind,
        *,
        labels: str = "",
        fields: str = "",
        changed: Callable[[], None],
        watch_s: float = WATCH_S,
        relist_s: float = RELIST_S,
    ) -> None:
        self._cluster = cluster
        self._kind = kind
        self._labels = labels
        self._fields = fields
        self._changed = changed
        self._watch_s = watch_s
        self._relist_s = relist_s
        self._lock = threading.Lock()
        self._objects: dict[str, Object] = {}
        self._snapshot: Mapping[str, Object] | None = None
        self._version = ""
        self._synced = threading.Event()
        self._synced_at_s = 0.0
        self._failures = 0
        self._trouble = ""
        self._stopping = threading.Event()
        self._break: Callable[[], None] | None = None
        self._thread = threading.Thread(target=self._run, name=f"informer-{kind.plural}", daemon=True)

    def start(self) -> None:
        """Begins to follow; see `wait_synced`."""
        self._thread.start()

    def stop(self) -> None:
        """Ends; the view stays as it was last. May be called more than once, and before `start`."""
        self._stopping.set()
        with self._lock:
            breaking = self._break
        if breaking is not None:
            breaking()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(STOP_S)

    def wait_synced(self, timeout_s: float) -> bool:
        """Waits for the first list.

        Returns:
            Whether there is one; see `trouble` if not.
        """
        return self._synced.wait(timeout_s)

    def items(self) -> Mapping[str, Object]:
        """All objects by name, as they were at one moment. They are shared: nobody may change them.

        Where those of every namespace are followed the keys are `namespace/name`.
        """
        with self._lock:
            if self._snapshot is None:
                self._snapshot = MappingProxyType(dict(self._objects))
            return self._snapshot

    def get(self, name: str) -> Object | None:
        """One object; shared, as in `items`."""
        with self._lock:
            return self._objects.get(name)

    def age_s(self) -> float:
        """Seconds since the view was last known to be right, infinite before the first list."""
        return time.monotonic() - self._synced_at_s if self._synced.is_set() else float("inf")

    @property
    def trouble(self) -> str:
        """Why the view cannot be brought up to date now, empty where it can."""
        return self._trouble

    @property
    def is_alive(self) -> bool:
        """Whether its thread runs."""
        return self._thread.is_alive()

    @property
    def kind(self) -> Kind:
        """What is followed."""
        return self._kind

    def _key(self, metadata: Mapping[str, str]) -> str:
        namespace = "" if self._kind.is_namespaced else metadata.get("namespace", "")
        return f"{namespace}/{metadata['name']}" if namespace else metadata["name"]

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._list()
                self._follow()
            except Gone as error:
                if not self._stopping.is_set():
                    _log.info("%s are listed anew: %s", self._kind.plural, error)
                    self._pause()
            except ClusterError as error:
                self._fail(str(error))
            except Exception as error:  # noqa: BLE001
                # Whatever it is: were this thread to end, the view would be stale for ever.
                _log.exception("following %s failed", self._kind.plural)
                self._fail(repr(error))

    def _list(self) -> None:
        listing = self._cluster.list(self._kind, labels=self._labels, fields=self._fields)
        found = {self._key(obj["metadata"]): obj for obj in listing.items}
        with self._lock:
            is_same = _versions(found) == _versions(self._objects)
            if not is_same:
                self._objects = found
                self._snapshot = None
        self._version = listing.version
        is_first = not self._synced.is_set()
        self._prove()
        if is_first or not is_same:
            self._changed()

    def _follow(self) -> None:
        """Watches, one watch after the other, until it is time for a list."""
        until_s = time.monotonic() + self._relist_s
        while not self._stopping.is_set() and (left_s := until_s - time.monotonic()) > 0:
            began_s = time.monotonic()
            any_event = False
            for event in self._cluster.watch(
                self._kind,
                self._version,
                labels=self._labels,
                fields=self._fields,
                timeout_s=min(self._watch_s, left_s),
                silence_s=SILENCE_S,
                opened=self._opened,
            ):
                any_event = True
                self._take(event)
                self._recover()
            lasted_s = time.monotonic() - began_s
            if not any_event and lasted_s < min(SHORT_S, left_s):
                raise ClusterUnavailable(f"watch of {self._kind.plural} ended after {lasted_s:.3f} s")
            self._prove()
            self._recover()

    def _opened(self, breaking: Callable[[], None]) -> None:
        with self._lock:
            self._break = breaking
        if self._stopping.is_set():
            breaking()

    def _take(self, event: Event) -> None:
        metadata = event.object["metadata"]
        self._version = metadata["resourceVersion"]
        if event.type != "BOOKMARK":
            with self._lock:
                if event.type == "DELETED":
                    self._objects.pop(self._key(metadata), None)
                else:
                    self._objects[self._key(metadata)] = event.object
                self._snapshot = None
        self._prove()
        if event.type != "BOOKMARK":
            self._changed()

    def _prove(self) -> None:
        """The server just said what there is, or that there is nothing new."""
        if self._stopping.is_set():
            return
        self._synced_at_s = time.monotonic()
        self._synced.set()
        self._trouble = ""

    def _recover(self) -> None:
        """A watch does what it shall, of which a list proves nothing: it may fail after each."""
        if self._failures and not self._stopping.is_set():
            _log.info("%s are followed again, after %d failures", self._kind.plural, self._failures)
            self._failures = 0

    def _fail(self, why: str) -> None:
        if self._stopping.is_set():
            return  # it was broken off
        if not self._failures:
            _log.warning("the view of %s grows old: %s", self._kind.plural, why)
        self._trouble = why
        self._pause()

    def _pause(self) -> None:
        """Before the next try; at random, so that not everybody lists at once when a server comes back."""
        most_s = min(MOST_PAUSE_S, LEAST_PAUSE_S * 2 ** min(self._failures, 10))
        self._failures += 1
        self._stopping.wait(most_s * random.uniform(0.5, 1.0))


def _versions(objects: Mapping[str, Object]) -> dict[str, tuple[str, str]]:
    found = {}
    for name, obj in objects.items():
        metadata = obj["metadata"]
        found[name] = (metadata.get("uid", ""), metadata.get("resourceVersion", ""))
    return found


def wait_all(informers: Mapping[str, Informer], timeout_s: float) -> str:
    """Waits until all have their first list.

    Returns:
        Empty, or which have none and why.
    """
    until_s = time.monotonic() + timeout_s
    late = [
        f"{name}: {informer.trouble or 'no answer'}"
        for name, informer in informers.items()
        if not informer.wait_synced(max(0.0, until_s - time.monotonic()))
    ]
    return "; ".join(late)
