"""What Keystage relies on in a Kubernetes API server: lists and watches.

One suite over the fake and over the real one (`KUBECONFIG=... pytest -m e2e tests/contract`).
"""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from support.kube.answers import Object
from support.kube.contract_world import World, name_of, world

from keystage.kubernetes.client import FUNCTIONS, PODS, Event
from keystage.kubernetes.errors import Gone, Invalid

__all__ = ["world"]


def version_of(item: Object) -> int:
    return int(item["metadata"]["resourceVersion"])


def seen(world: World, version: str, *, count: int, **given: Any) -> list[Event]:
    """The first events after a version, without bookmarks; all of one second where there are fewer."""
    found = []
    for event in world.cluster.watch(FUNCTIONS, version, timeout_s=5, **given):
        if event.type != "BOOKMARK":
            found.append(event)
        if len(found) == count:
            break
    return found


def told(events: list[Event]) -> list[tuple[str, str]]:
    return [(e.type, name_of(e.object)) for e in events]


def test_a_list_says_the_version_to_watch_from(world: World) -> None:
    before = world.cluster.list(FUNCTIONS)
    item = world.made()
    after = world.cluster.list(FUNCTIONS)
    assert name_of(item) not in {name_of(i) for i in before.items}
    assert name_of(item) in {name_of(i) for i in after.items}
    assert int(before.version) < version_of(item) <= int(after.version)


def test_items_of_a_typed_list_leave_out_their_kind(world: World) -> None:
    world.made_pod()
    world.made()
    _, body = world.raw("GET", world.path(PODS))
    assert body["kind"] == "PodList"
    assert all("kind" not in item for item in body["items"])
    _, body = world.raw("GET", world.path(FUNCTIONS))
    assert body["kind"] == "FunctionList"
    assert all(item["kind"] == "Function" for item in body["items"])


def test_a_watch_tells_every_change_in_order(world: World) -> None:
    version = world.cluster.list(FUNCTIONS).version
    item = world.made()
    name = name_of(item)
    changed = world.cluster.patch(FUNCTIONS, name, {"spec": {"replicas": 1}}, manager="test")
    world.cluster.delete(FUNCTIONS, name)
    events = seen(world, version, count=3)
    assert told(events) == [("ADDED", name), ("MODIFIED", name), ("DELETED", name)]
    assert events[0].object == item
    assert events[1].object == changed
    assert version_of(events[2].object) > version_of(changed)
    assert events[2].object["spec"] == changed["spec"]
    again = seen(world, str(version_of(changed)), count=1)
    assert told(again) == [("DELETED", name)]


def test_a_watch_hears_what_happens_while_it_is_open(world: World) -> None:
    version = world.cluster.list(FUNCTIONS).version
    found: list[Event] = []
    reader = threading.Thread(target=lambda: found.extend(seen(world, version, count=1)))
    reader.start()
    item = world.made()
    reader.join(20)
    assert told(found) == [("ADDED", name_of(item))]


def test_an_object_that_stops_matching_is_told_as_deleted(world: World) -> None:
    mark = world.name("m")
    version = world.cluster.list(FUNCTIONS).version
    world.made({"mark": "other"})
    item = world.made({"mark": mark})
    name = name_of(item)
    away = world.cluster.patch(FUNCTIONS, name, {"metadata": {"labels": {"mark": "gone"}}}, manager="test")
    world.cluster.patch(FUNCTIONS, name, {"spec": {"replicas": 1}}, manager="test")
    back = world.cluster.patch(FUNCTIONS, name, {"metadata": {"labels": {"mark": mark}}}, manager="test")
    events = seen(world, version, count=3, labels=f"mark={mark}")
    assert told(events) == [("ADDED", name), ("DELETED", name), ("ADDED", name)]
    assert events[1].object["metadata"]["labels"] == {"mark": mark}  # as it was when it still matched
    assert version_of(events[1].object) == version_of(away)
    assert events[2].object == back


