"""Objects as they will be: what was sent and is not in the informer's view yet.

Before it: `reconciler` sends operations. After it: the next plan sees their effect at once, so that nothing
is done twice. An entry goes when the informer shows the same version or a newer one, when the operation
failed, or when the informer has been right for a while since: one whose connection is silent shows nothing,
and what it does not show is not gone. Belongs to one thread. It must not talk to the cluster.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from keystage.kubernetes.view import is_deleted

Object = dict[str, Any]
SETTLE_S = 5.0
"""An informer that is well shows a change within milliseconds."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Entry:
    object: Object
    until_s: float | None
    """None: still being sent."""
    was_seen: bool
    """The informer has shown it: where it does no longer, it is gone; else it is to be shown yet."""


class Expected:
    """Expected objects of one kind, by name."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}

    def send(self, name: str, obj: Object) -> None:
        """An operation is on its way that will make the object so."""
        before = self._entries.get(name)
        was_seen = before.was_seen if before is not None else bool(obj["metadata"].get("uid"))
        self._entries[name] = _Entry(obj, None, was_seen)

    def done(self, name: str, obj: Object | None, at_s: float) -> None:
        """It was carried out.

        Args:
            name: of the object.
            obj: as the API server answered, None: it did not say, the prediction holds.
            at_s: Unix seconds.
        """
        before = self._entries.get(name)
        known = obj if obj is not None else before.object if before is not None else None
        if known is not None:
            was_seen = before is None or before.was_seen
            self._entries[name] = _Entry(known, at_s + SETTLE_S, was_seen)

    def failed(self, name: str) -> None:
        """It was not carried out, or nobody knows."""
        self._entries.pop(name, None)

    def merge(self, seen: Mapping[str, Object], right_at_s: float) -> dict[str, Object]:
        """The informer's view, with what is expected in place of what is older.

        Args:
            seen: by name.
            right_at_s: when that view was last known to be right (Unix seconds).
        """
        merged = dict(seen)
        for name, entry in list(self._entries.items()):
            if self._is_over(entry, seen.get(name), right_at_s):
                del self._entries[name]
            else:
                merged[name] = entry.object
                if name in seen:
                    self._entries[name] = dataclasses.replace(entry, was_seen=True)
        return merged

    def _is_over(self, entry: _Entry, seen: Object | None, right_at_s: float) -> bool:
        mine = entry.object["metadata"]
        if seen is not None and mine.get("uid") and seen["metadata"].get("uid") != mine["uid"]:
            return True
        if entry.until_s is None:
            return False
        if right_at_s >= entry.until_s:
            return True
        if seen is None:  # not shown yet, or gone already
            return entry.was_seen and is_deleted(entry.object)
        if is_deleted(entry.object):
            return is_deleted(seen)
        return _version(seen) >= _version(entry.object)


def merged(obj: Mapping[str, Any], patch: Mapping[str, Any]) -> Object:
    """An object after a merge patch (RFC 7386); the given one stays as it is."""
    result = dict(obj)
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, Mapping):
            inner = result.get(key)
            result[key] = merged(inner if isinstance(inner, Mapping) else {}, value)
        else:
            result[key] = value
    return result


def _version(obj: Mapping[str, Any]) -> int:
    """Versions grow as numbers (Kubernetes 1.35 promises it); anything else counts as new."""
    text = obj["metadata"].get("resourceVersion", "")
    return int(text) if text.isdigit() else 0
