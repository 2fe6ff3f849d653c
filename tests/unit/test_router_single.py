"""Time lines of the single-pass core: hops, credit, and who frees a ring slot."""

from __future__ import annotations

from keystage.router.admission import AdmissionBounds
from keystage.router.fleet import DEAD_AFTER_S, Fleet
from keystage.router.owed_acks import ACK_GRACE_S
from keystage.router.sessions import Answer
from keystage.router.single import SinglePassCore
from keystage.wire import api


def core(*workers: tuple[str, int], slots: int = 4) -> SinglePassCore:
    fleet = Fleet(2, "p")
    c = SinglePassCore(fleet, AdmissionBounds(), 100)
    for name, stage in workers:
        hello = api.Hello(1, "p", (stage,), name, "b", "emulated", slots, 0, 8, name, 1, "n", False)
        fleet.hello(name, hello, 0.0)
        fleet.credit(name, api.Credit(name, slots, 0))
        fleet.ready(name, 0.0)
        c.worker_ready(name, 0.0)
    return c


def parked(session: int, slot: int, epoch: int = 0) -> api.Parked:
    ref = api.TensorRef("uint8", (3,), 1, 5, 64 * slot, 3, slot)
    return api.Parked("a", 0, [session], [epoch], [ref], 0.0, 0.001)


def results(session: int, epoch: int = 0) -> api.Results:
    return api.Results("b", 1, [session], [epoch], "uint8", [(3,)], [b"out"], 0.0, 0.001)


def slots_freed(c: SinglePassCore) -> list[tuple[str, list[int]]]:
    return [(to, m.slots) for to, m in c.take()[0] if isinstance(m, api.Ack)]


def test_an_item_goes_from_hop_to_hop() -> None:
    c = core(("a", 0), ("b", 1))
    number = c.submit(b"in!", None, 0.0)
    [(to, work)] = c.take()[0]
    assert isinstance(work, api.Work)
    assert (to, work.sessions, work.payloads, work.more) == ("a", [number], [b"in!"], True)
    c.parked("a", parked(number, 7), 1.0)
    [(to, fetch)] = c.take()[0]
    assert isinstance(fetch, api.Fetch)
    assert (to, fetch.producers, fetch.refs[0].slot, fetch.more) == ("b", ["a"], 7, False)
    c.results("b", results(number), 2.0)
    assert c.take() == ([], [Answer(number, b"out")])
    assert all(w.held_slots == 0 for w in c.fleet.workers.values())


def test_an_output_whose_request_is_gone_is_freed() -> None:
    c = core(("a", 0))
    cancelled_early, cancelled_late = c.submit(b"x", None, 0.0), c.submit(b"y", None, 0.0)
    c.cancel(cancelled_early, 0.5)
    c.parked("a", parked(cancelled_early, 7), 1.0)
    assert slots_freed(c) == [("a", [7])]
    c.parked("a", parked(cancelled_late, 8), 1.0)
    assert slots_freed(c) == []
    c.cancel(cancelled_late, 2.0)
    assert slots_freed(c) == [("a", [8])]


def test_inputs_of_a_dead_consumer_are_freed_and_the_item_starts_over() -> None:
    c = core(("a", 0), ("b", 1))
    number = c.submit(b"in!", None, 0.0)
    c.take()
    c.parked("a", parked(number, 7), 1.0)
    c.take()
    c.fleet.remove("b")
    c.worker_lost("b", 1.5)
    sends = c.take()[0]
    assert [m.slots for _, m in sends if isinstance(m, api.Ack)] == [[7]]
    assert [m.epochs for _, m in sends if isinstance(m, api.Work)] == [[1]]
    c.parked("a", parked(number, 9, epoch=0), 2.0)
    assert slots_freed(c) == [("a", [9])]


def test_a_consumer_that_dies_just_after_its_answer_may_owe_its_acknowledgement() -> None:
    c = core(("a", 0), ("b", 1), ("c", 1))
    numbers = [c.submit(b"in!", None, 0.0) for _ in range(2)]
    c.take()
    for slot, number in enumerate(numbers):
        c.parked("a", parked(number, slot), 1.0)
    hop = {s: to for to, m in c.take()[0] if isinstance(m, api.Fetch) for s in m.sessions}
    c.results(hop[numbers[0]], results(numbers[0]), 2.0)
    c.take()
    c.fleet.remove(hop[numbers[0]])
    c.worker_lost(hop[numbers[0]], 2.1)
    assert slots_freed(c) == [("a", [0])]
    c.results(hop[numbers[1]], results(numbers[1]), 3.0)
    assert ACK_GRACE_S > DEAD_AFTER_S  # on another node that is how late its death is noticed
    c.tick(3.1 + ACK_GRACE_S)
    c.fleet.remove(hop[numbers[1]])
    c.worker_lost(hop[numbers[1]], 10.0)
    assert slots_freed(c) == []


