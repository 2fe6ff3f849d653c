"""Moves with KV state, event by event: what the router asks, and what it does when no copy comes."""

from __future__ import annotations

from collections.abc import Iterable

from keystage.router.admission import AdmissionBounds
from keystage.router.engine import Generation
from keystage.router.fleet import Fleet
from keystage.router.handings import DISTRUST_S, HANDING_S
from keystage.router.looping import LoopingCore
from keystage.wire import api

PROMPT = 40


def waves_of(addresses: Iterable[str]) -> int:
    return len(set(addresses))


def join(core: LoopingCore, name: str, stages: tuple[int, ...], node: str = "n") -> None:
    hello = api.Hello(2, "p", stages, name, "b", "cpu", 4, 1024, 8, name, 1, node, True)
    assert core.fleet.hello(name, hello, 0.0) is None
    core.fleet.credit(name, api.Credit(name, 4, 1024))
    core.fleet.ready(name, 0.0)
    core.worker_ready(name, 0.0)


def running(*names: tuple[str, tuple[int, ...]], prompt: int = PROMPT) -> tuple[LoopingCore, int]:
    """A core with one session of a prompt and two tokens more."""
    core = LoopingCore(Fleet(2, "p"), AdmissionBounds(), 100, waves_of)
    for name, stages in names:
        join(core, name, stages)
    number = core.submit(Generation(list(range(prompt)), 50, 0.0, 1.0, 0, ()), 0.0)
    for position in (prompt, prompt + 1):
        core.tokens(api.Tokens("b", 1, [number], [1], [position], [9]), 0.0)
    core.take()
    return core, number


def drain(core: LoopingCore, name: str) -> list[api.Message]:
    core.fleet.draining(name)
    core.worker_draining(name, 1.0)
    return [message for _, message in core.take()[0]]


def moves(core: LoopingCore) -> list[tuple[str, api.SessionSpec]]:
    return [(to, s) for to, m in core.take()[0] if isinstance(m, api.Move) for s in m.specs]


def slots(core: LoopingCore) -> dict[str, int]:
    return {name: worker.held_slots for name, worker in core.fleet.workers.items()}


def test_the_state_is_copied_first_and_the_session_runs_on() -> None:
    core, number = running(("a", (0,)), ("b", (1,)))
    join(core, "c", (1,))
    [hand] = drain(core, "b")
    assert hand == api.Hand(number, 1, 1, "c", PROMPT + 50)
    assert slots(core) == {"a": 1, "b": 1, "c": 1}
    core.tokens(api.Tokens("b", 1, [number], [1], [PROMPT + 2], [9]), 1.0)
    # The copy has a position more than is known to be everywhere: the newest token goes through again.
    core.handed("c", api.Handed(number, 1, PROMPT + 3), 2.0)
    assert core.replayed_tokens == 1
    assert slots(core) == {"a": 1, "b": 0, "c": 1}
    sends, _ = core.take()
    releases = [to for to, message in sends if isinstance(message, api.Release)]
    [(owner, spec)] = [(to, s) for to, m in sends if isinstance(m, api.Move) for s in m.specs]
    assert (releases, owner, spec.epoch) == (["b"], "a", 2)
    assert (spec.kept, len(spec.tokens)) == (PROMPT + 2, PROMPT + 3)


def test_what_the_copy_lacks_is_computed_again() -> None:
    core, number = running(("a", (0,)), ("b", (1,)))
    join(core, "c", (1,))
    drain(core, "b")
    core.handed("c", api.Handed(number, 1, 30), 2.0)
    [(_, spec)] = moves(core)
    assert (spec.kept, core.replayed_tokens) == (30, PROMPT + 2 - 30)


