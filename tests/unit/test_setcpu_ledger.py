"""CPU cores of running replicas: the ledger's rule and the choice of cores."""

from __future__ import annotations

import os

import psutil
import pytest

from keystage.local.api import Deployment
from keystage.local.cores import Pins, pin
from keystage.local.errors import BadDeployment, UnknownFunction
from keystage.local.events import Answered, CoresSet, Deployed, Scaled, SetCores, Start, Started
from keystage.local.ledger import Bounds, Ledger

STAGE = Deployment(
    service="s",
    envVars={
        "KEYSTAGE_ROLE": "stage", "KEYSTAGE_PIPELINE": "p", "KEYSTAGE_BUNDLE": "file:///b",
        "KEYSTAGE_STAGES": "0", "KEYSTAGE_THREADS": "1",
    },
)  # fmt: skip


def ledger_with_one(*, ready: bool) -> Ledger:
    ledger = Ledger(Bounds())
    ledger.handle(Deployed(STAGE), 0.0)
    ledger.handle(Started("s-0", 7, "127.0.0.1:1"), 0.0)
    if ready:
        ledger.handle(Answered("s-0"), 1.0)
    return ledger


def threads(start: object) -> str:
    assert isinstance(start, Start)
    return start.deployment.envVars["KEYSTAGE_THREADS"]


def test_running_replicas_get_their_cores_and_new_ones_start_with_them() -> None:
    ledger = ledger_with_one(ready=True)
    for _ in range(2):  # stating it twice does no harm
        assert ledger.handle(CoresSet("s", 2.0), 2.0) == [SetCores("s-0", 2.0, tell=True)]
    assert ledger.functions["s"].cores == 2.0
    (start,) = ledger.handle(Scaled("s", 2), 3.0)
    assert threads(start) == "2"
    assert ledger.handle(Started("s-1", 8, "127.0.0.1:2"), 3.1) == [SetCores("s-1", 2.0, tell=False)]
    assert [r.pid for r in ledger.replicas()] == [7, 8]


def test_a_replica_that_is_starting_is_told_when_it_is_ready() -> None:
    ledger = ledger_with_one(ready=False)
    assert ledger.handle(CoresSet("s", 3.5), 0.5) == [SetCores("s-0", 3.5, tell=False)]
    assert ledger.handle(Answered("s-0"), 1.0) == [SetCores("s-0", 3.5, tell=True)]
    assert ledger.handle(Answered("s-0"), 3.0) == []


def test_a_new_deployment_starts_as_it_says() -> None:
    ledger = ledger_with_one(ready=True)
    ledger.handle(CoresSet("s", 2.0), 2.0)
    starts = [i for i in ledger.handle(Deployed(STAGE), 3.0) if isinstance(i, Start)]
    assert threads(starts[0]) == "1"
    assert ledger.functions["s"].cores is None


@pytest.mark.parametrize("cores", [0.0, -1.0, 1025.0, float("nan"), float("inf")])
def test_impossible_cores_are_refused(cores: float) -> None:
    ledger = ledger_with_one(ready=True)
    with pytest.raises(BadDeployment, match="function s: cores must be above 0 and at most 1024, not"):
        ledger.handle(CoresSet("s", cores), 2.0)
    assert ledger.functions["s"].cores is None


def test_cores_are_for_stages_that_exist() -> None:
    ledger = Ledger(Bounds())
    with pytest.raises(UnknownFunction):
        ledger.handle(CoresSet("s", 1.0), 0.0)
    ledger.handle(Deployed(Deployment(service="f", envProcess="serve")), 0.0)
    with pytest.raises(BadDeployment, match="role function: cores are given to stages only"):
        ledger.handle(CoresSet("f", 1.0), 0.0)


def test_replicas_get_different_cores_while_there_are_any() -> None:
    pins = Pins(range(4))
    assert pins.assign("a", 1.0) == {0}
    assert pins.assign("b", 1.5) == {1, 2}
    assert pins.assign("a", 2.0) == {0, 3}  # keeps what it has
    assert len(pins.assign("c", 2.0)) == 2  # all are taken: the least used
    assert pins.assign("d", 9.0) == {0, 1, 2, 3}
    for name in ("b", "c", "d"):
        pins.forget(name)
    assert pins.assign("e", 2.0) == {1, 2}


@pytest.mark.parametrize(
    "error", [psutil.AccessDenied(7), PermissionError(1, "no"), OSError(22, "no such core")]
)
def test_a_machine_that_forbids_affinity_is_lived_with(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def forbidden(*_: object) -> None:
        raise error

    owner, name = (
        (psutil.Process, "threads") if isinstance(error, psutil.Error) else (os, "sched_setaffinity")
    )
    monkeypatch.setattr(owner, name, forbidden)
    pin(os.getpid(), frozenset({0}))
    assert f"process {os.getpid()} was not given cores [0]" in caplog.text


def test_a_process_that_is_gone_is_not_worth_a_word(caplog: pytest.LogCaptureFixture) -> None:
    pin(2**22 + 1, frozenset({0}))  # above the largest process id there is
    assert caplog.text == ""
