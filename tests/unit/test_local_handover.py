"""What a supervisor hands over, and how an upgrade replaces a function."""

from __future__ import annotations

import os

import msgspec

from keystage.local.api import Deployment
from keystage.local.events import (
    Answered,
    Deployed,
    Exited,
    Renewed,
    Scaled,
    Start,
    Started,
    Terminate,
    Ticked,
)
from keystage.local.handover import FORM, Handover, KeptProcess, KeptReplica
from keystage.local.ledger import Bounds, Ledger

STAGE = {
    "KEYSTAGE_ROLE": "stage", "KEYSTAGE_PIPELINE": "p", "KEYSTAGE_STAGES": "0", "KEYSTAGE_BUNDLE": "file:///b",
}  # fmt: skip


def serving(count: int) -> Ledger:
    """A stage with so many ready replicas and one that has failed."""
    ledger = Ledger(Bounds())
    ledger.handle(Deployed(Deployment(service="s", envVars=STAGE)), 0.0)
    ledger.handle(Scaled("s", count + 1), 0.0)
    for number in range(count + 1):
        ledger.handle(Started(f"s-{number}", 100 + number, f"127.0.0.1:{number}"), 1.0)
        ledger.handle(Answered(f"s-{number}"), 2.0)
    ledger.handle(Exited(f"s-{count}", "killed by SIGKILL"), 3.0)
    return ledger


def handed_over(ledger: Ledger) -> Handover:
    replicas, numbers = ledger.kept()
    kept = tuple(
        KeptReplica(r, KeptProcess(r.record.pid, r.record.address, 9) if r.record.pid else None)
        for r in replicas
    )
    return Handover(
        form=FORM,
        home="/h",
        run="/r",
        lock=3,
        lifeline=(4, 5),
        offset_s=1.5,
        bounds=Bounds(drain_s=7.0),
        env={},
        nodes=("n",),
        faces=(6,),
        gateway=-1,
        controller=True,
        system=(),
        sweeper=2,
        replicas=kept,
        numbers=numbers,
        routers={"p": "ipc:///r/p.router"},
    )


def test_a_ledger_goes_on_from_what_another_kept() -> None:
    """Whatever happens next, both say the same."""
    before = serving(2)
    before.handle(Scaled("s", 2), 4.0)  # one leaves
    told = msgspec.json.decode(msgspec.json.encode(handed_over(before)), type=Handover)
    after = Ledger(Bounds())
    after.restore(before.functions["s"])
    after.resume((one.replica for one in told.replicas), told.numbers)
    assert after.replicas() == before.replicas()
    happens = (Ticked(), Exited("s-0", "killed by SIGKILL"), Scaled("s", 4), Renewed("s"), Ticked())
    said = []
    for at_s, event in enumerate(happens, 5):
        said.append(before.handle(event, float(at_s)))
        assert after.handle(event, float(at_s)) == said[-1]
        assert after.replicas() == before.replicas()
    starts = [i.replica for answer in said for i in answer if isinstance(i, Start)]
    assert starts[0] == "s-4"  # numbers go on


def test_descriptors_that_must_stay_open_are_all_named() -> None:
    read, write = os.pipe()
    try:
        one = KeptReplica(serving(1).kept()[0][0], KeptProcess(7, "", read, write))
        told = msgspec.structs.replace(handed_over(serving(1)), replicas=(one,), gateway=8)
        assert sorted(told.descriptors()) == sorted([3, 4, 5, 6, 8, read, write])
    finally:
        os.close(read)
        os.close(write)


def test_a_renewed_function_is_replaced_one_ready_replica_at_a_time() -> None:
    ledger = serving(0)
    ledger.handle(Ticked(), 50.0)
    ledger.handle(Started("s-1", 200, "127.0.0.1:9"), 51.0)
    ledger.handle(Answered("s-1"), 52.0)
    deployment = ledger.functions["s"].deployment
    (start,) = [i for i in ledger.handle(Renewed("s"), 60.0) if isinstance(i, Start)]
    assert (start.replica, start.deployment) == ("s-2", deployment)
    assert [r.state for r in ledger.replicas()] == ["ready", "starting"]  # the old one serves meanwhile
    ledger.handle(Started("s-2", 201, "127.0.0.1:10"), 61.0)
    ledger.handle(Answered("s-2"), 62.0)
    assert [(r.replica, r.state) for r in ledger.replicas()] == [("s-1", "draining"), ("s-2", "ready")]
    assert Terminate("s-1") in ledger.handle(Ticked(), 63.0)
