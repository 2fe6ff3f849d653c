"""Tenants, priorities and full queues in the cores: who is bound, who has to go, what is counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import partial

import pytest
from support.emulated_items import EmulatedItems

from keystage.router.admission import AdmissionBounds, Gate
from keystage.router.batch_settings import BatchSettings
from keystage.router.engine import Caller, DeadlineUnreachable, Generation, QueueFull
from keystage.router.fleet import Fleet
from keystage.router.looping import LoopingCore
from keystage.router.sessions import Refuse
from keystage.wire import api


def waves_of(addresses: Iterable[str]) -> int:
    return len(set(addresses))


def looping(**bounds: object) -> LoopingCore:
    return LoopingCore(Fleet(1, "p"), AdmissionBounds(**bounds), 100, waves_of)  # type: ignore[arg-type]


def join(c: LoopingCore, name: str, slots: int) -> None:
    hello = api.Hello(1, "p", (0,), name, "b", "emulated", slots, 100_000, 8, name, 1, "n", True)
    assert c.fleet.hello(name, hello, 0.0) is None
    c.fleet.credit(name, api.Credit(name, slots, 100_000))
    c.fleet.ready(name, 0.0)
    c.worker_ready(name, 0.0)


def ask(
    tenant: str = "", priority: int = 0, deadline_s: float | None = None, resumed: tuple[int, ...] = ()
) -> Generation:
    return Generation(
        [1, 2], 8, 0.0, 1.0, 0, (), deadline_s, resumed=resumed, tenant=tenant, priority=priority
    )


def started(c: LoopingCore) -> list[int]:
    sends, _ = c.take()
    return [spec.session for _, m in sends if isinstance(m, api.Start) for spec in m.specs]


def refused(c: LoopingCore) -> dict[int, str]:
    return {o.session: o.refusal.code for o in c.take()[1] if isinstance(o, Refuse)}


def test_sessions_are_bound_by_shares() -> None:
    c = looping(weight_of={"a": 3.0, "b": 1.0}.__getitem__)
    of = {c.submit(ask(tenant), 0.0): tenant for tenant in ["a"] * 40 + ["b"] * 40}
    join(c, "w", 20)
    assert Counter(of[number] for number in started(c)) == {"a": 15, "b": 5}


def test_a_session_that_lost_its_worker_goes_before_urgent_ones() -> None:
    c = looping()
    first = c.submit(ask("a", -1), 0.0)
    join(c, "w", 1)
    assert started(c) == [first]
    urgent = c.submit(ask("b", 1), 1.0)
    c.fleet.remove("w")
    c.worker_lost("w", 2.0)
    assert (c.gate.items, c.meters[0].queue) == (2, 2)
    join(c, "v", 1)
    assert first in started(c)
    c.cancel(urgent, 3.0)
    c.cancel(first, 3.0)
    assert (c.gate.items, c.gate.bytes, c.gate.tenants) == (0, 0, {})


def test_what_another_router_began_goes_first_and_is_not_refused_for_its_deadline() -> None:
    c = looping(queue_items=1)
    waiting = c.submit(ask(), 0.0)
    resumed = c.submit(ask(resumed=(7, 8), deadline_s=0.001), 0.0)
    join(c, "w", 1)
    assert started(c) == [resumed]
    assert waiting in c._sessions


def test_a_full_queue_gives_a_tenant_its_share_at_the_cost_of_the_one_most_over_its_own() -> None:
    c = looping(queue_items=8)
    flood = [c.submit(ask("flood"), 0.0) for _ in range(8)]
    with pytest.raises(QueueFull, match="8 requests wait, the bound is 8"):
        c.submit(ask("flood"), 0.0)
    small = [c.submit(ask("small"), 0.0) for _ in range(4)]
    # The newest go first.
    assert refused(c) == dict.fromkeys(flood[4:], "queue_full")
    with pytest.raises(QueueFull):
        c.submit(ask("small"), 0.0)
    third = c.submit(ask("third"), 0.0)
    assert list(refused(c).values()) == ["queue_full"]
    assert set(c._sessions) == {*flood[:4], *small[:3], third}
    assert c.gate.items == 8
    told = {name: (counts.waiting, counts.refused) for name, counts in c.entrance.tenants().items()}
    assert told == {"flood": (4, 5), "small": (3, 2), "third": (1, 0)}


def test_bytes_have_shares_too() -> None:
    gate = Gate(AdmissionBounds(queue_bytes=100))
    gate.enter(80, "a")
    assert gate.over_share("b", 40) == pytest.approx(0.8)
    assert gate.over_share("a") == pytest.approx(0.8)
    gate.enter(10, "b")
    assert gate.over_share("a") == pytest.approx(1.6)


def test_items_are_sent_by_shares_and_at_most_two_batches_are_shown_to_the_scheduler() -> None:
    world = EmulatedItems([(0.01, 0.05)], BatchSettings())
    world.add_worker("w", most=4)
    of: dict[int, str] = {}

    def submit(tenant: str, priority: int) -> None:
        number = world.core.submit(b"x", None, world.now_s, caller=Caller(tenant, priority))
        of[number] = tenant

    for _ in range(200):
        world.at(0.0, partial(submit, "flood", 0))
    for _ in range(8):
        world.at(0.01, partial(submit, "late", 0))
    world.run(until_s=0.02)
    world.run()
    order = [of[number] for batch in world.batches for number in batch.items]
    assert len(order) == 208
    assert order.index("late") < 20
    assert order[:40].count("late") == 8


def test_an_item_that_would_be_late_is_refused_at_once_with_the_numbers() -> None:
    world = EmulatedItems([(0.0, 0.1)], BatchSettings())
    world.add_worker("w", most=4)
    outcome: list[DeadlineUnreachable] = []

    def submit(deadline_s: float | None) -> None:
        try:
            world.submit(deadline_s)
        except DeadlineUnreachable as refusal:
            outcome.append(refusal)

    for _ in range(120):
        world.at(0.0, partial(submit, None))
    world.at(1.01, partial(submit, 0.5))
    world.at(1.02, partial(submit, 30.0))
    world.run()
    (refusal,) = outcome
    assert refusal.retry_after_s is not None
    assert 1 <= refusal.retry_after_s <= 3
    assert "its deadline is 0.5 s" in str(refusal)
    assert "items a second" in str(refusal)


def test_a_deadline_of_the_pipeline_counts_where_late_answers_are_of_no_use() -> None:
    for late, counted in (("refuse", 0.3), ("demote", 600.0)):
        settings = BatchSettings(late=late, objective_s=0.3)  # type: ignore[arg-type]
        assert settings.limit_s(5.0, 605.0, settings.due_s(5.0, None)) == pytest.approx(counted)
