"""Leader election by a Lease: one leads, hand-over is quick, a lost lease is known in time."""

from __future__ import annotations

import threading
import time

import pytest
from support.kube.cluster import Kube
from support.kube.fixtures import kube as kube
from support.processes import wait_for

from keystage.kubernetes.client import LEASES
from keystage.kubernetes.leader import Leader


class Candidate:
    """A leader in its own thread."""

    def __init__(self, kube: Kube, identity: str, lease_s: int = 3) -> None:
        self.leader = Leader(
            kube.cluster("keystage"), "k", identity, lease_s=lease_s, renew_s=lease_s * 0.6, retry_s=0.05
        )
        self.led = threading.Event()
        self.result: bool | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self.result = self.leader.run(self.led.set)

    def join(self) -> None:
        self._thread.join(10)
        assert not self._thread.is_alive()


def spec(kube: Kube) -> dict[str, object]:
    found: dict[str, object] = kube.get("leases", "k", "keystage")["spec"]
    return found


def test_one_leads_and_hands_over_at_once(kube: Kube) -> None:
    one = Candidate(kube, "one", lease_s=20)
    assert one.led.wait(15)
    two = Candidate(kube, "two", lease_s=20)
    wait_for(lambda: two.leader.holder == "one", "it sees who leads")
    assert one.leader.is_leader
    assert not two.leader.is_leader
    began_s = time.monotonic()
    one.leader.release()
    assert two.led.wait(20)
    assert time.monotonic() - began_s < 10.0  # not the lease's twenty seconds
    one.join()
    assert one.result is True
    assert not one.leader.is_leader
    assert spec(kube)["holderIdentity"] == "two"
    assert spec(kube)["leaseTransitions"] == 1
    two.leader.release()
    two.join()


def test_a_lease_is_taken_from_one_that_is_silent_and_not_before(kube: Kube) -> None:
    held = {"holderIdentity": "dead", "leaseDurationSeconds": 1, "renewTime": "2020-01-01T00:00:00.000000Z"}
    kube.cluster("keystage").create(
        LEASES, {"kind": "Lease", "metadata": {"name": "k"}, "spec": held}, manager="t"
    )
    began_s = time.monotonic()
    one = Candidate(kube, "one")
    assert one.led.wait(10)
    assert time.monotonic() - began_s >= 1.0  # whatever its clock says: seen unchanged for so long
    one.leader.release()
    one.join()


def test_whoever_cannot_renew_knows_it_before_another_may_lead(kube: Kube) -> None:
    one = Candidate(kube, "one", lease_s=3)
    assert one.led.wait(15)
    with kube.outage():
        began_s = time.monotonic()
        wait_for(lambda: not one.leader.is_leader, "it knows")
        assert time.monotonic() - began_s < 3.0
        one.join()
        assert one.result is False
    assert spec(kube)["holderIdentity"] == "one"  # not given back: it could not


def test_a_lease_that_another_wrote_is_lost_at_once_and_a_foreign_label_is_nothing(kube: Kube) -> None:
    one = Candidate(kube, "one")
    assert one.led.wait(15)
    kube.patch("leases", "k", {"metadata": {"labels": {"x": "1"}}}, "keystage")
    renewed = spec(kube)["renewTime"]
    wait_for(lambda: spec(kube)["renewTime"] != renewed, "it goes on")
    assert one.leader.is_leader
    kube.patch("leases", "k", {"spec": {"holderIdentity": "thief"}}, "keystage")
    one.join()
    assert one.result is False
    assert spec(kube)["holderIdentity"] == "thief"


def test_many_at_once_make_one_leader(kube: Kube) -> None:
    candidates = [Candidate(kube, f"c{number}") for number in range(6)]
    wait_for(lambda: any(c.led.is_set() for c in candidates), "one leads")
    seen = []
    for _ in range(50):
        seen.append(sum(c.leader.is_leader for c in candidates))
        time.sleep(0.01)
    assert set(seen) == {1}
    for candidate in candidates:
        candidate.leader.release()
    for candidate in candidates:
        candidate.join()
    assert sum(c.led.is_set() for c in candidates) >= 1


def test_what_fails_when_it_begins_gives_the_lease_back(kube: Kube) -> None:
    leader = Leader(kube.cluster("keystage"), "k", "one")

    def fail() -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        leader.run(fail)
    assert not spec(kube).get("holderIdentity")


def test_what_is_told_to_end_while_it_takes_the_lease_begins_nothing(kube: Kube) -> None:
    leader, led = Leader(kube.cluster("keystage"), "k", "one"), threading.Event()
    leader.release()
    assert leader.run(led.set) is True
    assert not led.is_set()
    assert not spec(kube).get("holderIdentity")


def test_impossible_times_are_refused(kube: Kube) -> None:
    with pytest.raises(ValueError, match="not 2, 20, 15"):
        Leader(kube.cluster(), "k", "one", renew_s=20)


def test_a_lease_that_is_lost_by_the_clock_is_not_tried_for_again(
    kube: Kube, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader = Leader(kube.cluster("keystage"), "k", "one", retry_s=0.05)
    tried: list[int] = []

    def take() -> bool:
        tried.append(1)
        return True

    def lead() -> None:
        monkeypatch.setattr(leader, "_renewed_s", float("-inf"))
        monkeypatch.setattr(leader, "_take", take)

    assert leader.run(lead) is False
    assert not tried
