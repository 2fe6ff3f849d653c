"""Whose turn it is: shares of tenants, classes of priority, the front, and what goes before a newcomer."""

from __future__ import annotations

from collections import Counter

import pytest

from keystage.router.fair_queue import CLASS_WEIGHTS, FairQueue, Waiter


def queue(**weights: float) -> FairQueue:
    return FairQueue(lambda tenant: weights.get(tenant, 1.0))


def fill(q: FairQueue, tenant: str, count: int, priority: int = 0, cost: float = 1.0, first: int = 0) -> None:
    for number in range(first, first + count):
        q.push(Waiter(number, tenant, priority, cost))


def taken(q: FairQueue, count: int) -> list[Waiter]:
    return [q.pop() for _ in range(count)]


def test_one_tenant_is_served_in_order() -> None:
    q = queue()
    fill(q, "", 5)
    assert [waiter.number for waiter in taken(q, 5)] == [0, 1, 2, 3, 4]
    assert q.peek() is None
    with pytest.raises(IndexError):
        q.pop()


def test_tenants_share_by_weight_whatever_each_has_waiting() -> None:
    q = queue(a=2.0)
    fill(q, "a", 100)
    fill(q, "b", 100, first=100)
    assert Counter(waiter.tenant for waiter in taken(q, 90)) == {"a": 60, "b": 30}


def test_shares_are_of_work_not_of_requests() -> None:
    q = queue()
    fill(q, "long", 100, cost=9.0)
    fill(q, "short", 900, first=100)
    served = taken(q, 200)
    assert sum(w.tenant == "long" for w in served) == pytest.approx(20, abs=1)


def test_who_comes_after_a_flood_waits_for_his_share_of_it_only() -> None:
    q = queue()
    fill(q, "flood", 1000)
    taken(q, 10)
    fill(q, "late", 1, first=1000)
    assert "late" in [waiter.tenant for waiter in taken(q, 2)]


def test_a_tenant_that_was_away_gets_nothing_for_it_and_one_that_leaves_does_not_lose_its_debt() -> None:
    q = queue()
    fill(q, "steady", 100)
    taken(q, 50)
    fill(q, "new", 100, first=100)
    assert Counter(w.tenant for w in taken(q, 20)) == {"steady": 10, "new": 10}
    fill(q, "heavy", 1, cost=30.0, first=300)
    while q.pop().tenant != "heavy":
        pass
    fill(q, "heavy", 1, first=301)
    others = 0
    while q.pop().tenant != "heavy":
        others += 1
    assert others > 40  # thirty of each of the two


def test_classes_share_by_weight_and_the_lowest_is_never_starved() -> None:
    q = queue()
    for priority in CLASS_WEIGHTS:
        fill(q, f"t{priority}", 1000, priority, first=10_000 * (priority + 2))
    served = Counter(waiter.priority for waiter in taken(q, 210))
    assert served == {1: 160, 0: 40, -1: 10}


def test_of_classes_that_begin_together_the_higher_goes_first() -> None:
    q = queue()
    fill(q, "a", 1, -1)
    fill(q, "a", 1, 1, first=1)
    fill(q, "a", 1, 0, first=2)
    assert [w.priority for w in taken(q, 3)] == [1, 0, -1]


def test_within_a_tenant_the_order_counts() -> None:
    q = queue()
    for number, order in enumerate((3.0, 1.0, 2.0, 1.0)):
        q.push(Waiter(number, "", 0, 1.0, order))
    assert [w.number for w in taken(q, 4)] == [1, 3, 2, 0]


def test_what_was_begun_goes_first_the_last_one_put_there_before_the_others() -> None:
    q = queue()
    fill(q, "a", 2, 1)
    q.push_front(Waiter(10, "b", -1, 5.0))
    q.push_front(Waiter(11, "b", -1, 5.0))
    assert q.peek() == 11
    assert q.newest("b") is None
    q.remove(11)
    assert [w.number for w in taken(q, 3)] == [10, 0, 1]


def test_the_newest_of_a_tenant_is_of_its_lowest_class() -> None:
    q = queue()
    fill(q, "a", 3, 0)
    fill(q, "a", 3, 1, first=3)
    assert q.newest("a") == 2
    for number in (2, 1, 0):
        q.remove(number)
    assert q.newest("a") == 5


def test_cancelled_ones_leave_nothing_behind() -> None:
    q = queue()
    for number in range(10_000):
        q.push(Waiter(number, f"t{number % 7}", number % 3 - 1, 1.0))
        q.remove(number)
    assert len(q) == 0
    assert q.cost == 0
    assert all(len(c.heap) <= 200 and not c.flows for c in q._classes.values())


@pytest.mark.parametrize(("tenant", "priority"), [("a", 0), ("b", 0), ("new", 0), ("b", 1), ("a", -1)])
def test_what_goes_before_a_newcomer_is_what_is_predicted(tenant: str, priority: int) -> None:
    q = queue(a=2.0, b=0.5)
    fill(q, "a", 40, 0, cost=1.0)
    fill(q, "b", 40, 0, cost=2.0, first=100)
    fill(q, "c", 300, 1, cost=1.0, first=200)
    fill(q, "b", 10, -1, first=600)
    newcomer = Waiter(999, tenant, priority, 1.0)
    ahead = q.ahead(newcomer)
    q.push(newcomer)
    before = 0.0
    while (waiter := q.pop()).number != 999:
        before += waiter.cost
    assert before == pytest.approx(ahead, abs=16.0)
