"""One watch: from the store's changes to events, by selectors, with bookmarks, until its time is over."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from support.kube.answers import Object, bad_request, expired
from support.kube.faults import Faults
from support.kube.kinds import Resource
from support.kube.requests import Asking
from support.kube.selectors import Matches, by_fields, by_labels
from support.kube.store import Change, Store

TURN_S = 0.25
"""Between looks at whether the other side is still there."""


class Broken(Exception):
    """The watch breaks off without an end."""


def checked(resource: Resource, asking: Asking) -> Matches:
    """Reads what a watch selects.

    Raises:
        Refused: selectors or version are no such thing.
    """
    by_label = by_labels(asking.query.get("labelSelector", ""))
    by_field = by_fields(asking.query.get("fieldSelector", ""), resource)
    given = asking.query.get("resourceVersion", "")
    if given and not given.isdigit():
        raise bad_request(f'Invalid value: "{given}": strconv.ParseUint: parsing "{given}": invalid syntax')

    def matches(item: Object) -> bool:
        is_near = not asking.namespace or item["metadata"].get("namespace") == asking.namespace
        return is_near and by_label(item) and by_field(item)

    return matches


def events(
    store: Store,
    resource: Resource,
    asking: Asking,
    faults: Faults,
    bookmark_s: float,
    is_gone: Callable[[], bool],
) -> Iterator[Object]:
    """Events of a watch.

    Raises:
        Broken: a fault was asked for.
    """
    matches = checked(resource, asking)
    given = asking.query.get("resourceVersion", "")
    round_of = faults.watch_round
    end = time.monotonic() + float(asking.query.get("timeoutSeconds") or 1800)
    begun, first = _first(store, resource, given, matches)
    if begun is None:
        yield {"type": "ERROR", "object": expired(given, store.floor(resource)).body()}
        return
    version = begun
    yield from first
    told = time.monotonic()
    has_bookmarks = asking.is_on("allowWatchBookmarks")
    while not is_gone():
        with store.changed:
            if (faults.is_mute or not store.since(resource, version)) and faults.watch_round == round_of:
                store.changed.wait(min(TURN_S, bookmark_s, max(0.01, end - time.monotonic())))
            changes = [] if faults.is_mute else store.since(resource, version)
            present = store.version
        if faults.watch_round != round_of:
            raise Broken
        for change in changes:
            version = change.version
            if (event := _event(change, matches)) is not None:
                yield event
        is_over = time.monotonic() >= end and not faults.is_mute  # a half-open connection has no end
        if has_bookmarks and not faults.is_mute and (is_over or time.monotonic() - told >= bookmark_s):
            told = time.monotonic()
            version = max(version, present)
            yield _bookmark(resource, version)
        if is_over:
            return


def _first(store: Store, resource: Resource, given: str, matches: Matches) -> tuple[int | None, list[Object]]:
    with store.changed:
        if given in ("", "0"):
            version, items = store.all(resource)
            return version, [{"type": "ADDED", "object": item} for item in items if matches(item)]
        version = int(given)
        return (version if version >= store.floor(resource) else None), []


def _event(change: Change, matches: Matches) -> Object | None:
    was = change.before is not None and matches(change.before)
    if change.type == "DELETED":
        return {"type": "DELETED", "object": change.item} if was else None
    if matches(change.item):
        return {"type": "MODIFIED" if was else "ADDED", "object": change.item}
    if was:  # it stopped matching: told as it was, with the new version
        assert change.before is not None
        meta = {**change.before["metadata"], "resourceVersion": str(change.version)}
        return {"type": "DELETED", "object": {**change.before, "metadata": meta}}
    return None


def _bookmark(resource: Resource, version: int) -> Object:
    meta = {"resourceVersion": str(version)}
    item = {"kind": resource.kind, "apiVersion": resource.api_version, "metadata": meta}
    return {"type": "BOOKMARK", "object": item}