def grouped(*workers: tuple[str, tuple[int, ...]], stages: int) -> SinglePassCore:
    fleet = Fleet(stages, "p")
    c = SinglePassCore(fleet, AdmissionBounds(), 100)
    for name, hosted in workers:
        hello = api.Hello(1, "p", hosted, name, "b", "emulated", 64, 0, 64, name, 1, "n", False)
        fleet.hello(name, hello, 0.0)
        fleet.credit(name, api.Credit(name, 64, 0))
        fleet.ready(name, 0.0)
        c.worker_ready(name, 0.0)
    return c


def test_a_worker_of_several_stages_takes_an_item_through_all_of_them() -> None:
    c = grouped(("a", (0, 1)), ("b", (1,)), ("c", (2,)), stages=3)
    number = c.submit(b"in!", None, 0.0)
    [(to, work)] = c.take()[0]
    assert (to, work.stage, work.last, work.more) == ("a", 0, 1, True)
    ref = api.TensorRef("uint8", (3,), 1, 5, 0, 3, 7)
    c.parked("a", api.Parked("a", 1, [number], [0], [ref], 0.25, 0.5), 1.0)
    [(to, fetch)] = c.take()[0]
    assert (to, fetch.stage, fetch.last, fetch.more) == ("c", 2, 2, False)
    c.results("c", api.Results("c", 2, [number], [0], "uint8", [(3,)], [b"out"], 0.0, 0.25), 2.0)
    assert c.take() == ([], [Answer(number, b"out")])
    counts = [meter.counters() for meter in c.meters]
    assert [count.arrivals for count in counts] == [1, 1, 1]
    assert [count.services for count in counts] == [1, 1, 1]
    assert [count.service_sum_s for count in counts] == [0.25, 0.25, 0.25]
    assert [count.wait_sum_s for count in counts] == [0.25, 0.0, 0.0]
    assert sum(count.sojourn_sum_s for count in counts[:2]) == 1.0
    assert all(count.in_flight == 0 for count in counts)
    assert all(w.held_slots == 0 for w in c.fleet.workers.values())


def test_a_batch_has_one_element_type() -> None:
    c = grouped(stages=1)
    kinds = ["uint8", "uint8", "float32", "uint8"]
    for kind in kinds:
        c.submit(b"data", None, 0.0, kind, (4,) if kind == "uint8" else (1,))
    hello = api.Hello(1, "p", (0,), "a", "b", "cpu", 64, 0, 64, "a", 1, "n", False)
    c.fleet.hello("a", hello, 0.0)
    c.fleet.credit("a", api.Credit("a", 64, 0))
    c.fleet.ready("a", 0.0)
    c.worker_ready("a", 0.0)
    works: list[api.Work] = []
    while sent := [m for _, m in c.take()[0] if isinstance(m, api.Work)]:
        works += sent
        for work in sent:
            c.results(
                "a",
                api.Results(
                    "a", 0, work.sessions, work.epochs, "uint8", [], [b""] * len(work.sessions), 0.0, 0.01
                ),
                1.0,
            )
    assert [(m.dtype, m.shapes) for m in works] == [
        ("uint8", [(4,), (4,)]),
        ("float32", [(1,)]),
        ("uint8", [(4,)]),
    ]


def test_upstream_waits_while_too_many_bytes_wait_for_the_next_stage() -> None:
    c = grouped(("a", (0,)), stages=2)
    numbers = [c.submit(b"in!", None, 0.0) for _ in range(2)]
    c.take()
    for slot, number in enumerate(numbers):
        ref = api.TensorRef("float32", (3, 1024, 1024), 1, 5, 0, 12 * 1024 * 1024, slot)
        c.parked("a", api.Parked("a", 0, [number], [0], [ref], 0.0, 0.001), 1.0)
    late = c.submit(b"in!", None, 1.0)
    assert c.take()[0] == []
    c.cancel(numbers[0], 2.0)
    sent = [m for _, m in c.take()[0] if isinstance(m, api.Work)]
    assert [m.sessions for m in sent] == [[late]]
