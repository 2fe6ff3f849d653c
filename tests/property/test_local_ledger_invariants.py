"""Whatever happens in whatever order, the ledger keeps its promises."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keystage.local.api import Deployment
from keystage.local.events import (
    Answered,
    Deployed,
    Event,
    Exited,
    Kill,
    Missed,
    Removed,
    Scaled,
    Start,
    Terminate,
    Ticked,
)
from keystage.local.ledger import Bounds, Ledger

ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["deploy", "remove", "scale", "answer", "miss", "exit", "tick"]),
        st.integers(0, 5),
        st.floats(0.0, 20.0),
    ),
    max_size=60,
)


def event_of(kind: str, number: int, deployed: bool, some: str | None) -> Event:
    if kind == "deploy":
        return Deployed(Deployment(service="f", envProcess="x"))
    if deployed and kind in ("remove", "scale"):
        return Removed("f") if kind == "remove" else Scaled("f", number)
    if some is not None and kind in ("answer", "miss"):
        return Answered(some) if kind == "answer" else Missed(some)
    if some is not None and kind == "exit":
        return Exited(some, "gone")
    return Ticked()


@given(ACTIONS)
def test_processes_match_records_and_all_settles_at_what_is_desired(
    actions: list[tuple[str, int, float]],
) -> None:
    ledger = Ledger(Bounds(drain_s=5.0, start_limit_s=50.0))
    running: set[str] = set()
    at_s = 0.0

    def carry_out(event: Event) -> None:
        for instruction in ledger.handle(event, at_s):
            match instruction:
                case Start(replica):
                    assert replica not in running
                    running.add(replica)
                case Terminate(replica) | Kill(replica):
                    assert replica in running

    for kind, number, step_s in actions:
        at_s += step_s
        some = sorted(running)[number % len(running)] if running else None
        event = event_of(kind, number, "f" in ledger.functions, some)
        if isinstance(event, Exited):
            running.discard(event.replica)
        carry_out(event)
        # A record without a process is a failed one; every process has a record.
        records = {r.replica: r.state for r in ledger.replicas()}
        assert {name for name, state in records.items() if state != "failed"} == running

    # Left alone, with programs that start and stop as they are told, the desired number is ready.
    for _ in range(40):
        at_s += 31.0
        leaving = [r.replica for r in ledger.replicas() if r.state == "draining"]
        carry_out(Ticked())
        for name in leaving:
            running.discard(name)
            carry_out(Exited(name, "done"))
        for record in ledger.replicas():
            if record.state == "starting":
                carry_out(Answered(record.replica))
    record = ledger.functions.get("f")
    wanted = 0 if record is None else 1 if record.desired is None else record.desired
    assert [r.state for r in ledger.replicas()] == ["ready"] * wanted