def test_without_a_copy_it_is_replayed() -> None:
    for sender in ("b", "c"):  # who has it not, or who cannot take it
        core, number = running(("a", (0,)), ("b", (1,)))
        join(core, "c", (1,))
        drain(core, "b")
        core.handed(sender, api.Handed(number, 1, 0), 2.0)
        [(_, spec)] = moves(core)
        assert (spec.kept, spec.epoch, core.replayed_tokens) == (0, 2, PROMPT + 2)
        assert slots(core) == {"a": 1, "b": 0, "c": 1}


def test_a_copy_that_does_not_come_is_not_waited_for() -> None:
    core, number = running(("a", (0,)), ("b", (1,)))
    join(core, "c", (1,))
    drain(core, "b")
    core.tick(1.0 + HANDING_S - 0.1)
    assert moves(core) == []
    core.tick(1.0 + HANDING_S)
    [(_, spec)] = moves(core)
    assert (spec.kept, spec.epoch) == (0, 2)
    core.handed("c", api.Handed(number, 1, PROMPT), 9.0)
    assert core.take()[0] == [("c", api.Release([number], [1]))]


def test_a_death_on_either_side_or_the_end_of_the_session_ends_the_copy() -> None:
    core, number = running(("a", (0,)), ("b", (1,)))
    join(core, "c", (1,))
    drain(core, "b")
    core.fleet.remove("c")
    core.worker_lost("c", 2.0)
    assert slots(core) == {"a": 1, "b": 1}
    join(core, "d", (1,))
    assert slots(core) == {"a": 1, "b": 1, "d": 1}  # and begins anew
    join(core, "e", (1,))
    core.fleet.remove("d")
    core.worker_lost("d", 2.0)
    assert slots(core) == {"a": 1, "b": 1, "e": 1}  # and again, without waiting for another to join
    core.fleet.remove("e")
    core.worker_lost("e", 2.0)
    join(core, "d", (1,))
    core.fleet.remove("b")
    core.worker_lost("b", 3.0)
    assert slots(core) == {"a": 1, "d": 1}  # bound again, by replay
    sends, _ = core.take()
    assert [s.kept for _, m in sends if isinstance(m, api.Start) for s in m.specs] == [0]
    join(core, "e", (1,))
    drain(core, "d")
    core.cancel(number, 4.0)
    assert slots(core) == {"a": 0, "d": 0, "e": 0}
    released = [to for to, message in core.take()[0] if isinstance(message, api.Release)]
    assert sorted(released) == ["a", "d", "e"]
    core.handed("e", api.Handed(number, 2, PROMPT), 5.0)
    assert moves(core) == []


def test_a_target_that_drains_itself_is_left_for_another() -> None:
    core, number = running(("a", (0,)), ("b", (1,)))
    join(core, "c", (1,))
    drain(core, "b")
    join(core, "d", (1,))
    kinds = sorted(type(message).__name__ for message in drain(core, "c"))
    assert kinds == ["Hand", "Release"]
    assert slots(core) == {"a": 1, "b": 1, "c": 0, "d": 1}
    core.handed("c", api.Handed(number, 1, PROMPT), 5.0)
    assert moves(core) == []
    core.handed("d", api.Handed(number, 1, PROMPT), 5.0)
    assert [spec.kept for _, spec in moves(core)] == [PROMPT]


def test_short_sessions_other_nodes_and_shared_workers_are_replayed() -> None:
    core, _ = running(("a", (0,)), ("b", (1,)), prompt=5)
    join(core, "c", (1,))
    drain(core, "b")
    assert core.replayed_tokens == 7
    core, _ = running(("a", (0,)), ("b", (1,)))
    join(core, "c", (1,), node="far")
    drain(core, "b")
    assert core.replayed_tokens == PROMPT + 2
    core, _ = running(("ab", (0, 1)))
    join(core, "c", (1,))
    join(core, "d", (0,))
    drain(core, "ab")
    # Both of its stages leave the worker, one after the other.
    assert core.replayed_tokens >= PROMPT + 2


