"""Time lines of requests that end workers, and of those that only were there."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable

import pytest

from keystage.router.admission import AdmissionBounds
from keystage.router.endings import LAST_WORDS, ending_of, given_up
from keystage.router.engine import Generation
from keystage.router.fleet import Fleet
from keystage.router.looping import LoopingCore
from keystage.router.quarantine import ALONE_S, PATIENCE_S
from keystage.router.sessions import Refuse
from keystage.router.suspects import Cause, Ending, Suspects
from keystage.wire import api

CRASH = Ending(Cause.CRASH, "SIGSEGV", "w")
KILLED = Ending(Cause.OUTSIDE, "SIGKILL from outside", "w")
SILENT = Ending(Cause.UNKNOWN, "no sign of life", "w")


# ---------------------------------------------------------------- the rules


def test_a_crash_in_company_sets_all_apart_and_the_next_one_alone_convicts() -> None:
    suspects = Suspects(3)
    assert suspects.blame({1: 5, 2: 9}, [1], CRASH) == {}
    assert suspects.apart(1) is not None
    assert suspects.apart(2) is not None
    assert suspects.passed(2, 9) is False
    assert suspects.passed(2, 10) is True
    assert 2 not in suspects
    convicted = suspects.blame({1: 5}, [1], Ending(Cause.CRASH, "exit status 3", "w2"))
    assert list(convicted) == [1]
    assert convicted[1] == (
        "2 workers ended while they ran this request, the last with nothing else: "
        "w: SIGSEGV; w2: exit status 3"
    )
    assert (suspects.set_apart, suspects.convicted, suspects.cleared) == (2, 1, 1)


def test_what_was_killed_from_outside_blames_nobody() -> None:
    suspects = Suspects(0)
    for _ in range(10):
        assert suspects.blame({1: 5}, [0], KILLED) == {}
    assert 1 not in suspects


def test_silence_sets_apart_at_the_second_time_and_convicts_beyond_the_bound_only() -> None:
    suspects = Suspects(3)
    assert suspects.blame({1: 5, 2: 5}, [0], SILENT) == {}
    assert suspects.apart(1) is None
    assert suspects.blame({1: 5, 3: 5}, [0], SILENT) == {}
    assert suspects.apart(1) is not None
    assert suspects.apart(3) is None
    for _ in range(3):
        assert suspects.blame({1: 5}, [0], SILENT) == {}
    assert "6 workers" in suspects.blame({1: 5}, [0], SILENT)[1]


def test_who_is_there_again_had_not_died() -> None:
    suspects = Suspects(1)
    for number in range(10):
        ending = Ending(Cause.UNKNOWN, "no sign of life", "w", f"node#{number}")
        assert suspects.blame({1: 5}, [0], ending) == {}
        suspects.returned_alive(f"node#{number}")
    assert 1 in suspects
    suspects.blame({1: 5}, [0], Ending(Cause.UNKNOWN, "no sign of life", "w", "node#11"))
    assert suspects.blame({1: 5}, [0], Ending(Cause.UNKNOWN, "no sign of life", "w", "node#12")) != {}


def test_a_silence_and_a_crash_are_not_two_crashes() -> None:
    suspects = Suspects(3)
    suspects.blame({1: 5, 2: 5}, [0], SILENT)
    assert suspects.blame({1: 5}, [0], CRASH) == {}
    assert suspects.blame({1: 5}, [0], CRASH) != {}


def test_a_first_crash_convicts_nobody_even_who_was_alone() -> None:
    suspects = Suspects(3)
    assert suspects.blame({1: 5}, [0], CRASH) == {}


def test_company_that_has_ended_meanwhile_and_other_routers_requests_are_company() -> None:
    suspects = Suspects(3)
    suspects.blame({1: 5, 2: 5}, [0], CRASH)
    assert suspects.blame({1: 5}, [0], CRASH, others=1) == {}
    shared = Ending(Cause.CRASH, "SIGSEGV", "w", is_shared=True)
    for _ in range(3):
        assert suspects.blame({1: 5}, [0], shared) == {}
    assert suspects.blame({1: 5}, [0], shared) != {}  # the bound of all deaths


@pytest.mark.parametrize(
    ("status", "is_memory_short", "cause", "words"),
    [
        (signal.SIGSEGV, False, Cause.CRASH, "SIGSEGV"),
        (signal.SIGABRT | 0x80, False, Cause.CRASH, "SIGABRT"),
        (signal.SIGKILL, False, Cause.OUTSIDE, "SIGKILL from outside"),
        (signal.SIGKILL, True, Cause.CRASH, "want of memory"),
        (signal.SIGTERM, True, Cause.OUTSIDE, "SIGTERM from outside"),
        (3 << 8, False, Cause.CRASH, "exit status 3"),
        (0, False, Cause.OUTSIDE, "exit status 0"),
        (None, True, Cause.UNKNOWN, "nobody knows"),
        (65, False, Cause.CRASH, "signal 65"),
    ],
)
def test_what_an_exit_says(status: int | None, is_memory_short: bool, cause: Cause, words: str) -> None:
    found = ending_of(status, "w", is_shared=False, is_memory_short=is_memory_short)
    assert found.cause is cause
    assert words in found.words


def test_the_last_words_of_a_worker_are_its_own() -> None:
    assert given_up("silent", "w", is_shared=False).cause is Cause.UNKNOWN
    assert given_up("bye", "w", is_shared=False).cause is Cause.OUTSIDE
    assert given_up("link broke", "w", is_shared=False).cause is Cause.UNKNOWN
    assert given_up("a reason of later days", "w", is_shared=False).cause is Cause.UNKNOWN
    last = given_up(f"{LAST_WORDS}DeviceLostError: gone", "w", is_shared=True)
    assert (last.cause, last.words, last.is_shared) == (Cause.CRASH, "DeviceLostError: gone", True)


# ---------------------------------------------------------------- looping pipelines


def waves_of(addresses: Iterable[str]) -> int:
    return len(set(addresses))


def core(stages: int = 1) -> LoopingCore:
    return LoopingCore(Fleet(stages, "p"), AdmissionBounds(), 100, waves_of)


def join(
    c: LoopingCore, name: str, stages: tuple[int, ...] = (0,), slots: int = 8, now_s: float = 0.0
) -> None:
    hello = api.Hello(1, "p", stages, name, "b", "emulated", slots, 1000, 8, name, os.getpid(), "n", True)
    assert c.fleet.hello(name, hello, now_s) is None
    c.fleet.credit(name, api.Credit(name, slots, 1000))
    c.fleet.ready(name, now_s)
    c.worker_ready(name, now_s)


def lose(c: LoopingCore, name: str, ending: Ending, now_s: float = 0.0) -> None:
    c.fleet.remove(name)
    c.worker_lost(name, now_s, ending)


def ask(max_tokens: int = 20) -> Generation:
    return Generation([1, 2], max_tokens, 0.0, 1.0, 0, ())


def on(c: LoopingCore, address: str) -> list[int]:
    """Sessions that run at a worker."""
    paths = c._paths.by_number
    return [n for n, s in c._sessions.items() if s.path is not None and address in paths[s.path].addresses]


def step(c: LoopingCore, number: int, count: int = 1, now_s: float = 0.0) -> None:
    for _ in range(count):
        session = c._sessions[number]
        c.tokens(api.Tokens("w", 1, [number], [session.epoch], [len(session.tokens)], [9]), now_s)


def refusals(c: LoopingCore) -> dict[int, str]:
    return {o.session: str(o.refusal) for o in c.take()[1] if isinstance(o, Refuse)}


def play(c: LoopingCore, poisoned: int, deaths: int = 0, most: int = 400) -> tuple[int, dict[int, str]]:
    """Runs until nobody is left; a worker with the poisoned session crashes. Returns deaths, refusals."""
    refused: dict[int, str] = {}
    for turn in range(most):
        if not c._sessions:
            break
        for address in list(c.fleet.workers):
            running = on(c, address)
            if poisoned in running:
                deaths += 1
                lose(c, address, Ending(Cause.CRASH, "SIGSEGV", address))
                join(c, f"again-{turn}-{address}", c_stages(c, address))
            else:
                for number in running:
                    if number in c._sessions and number in on(c, address):
                        step(c, number)
        refused.update(refusals(c))
    return deaths, refused


def c_stages(c: LoopingCore, address: str) -> tuple[int, ...]:
    return (0,)


def test_one_poisoned_session_of_eight_is_failed_alone_after_two_workers() -> None:
    c = core(1)
    join(c, "a")
    numbers = [c.submit(ask(), 0.0) for _ in range(8)]
    for number in numbers:
        step(c, number, 3)
    deaths, refused = play(c, numbers[5])
    assert deaths == 2
    assert list(refused) == [numbers[5]]
    assert "2 workers ended" in refused[numbers[5]]
    assert c.completed == 7
    assert not c._sessions
    assert all(w.only is None and w.held_slots == 0 for w in c.fleet.workers.values())
    assert c.suspects.convicted == 1


def test_a_suspect_is_alone_and_newcomers_wait_for_it() -> None:
    c = core(1)
    join(c, "a")
    first, second = c.submit(ask(), 0.0), c.submit(ask(), 0.0)
    lose(c, "a", CRASH)
    join(c, "b")
    newcomer = c.submit(ask(), 1.0)
    assert on(c, "b") == [first]
    step(c, first, 4)
    assert on(c, "b") == [first]
    step(c, first)  # it got past the place, and steps aside for the other suspect
    assert on(c, "b") == [second]
    step(c, second, 5)
    assert sorted(on(c, "b")) == [first, second, newcomer]


def test_other_replicas_serve_on_while_a_suspect_has_the_new_one_for_itself() -> None:
    c = core(1)
    join(c, "a")
    join(c, "b")
    numbers = [c.submit(ask(), 0.0) for _ in range(4)]
    gone = on(c, "a")
    stay = on(c, "b")
    assert len(gone) == len(stay) == 2
    lose(c, "a", CRASH)
    assert on(c, "b") == stay  # suspects wait for an empty worker
    join(c, "c", now_s=0.5)
    assert on(c, "c") == gone[:1]
    newcomer = c.submit(ask(), 1.0)
    assert newcomer in on(c, "b")
    for number in gone:
        step(c, number, 5)
    assert sorted(n for a in ("b", "c") for n in on(c, a)) == sorted([*numbers, newcomer])
    assert abs(len(on(c, "b")) - len(on(c, "c"))) <= 1


def test_a_suspect_that_finds_no_empty_worker_gets_one_cleared() -> None:
    c = core(1)
    join(c, "a")
    join(c, "b")
    for _ in range(4):
        c.submit(ask(), 0.0)
    gone, stay = on(c, "a"), on(c, "b")
    lose(c, "a", CRASH)
    c.tick(PATIENCE_S - 0.1)
    assert on(c, "b") == stay
    c.tick(PATIENCE_S)
    assert on(c, "b") == gone[:1]
    for number in gone:
        step(c, number, 5)
    assert sorted(on(c, "b")) == sorted(gone + stay)
    c.take()
    assert c.fleet.workers["b"].held_slots == 4


def test_a_worker_of_another_stage_is_shared() -> None:
    c = core(2)
    join(c, "a", (0,))
    join(c, "b", (1,))
    join(c, "c", (1,))
    for _ in range(4):
        c.submit(ask(), 0.0)
    gone = on(c, "b")
    lose(c, "b", CRASH)
    join(c, "d", (1,), now_s=0.1)
    assert on(c, "d") == gone[:1]
    assert gone[0] in on(c, "a")
    assert len(on(c, "a")) == 3


def test_who_runs_alone_for_long_while_its_worker_lives_is_cleared() -> None:
    c = core(1)
    join(c, "a")
    first, second = c.submit(ask(), 0.0), c.submit(ask(), 0.0)
    lose(c, "a", CRASH)
    join(c, "b")
    assert on(c, "b") == [first]
    c.tick(ALONE_S)
    assert on(c, "b") == [second]
    c.tick(2 * ALONE_S)
    assert sorted(on(c, "b")) == [first, second]


def test_a_client_that_leaves_gives_the_kept_worker_back() -> None:
    c = core(1)
    join(c, "a")
    first, second = c.submit(ask(), 0.0), c.submit(ask(), 0.0)
    lose(c, "a", CRASH)
    c.cancel(second, 0.1)  # it waits
    join(c, "b")
    other = c.submit(ask(), 0.2)
    assert on(c, "b") == [first]
    c.cancel(first, 0.3)  # it runs
    assert on(c, "b") == [other]
    assert first not in c.suspects
    assert second not in c.suspects
    assert c.fleet.workers["b"].only is None


def test_kills_from_outside_disturb_nobody() -> None:
    c = core(1)
    join(c, "a")
    numbers = [c.submit(ask(), 0.0) for _ in range(4)]
    for kill in range(10):
        (address,) = c.fleet.workers
        lose(c, address, KILLED)
        join(c, f"again-{kill}")
        assert on(c, f"again-{kill}") == numbers
    assert refusals(c) == {}


def test_a_suspect_whose_worker_drains_goes_on_when_it_is_cleared() -> None:
    c = core(1)
    join(c, "a")
    first, second = c.submit(ask(), 0.0), c.submit(ask(), 0.0)
    lose(c, "a", CRASH)
    join(c, "b")
    join(c, "c")
    assert on(c, "b") == [first]
    c.fleet.draining("b")
    c.worker_draining("b", 1.0)
    assert on(c, "b") == [first]
    assert on(c, "c") == [second]
    step(c, first, 5)
    step(c, second, 5)
    assert sorted(on(c, "c")) == [first, second]
    assert on(c, "b") == []
