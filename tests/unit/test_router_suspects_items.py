"""Time lines of items that end workers, and of the batches that they were in."""

from __future__ import annotations

from keystage.router.admission import AdmissionBounds
from keystage.router.fleet import Fleet
from keystage.router.sessions import Answer, Refuse
from keystage.router.single import SinglePassCore
from keystage.router.suspects import Cause, Ending
from keystage.wire import api

CRASH = Ending(Cause.CRASH, "SIGSEGV", "w")


def single(*workers: tuple[str, int], slots: int = 16) -> SinglePassCore:
    c = SinglePassCore(Fleet(1, "p"), AdmissionBounds(), 100)
    for name, stage in workers:
        join_single(c, name, stage, slots)
    return c


def join_single(c: SinglePassCore, name: str, stage: int = 0, slots: int = 16) -> None:
    hello = api.Hello(1, "p", (stage,), name, "b", "emulated", slots, 0, 8, name, 1, "n", False)
    c.fleet.hello(name, hello, 0.0)
    c.fleet.credit(name, api.Credit(name, slots, 0))
    c.fleet.ready(name, 0.0)
    c.worker_ready(name, 0.0)


def test_one_poisoned_item_of_a_batch_is_failed_alone_after_two_workers() -> None:
    c = single(("a", 0))
    numbers = [c.submit(bytes([i]), None, 0.0) for i in range(8)]
    poisoned = numbers[4]
    batches: dict[str, list[tuple[list[int], list[int]]]] = {"a": []}
    answered: set[int] = set()
    refused: dict[int, str] = {}
    deaths, now_s, names = 0, 0.0, 0
    sizes_after_death: list[int] = []
    for _ in range(100):
        now_s += 0.01
        c.tick(now_s)
        sends, outcomes = c.take()
        for to, message in sends:
            if isinstance(message, api.Work):
                batches[to].append((message.sessions, message.epochs))
                if deaths:
                    sizes_after_death.append(len(message.sessions))
        for outcome in outcomes:
            if isinstance(outcome, Answer):
                answered.add(outcome.session)
            elif isinstance(outcome, Refuse):
                refused[outcome.session] = str(outcome.refusal)
        if len(answered) + len(refused) == len(numbers):
            break
        for address in list(c.fleet.workers):
            if not batches[address]:
                continue
            sessions, epochs = batches[address].pop(0)
            if poisoned in sessions:
                deaths, names = deaths + 1, names + 1
                c.fleet.remove(address)
                c.worker_lost(address, now_s, CRASH)
                batches[f"w{names}"] = []
                join_single(c, f"w{names}")
            else:
                done = api.Results(
                    address,
                    0,
                    sessions,
                    epochs,
                    "uint8",
                    [(1,)] * len(sessions),
                    [b"x"] * len(sessions),
                    0,
                    0.001,
                )
                c.results(address, done, now_s)
    assert deaths == 2
    assert list(refused) == [poisoned]
    assert answered == {*numbers} - {poisoned}
    assert set(sizes_after_death) == {1}
    assert all(w.only is None and w.held_slots == 0 for w in c.fleet.workers.values())
    again = [c.submit(b"z", None, now_s) for _ in range(2)]
    assert [m.sessions for _, m in c.take()[0] if isinstance(m, api.Work)] == [again]


def test_an_item_whose_output_only_lay_at_the_dead_worker_is_no_suspect() -> None:
    fleet = Fleet(2, "p")
    c = SinglePassCore(fleet, AdmissionBounds(), 100)
    join_single(c, "a", 0)
    number = c.submit(b"in!", None, 0.0)
    c.take()
    ref = api.TensorRef("uint8", (3,), 1, 5, 64, 3, 7)
    c.parked("a", api.Parked("a", 0, [number], [0], [ref], 0.0, 0.001), 1.0)
    fleet.remove("a")
    c.worker_lost("a", 1.5, CRASH)
    assert number not in c.suspects