def crowd(count: int) -> tuple[LoopingCore, list[int]]:
    """A core with so many running sessions on one path, and a third worker that may take them."""
    core = LoopingCore(Fleet(2, "p"), AdmissionBounds(), 100, waves_of)
    for name, stages in (("a", (0,)), ("b", (1,))):
        hello = api.Hello(2, "p", stages, name, "b", "cpu", 8, 8192, 8, name, 1, "n", True)
        assert core.fleet.hello(name, hello, 0.0) is None
        core.fleet.credit(name, api.Credit(name, 8, 8192))
        core.fleet.ready(name, 0.0)
        core.worker_ready(name, 0.0)
    numbers = [core.submit(Generation(list(range(PROMPT)), 50, 0.0, 1.0, 0, ()), 0.0) for _ in range(count)]
    for position in (PROMPT, PROMPT + 1):
        core.tokens(api.Tokens("b", 1, numbers, [1] * count, [position] * count, [9] * count), 0.0)
    core.take()
    return core, numbers


def hands(core: LoopingCore) -> list[tuple[str, int]]:
    return [(to, message.session) for to, message in core.take()[0] if isinstance(message, api.Hand)]


def test_a_worker_copies_one_session_at_a_time_and_the_next_when_that_is_gone() -> None:
    core, numbers = crowd(6)
    join(core, "c", (1,))  # takes three of six
    [(source, first)] = hands(core)
    assert source == "b"
    assert slots(core) == {"a": 6, "b": 6, "c": 1}
    core.tokens(api.Tokens("b", 1, numbers, [1] * 6, [PROMPT + 2] * 6, [9] * 6), 1.0)  # all run on
    assert hands(core) == []
    core.handed("c", api.Handed(first, 1, PROMPT + 2), 1.0)
    [(_, second)] = hands(core)
    core.cancel(second, 1.5)  # its copy is not wanted any more
    assert slots(core) == {"a": 5, "b": 4, "c": 2}
    [(_, third)] = hands(core)
    core.handed("c", api.Handed(third, 1, PROMPT + 2), 2.0)
    assert len({first, second, third}) == 3
    assert slots(core) == {"a": 5, "b": 3, "c": 2}
    assert hands(core) == []


def test_workers_copy_beside_one_another() -> None:
    core, _ = crowd(6)
    join(core, "c", (1,))
    while (found := hands(core)) != []:
        for _, number in found:
            core.handed("c", api.Handed(number, 1, PROMPT + 1), 1.0)
    assert slots(core) == {"a": 6, "b": 3, "c": 3}
    join(core, "d", (1,))
    assert [source for source, _ in hands(core)] in (["b", "c"], ["c", "b"])


def test_a_drain_takes_one_after_another_and_all_of_them() -> None:
    core, numbers = crowd(4)
    join(core, "c", (1,))
    for _, number in hands(core):
        core.handed("c", api.Handed(number, 1, 0), 1.0)
    left = len(numbers)
    core.fleet.draining("b")
    core.worker_draining("b", 1.0)
    while found := hands(core):
        assert len(found) == 1
        left -= 1
        core.handed("c", api.Handed(found[0][1], 1, PROMPT + 1), 1.0)
    assert left > 0
    assert slots(core) == {"a": 4, "b": 0, "c": 4}


def test_after_a_late_copy_the_others_of_that_worker_are_replayed() -> None:
    core, _ = crowd(6)
    join(core, "c", (1,))
    assert len(hands(core)) == 1
    core.tick(HANDING_S)
    sends, _ = core.take()
    assert not [message for _, message in sends if isinstance(message, api.Hand)]
    moved = [spec for _, message in sends if isinstance(message, api.Move) for spec in message.specs]
    assert [spec.kept for spec in moved] == [0, 0, 0]
    assert slots(core) == {"a": 6, "b": 3, "c": 3}
    core.tick(HANDING_S + DISTRUST_S)
    join(core, "d", (1,))
    assert "b" in {source for source, _ in hands(core)}
