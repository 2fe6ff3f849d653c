"""The informer over a server that breaks off, forgets, goes away or falls silent: nothing is missed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from support.kube.cluster import Kube
from support.kube.fixtures import kube as kube
from support.processes import wait_for

from keystage.kubernetes.client import PODS, SECRETS, Cluster, Event, Kind
from keystage.kubernetes.errors import ClusterUnavailable
from keystage.kubernetes.informer import Informer, wait_all


@contextmanager
def following(
    cluster: Cluster, kind: Kind = SECRETS, *, changed: Callable[[], None] = lambda: None, **options: float
) -> Iterator[Informer]:
    informer = Informer(cluster, kind, labels="t", changed=changed, **options)
    informer.start()
    assert informer.wait_synced(10)
    try:
        yield informer
    finally:
        informer.stop()


def make(cluster: Cluster, name: str, **labels: str) -> None:
    body = {"metadata": {"name": name, "labels": {"t": "1", **labels}}}
    cluster.create(SECRETS, body, manager="t")


def has(informer: Informer, *names: str) -> None:
    wait_for(lambda: set(informer.items()) == set(names), f"view of {names}")


def test_changes_come_and_what_leaves_the_selector_goes(kube: Kube) -> None:
    cluster = kube.cluster()
    make(cluster, "a")
    with following(cluster) as informer:
        has(informer, "a")
        make(cluster, "b")
        cluster.create(SECRETS, {"metadata": {"name": "other"}}, manager="t")
        has(informer, "a", "b")
        cluster.patch(SECRETS, "a", {"metadata": {"labels": {"t": None}}}, manager="t")
        has(informer, "b")
        held = informer.items()
        cluster.delete(SECRETS, "b")
        has(informer)
        assert set(held) == {"b"}  # as it was at one moment


@pytest.mark.parametrize("fault", ["drop", "gone", "outage", "refused"])
def test_what_happens_while_it_does_not_watch_is_found_by_the_next_list(kube: Kube, fault: str) -> None:
    cluster = kube.cluster()
    for name in ("kept", "goes"):
        make(cluster, name)
    admin = kube.cluster()
    with following(cluster) as informer:
        has(informer, "kept", "goes")

        def change() -> None:
            kube.delete("secrets", "goes")
            admin_body = {"metadata": {"name": "comes", "labels": {"t": "1"}}}
            kube.registry.create(kube.registry.named("secrets"), admin.namespace, admin_body, _player())

        if fault == "outage":
            with kube.outage():
                change()
                wait_for(lambda: informer.trouble, "trouble told")
                assert set(informer.items()) == {"kept", "goes"}  # the last that is known
        elif fault == "refused":
            kube.faults.fail(3, code=500, resource="secrets")
            kube.faults.drop_watches()
            change()
        else:
            kube.faults.is_mute = True
            change()
            if fault == "gone":
                kube.registry.store.compact()
            kube.faults.drop_watches()
            kube.faults.is_mute = False
        has(informer, "kept", "comes")
        wait_for(lambda: not informer.trouble, "well again")


def _player() -> object:
    from support.kube.registry import PLAYER

    return PLAYER


def test_a_version_that_the_server_forgot_leads_to_a_new_list(kube: Kube) -> None:
    class Forgetful(Cluster):
        """Once, it asks to watch from long ago."""

        asked: list[str]

        def watch(self, kind: Kind, version: str, **options: object) -> Iterator[Event]:  # type: ignore[override]
            first = not self.asked
            self.asked.append(version)
            return super().watch(kind, "1" if first else version, **options)  # type: ignore[arg-type]

    for number in range(5):
        make(kube.cluster(), f"s{number}")
    kube.registry.store.compact()
    cluster = Forgetful(kube.api_client(), kube.cluster().namespace)
    cluster.asked = []
    with following(cluster) as informer:
        wait_for(lambda: len(cluster.asked) > 1, "watched again")
        make(kube.cluster(), "late")
        has(informer, *(f"s{number}" for number in range(5)), "late")


def test_a_connection_that_says_nothing_is_given_up(kube: Kube, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keystage.kubernetes.informer.SILENCE_S", 0.2)
    cluster = kube.cluster()
    with following(cluster, watch_s=1.0) as informer:
        kube.faults.is_mute = True
        make(cluster, "a")
        has(informer, "a")  # by a list: no watch says a word
        kube.faults.is_mute = False


@pytest.mark.slow
def test_a_quiet_view_stays_young(kube: Kube) -> None:
    with following(kube.cluster(), watch_s=1.0) as informer:
        oldest_s = 0.0
        end_s = time.monotonic() + 5.0
        while time.monotonic() < end_s:
            oldest_s = max(oldest_s, informer.age_s())
            time.sleep(0.01)
        assert 0.5 < oldest_s < 4.5
        assert not informer.trouble


def test_it_tells_changes_and_only_those(kube: Kube) -> None:
    calls: list[int] = []
    cluster = kube.cluster()
    make(cluster, "a")
    with following(cluster, changed=lambda: calls.append(1), relist_s=0.2) as informer:
        wait_for(lambda: calls, "the first list is a change")
        before = len(calls)
        until_s = time.monotonic() + 1.0
        while time.monotonic() < until_s:  # several lists of the same
            time.sleep(0.01)
        assert len(calls) == before
        make(cluster, "b")
        has(informer, "a", "b")
        assert len(calls) > before


def test_a_right_that_is_missing_is_told_in_the_servers_words(kube: Kube) -> None:
    informer = Informer(kube.cluster(service_account="nobody"), PODS, changed=lambda: None)
    informer.start()
    try:
        told = wait_all({"pods": informer}, 0.5)
        assert told.startswith("pods: ")
        assert 'system:serviceaccount:keystage:nobody" cannot list resource "pods"' in told
        assert informer.age_s() == float("inf")
    finally:
        informer.stop()


def test_stop_ends_a_quiet_watch_at_once(kube: Kube) -> None:
    with following(kube.cluster()) as informer:
        began_s = time.monotonic()
        informer.stop()
        assert time.monotonic() - began_s < 10.0  # not the watch's minutes
        assert not any(thread.name == "informer-secrets" for thread in threading.enumerate())
    Informer(kube.cluster(), SECRETS, changed=lambda: None).stop()  # never started


def test_objects_of_all_namespaces_keep_apart(kube: Kube) -> None:
    for namespace in ("keystage", "keystage-fn"):
        make(kube.cluster(namespace), "same")
    everywhere = Kind("v1", "secrets", is_namespaced=False)
    with following(kube.cluster(), everywhere) as informer:
        has(informer, "keystage/same", "keystage-fn/same")


def test_watches_that_always_fail_are_begun_less_and_less(kube: Kube) -> None:
    class Deaf(Cluster):
        """It can list, and cannot watch."""

        tries = 0

        def watch(self, kind: Kind, version: str, **_: object) -> Iterator[Event]:  # type: ignore[override]
            self.tries += 1
            raise ClusterUnavailable("no watch")

    cluster = Deaf(kube.api_client(), kube.cluster().namespace)
    with following(cluster) as informer:
        make(kube.cluster(), "a")
        has(informer, "a")
        wait_for(lambda: cluster.tries == 4, "it tries on")
        before, until_s = cluster.tries, time.monotonic() + 1.0
        while time.monotonic() < until_s:
            time.sleep(0.01)
        assert cluster.tries - before <= 2  # pauses of 0.4 s and more by now
