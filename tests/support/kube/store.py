"""Objects, their versions and their past: what etcd and the watch cache are to the real server.

One counter gives every change its resource version. Objects are never altered once they are in; whoever reads
gets the very object and copies before changing. It knows no rule of any kind.
"""

from __future__ import annotations

import bisect
import dataclasses
import threading
from typing import Literal

from support.kube.answers import Object
from support.kube.kinds import Resource

Name = tuple[str, str]
"""Namespace (empty: none) and name."""
FIRST_VERSION = 1000
KEPT = 5000
"""Changes of one resource that can still be watched from."""


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """One change of one object; `before` is None for a new one."""

    version: int
    type: Literal["ADDED", "MODIFIED", "DELETED"]
    item: Object
    before: Object | None


class Store:
    """All objects. Its condition is notified of every change."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.version = FIRST_VERSION
        self._objects: dict[tuple[str, str], dict[Name, Object]] = {}
        self._past: dict[tuple[str, str], list[Change]] = {}
        self._floors: dict[tuple[str, str], int] = {}
        self._least = FIRST_VERSION

    def get(self, resource: Resource, name: Name) -> Object | None:
        """One object."""
        with self.changed:
            return self._objects.get(resource.key, {}).get(name)

    def all(self, resource: Resource, namespace: str = "") -> tuple[int, list[Object]]:
        """The present version, and objects by namespace and name; an empty namespace: of all."""
        with self.changed:
            found = self._objects.get(resource.key, {})
            names = sorted(n for n in found if not namespace or n[0] == namespace)
            return self.version, [found[n] for n in names]

    def every(self) -> list[tuple[tuple[str, str], Object]]:
        """Everything there is, with its resource's key."""
        with self.changed:
            return [(key, item) for key, found in self._objects.items() for item in found.values()]

    def put(self, resource: Resource, name: Name, item: Object) -> Object:
        """Writes an object; it gets the next version."""
        with self.changed:
            objects = self._objects.setdefault(resource.key, {})
            before = objects.get(name)
            objects[name] = item
            self._tell(resource, "ADDED" if before is None else "MODIFIED", item, before)
            return item

    def remove(self, resource: Resource, name: Name) -> Object:
        """Takes an object away; the last one told has the version of that."""
        with self.changed:
            before = self._objects[resource.key].pop(name)
            item = {**before, "metadata": {**before["metadata"]}}
            self._tell(resource, "DELETED", item, before)
            return item

    def _tell(
        self,
        resource: Resource,
        kind: Literal["ADDED", "MODIFIED", "DELETED"],
        item: Object,
        before: Object | None,
    ) -> None:
        self.version += 1
        item["metadata"]["resourceVersion"] = str(self.version)
        past = self._past.setdefault(resource.key, [])
        past.append(Change(self.version, kind, item, before))
        if len(past) > KEPT:
            self._floors[resource.key] = past[len(past) - KEPT].version
            del past[: len(past) - KEPT]
        self.changed.notify_all()

    def compact(self) -> None:
        """Forgets the past: watches can begin from now on only."""
        with self.changed:
            self.version += 1
            for past in self._past.values():
                past.clear()
            self._floors.clear()
            self._least = self.version

    def floor(self, resource: Resource) -> int:
        """Versions below this cannot be watched from."""
        with self.changed:
            return self._floors.get(resource.key, self._least)

    def since(self, resource: Resource, version: int) -> list[Change]:
        """Changes after a version, the oldest first."""
        with self.changed:
            past = self._past.get(resource.key, [])
            return past[bisect.bisect_right(past, version, key=lambda c: c.version) :]