def test_a_watch_by_name_tells_of_nothing_else(world: World) -> None:
    version = world.cluster.list(FUNCTIONS).version
    world.made()
    item = world.made()
    world.made()
    events = seen(world, version, count=1, fields=f"metadata.name={name_of(item)}")
    assert told(events) == [("ADDED", name_of(item))]


def test_a_pod_comes_into_a_watch_when_it_is_bound(world: World) -> None:
    pod = world.made_pod()
    name, version = name_of(pod), world.cluster.list(PODS).version
    world.raw("POST", world.path(PODS, name, "binding"), world.binding(name))
    for event in world.cluster.watch(PODS, version, fields=f"spec.nodeName={world.node}", timeout_s=5):
        if event.type != "BOOKMARK":
            assert (event.type, name_of(event.object)) == ("ADDED", name)
            assert event.object["kind"] == "Pod"
            return
    pytest.fail("the watch ended without the pod")


def test_a_watch_ends_when_its_time_is_over_with_a_bookmark_before(world: World) -> None:
    item = world.made()
    timeout_s = 14 if world.is_real else 1  # etcd tells of progress every 5 s; none comes in the last 2 s
    events = list(world.cluster.watch(FUNCTIONS, str(version_of(item)), timeout_s=timeout_s))
    assert {e.type for e in events} == {"BOOKMARK"}
    last = events[-1].object
    assert version_of(last) >= version_of(item)
    assert last["kind"] == "Function"
    assert "name" not in last["metadata"]


def test_a_version_that_is_no_longer_kept_is_gone(world: World) -> None:
    with pytest.raises(Gone, match="too old resource version: 1"):
        list(world.cluster.watch(FUNCTIONS, "1", timeout_s=2))
    with pytest.raises(Gone):
        list(world.cluster.watch(PODS, "1", timeout_s=2))


def test_selectors_of_a_watch_are_read_before_it_begins(world: World) -> None:
    with pytest.raises(Invalid, match="unable to parse requirement"):
        list(world.cluster.watch(FUNCTIONS, "0", labels="a b", timeout_s=2))
    with pytest.raises(Invalid, match="field label not supported"):
        list(world.cluster.watch(FUNCTIONS, "0", fields="spec.image=x", timeout_s=2))


def test_a_watch_from_nothing_begins_with_what_there_is(world: World) -> None:
    item = world.made()
    query = {"watch": "true", "timeoutSeconds": "1", "fieldSelector": f"metadata.name={name_of(item)}"}
    _, body = world.raw("GET", world.path(FUNCTIONS), query=query)
    assert (body["type"], body["object"]) == ("ADDED", item)


def test_a_long_list_comes_in_parts_of_one_version(world: World) -> None:
    names = {name_of(world.made({"long": "list"})) for _ in range(5)}
    query = {"labelSelector": "long=list", "limit": "2"}
    found, versions = [], set()
    while True:
        status, body = world.raw("GET", world.path(FUNCTIONS), query=query)
        assert status == 200
        found += [name_of(i) for i in body["items"]]
        versions.add(body["metadata"]["resourceVersion"])
        if not (token := body["metadata"].get("continue")):
            break
        query["continue"] = token
    assert sorted(found) == sorted(names)
    assert len(versions) == 1


def test_deleting_a_collection_keeps_the_others(world: World) -> None:
    kept = name_of(world.made())
    names = {name_of(world.made({"all": "these"})) for _ in range(2)}
    status, _ = world.raw("DELETE", world.path(FUNCTIONS), query={"labelSelector": "all=these"})
    assert status == 200
    left = {name_of(i) for i in world.cluster.list(FUNCTIONS).items}
    assert kept in left
    assert not names & left


def test_events_are_lines_of_json(world: World) -> None:
    version = world.cluster.list(FUNCTIONS).version
    world.made()
    world.made()
    query = {"watch": "true", "resourceVersion": version, "timeoutSeconds": "1"}
    _, body = world.raw("GET", world.path(FUNCTIONS), query=query)
    assert isinstance(body, bytes)
    assert [json.loads(line)["type"] for line in body.splitlines()] == ["ADDED", "ADDED"]
