"""Time lines of the looping core: what it sends and tells, event by event."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from keystage.router.admission import AdmissionBounds
from keystage.router.engine import Generation, InvalidRequest, QueueFull, TooLate
from keystage.router.fleet import Fleet
from keystage.router.looping import LoopingCore
from keystage.router.sessions import Deliver, Refuse
from keystage.wire import api


def waves_of(addresses: Iterable[str]) -> int:
    return len(set(addresses))


def core(stages: int = 2, **bounds: int) -> LoopingCore:
    return LoopingCore(Fleet(stages, "p"), AdmissionBounds(**bounds), 100, waves_of)


def join(c: LoopingCore, name: str, stages: tuple[int, ...], slots: int = 4, kv: int = 1000) -> None:
    hello = api.Hello(1, "p", stages, name, "b", "emulated", slots, kv, 8, name, 1, "n", True)
    assert c.fleet.hello(name, hello, 0.0) is None
    c.fleet.credit(name, api.Credit(name, slots, kv))
    c.fleet.ready(name, 0.0)
    c.worker_ready(name, 0.0)


def ask(prompt: int = 2, max_tokens: int = 2, deadline_s: float | None = None) -> Generation:
    return Generation(list(range(prompt)), max_tokens, 0.0, 1.0, 0, (), deadline_s)


def tokens(session: int, epoch: int, position: int, token: int = 9) -> api.Tokens:
    return api.Tokens("b", 1, [session], [epoch], [position], [token])


def test_a_session_is_bound_when_every_stage_has_credit_and_released_at_its_end() -> None:
    c = core()
    number = c.submit(ask(), 0.0)
    join(c, "a", (0,))
    assert c.take() == ([], [])
    join(c, "b", (1,))
    sends, _ = c.take()
    assert [(to, type(m).__name__) for to, m in sends] == [("a", "Route"), ("a", "Start")]
    c.tokens(tokens(number, 1, 2), 1.0)
    c.tokens(tokens(number, 1, 2), 1.0)
    c.tokens(tokens(number, 1, 3), 1.0)
    sends, outcomes = c.take()
    assert outcomes == [Deliver(number, [9], False), Deliver(number, [9], True)]
    assert sorted(to for to, m in sends if isinstance(m, api.Release)) == ["a", "b"]
    assert all(w.held_slots == w.held_kv == 0 for w in c.fleet.workers.values())


def test_tokens_that_come_after_a_loss_do_not_end_a_queued_session() -> None:
    c = core()
    join(c, "a", (0,))
    join(c, "b", (1,))
    number = c.submit(ask(max_tokens=1), 0.0)
    c.fleet.remove("a")
    c.worker_lost("a", 1.0)
    c.take()
    c.tokens(tokens(number, 1, 2), 1.0)
    assert c.take() == ([], [])
    join(c, "a2", (0,))
    c.tokens(tokens(number, 2, 2), 2.0)
    assert c.take()[1] == [Deliver(number, [9], True)]


def test_a_death_is_told_to_every_living_worker_and_room_is_made_before_it_is_given() -> None:
    c = core()
    for name, stage in (("a", 0), ("b", 1), ("c", 1), ("d", 0)):
        join(c, name, (stage,))
    c.submit(ask(), 0.0)
    c.take()
    c.fleet.remove("a")
    c.worker_lost("a", 1.0)
    sends, _ = c.take()
    assert sorted(to for to, m in sends if isinstance(m, api.Unroute)) == ["b", "c", "d"]
    kinds = [type(m).__name__ for _, m in sends]
    assert kinds.index("Start") > max(i for i, kind in enumerate(kinds) if kind == "Release")


def test_a_failure_of_an_older_epoch_is_ignored() -> None:
    c = core(1)
    join(c, "a", (0,))
    number = c.submit(ask(), 0.0)
    c.failed(api.Failed("a", [number], [0], "old", False), 1.0)
    assert c.take()[1] == []
    c.failed(api.Failed("a", [number], [1], "now", False), 1.0)
    [refused] = c.take()[1]
    assert isinstance(refused, Refuse)
    assert str(refused.refusal) == "now"


def test_a_loss_too_many_ends_a_request() -> None:
    c = core(1, max_losses=1)
    join(c, "a", (0,))
    number = c.submit(ask(), 0.0)
    for epoch in (1, 2):
        c.failed(api.Failed("a", [number], [epoch], "out of memory", True), 1.0)
    [refused] = c.take()[1]
    assert isinstance(refused, Refuse)
    assert "out of memory" in str(refused.refusal)


def test_losses_between_which_a_request_gets_on_do_not_add_up() -> None:
    c = core(1, max_losses=1)
    join(c, "a", (0,))
    number = c.submit(ask(max_tokens=5), 0.0)
    for epoch in (1, 2, 3):
        c.tokens(tokens(number, epoch, 1 + epoch), 1.0)
        c.failed(api.Failed("a", [number], [epoch], "its input was lost", True), 1.0)
    assert not [o for o in c.take()[1] if isinstance(o, Refuse)]


def test_the_queue_has_a_bound_and_a_deadline() -> None:
    c = core(1, queue_items=1)
    number = c.submit(ask(deadline_s=5.0), 0.0)
    with pytest.raises(QueueFull) as full:
        c.submit(ask(), 0.0)
    assert full.value.retry_after_s
    c.tick(4.9)
    assert c.take()[1] == []
    c.tick(5.0)
    [refused] = c.take()[1]
    assert isinstance(refused, Refuse)
    assert refused.session == number
    assert isinstance(refused.refusal, TooLate)
    c.submit(ask(), 6.0)


def test_what_no_worker_can_hold_is_refused_and_blocks_nobody() -> None:
    c = core(1)
    big = c.submit(ask(max_tokens=2000), 0.0)
    small = c.submit(ask(), 0.0)
    join(c, "a", (0,), kv=100)
    sends, outcomes = c.take()
    assert [o.session for o in outcomes if isinstance(o, Refuse)] == [big]
    assert [m.specs[0].session for _, m in sends if isinstance(m, api.Start)] == [small]
    with pytest.raises(InvalidRequest, match="KV room for 100"):
        c.submit(ask(max_tokens=2000), 0.0)


def test_a_new_replica_takes_its_share_and_a_draining_one_is_left() -> None:
    c = core(1)
    join(c, "a", (0,))
    for _ in range(4):
        c.submit(ask(), 0.0)
    c.take()
    join(c, "b", (0,))
    moved = [s.session for _, m in c.take()[0] if isinstance(m, api.Move) for s in m.specs]
    assert len(moved) == 2
    assert {a: w.held_slots for a, w in c.fleet.workers.items()} == {"a": 2, "b": 2}
    c.fleet.draining("a")
    c.worker_draining("a", 1.0)
    assert {a: w.held_slots for a, w in c.fleet.workers.items()} == {"a": 0, "b": 4}
    assert c.moves == 4
