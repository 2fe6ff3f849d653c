"""Trails of requests through the cores, and the spans that are made of them."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.collector import Seen, read

from keystage.router.admission import AdmissionBounds
from keystage.router.engine import Generation, TooLate
from keystage.router.fleet import Fleet
from keystage.router.looping import LoopingCore
from keystage.router.single import SinglePassCore
from keystage.router.traces import Traces
from keystage.router.trails import Trail, spread
from keystage.wire import api
from keystage.wire.tracing import Tracer
from keystage.worker.step_times import arrived, began, ended, opened

TRACE, PARENT = b"t" * 16, b"p" * 8


class Made:
    """Spans as the collector would see them; times are those of the core."""

    def __init__(self, modules: tuple[str, ...] = ()) -> None:
        self.tracer = Tracer("http://127.0.0.1:9", "p")
        self.tracer.offset_ns = 0
        self.traces = Traces(self.tracer, "p", modules, lambda address: f"replica-{address}")

    def of(self, trail: Trail, error: BaseException | None = None) -> dict[str, Seen]:
        self.traces.end(trail, error)
        found = read(bytes(self.tracer.take()[0]))
        assert all(span.trace_id == TRACE.hex() for span in found)
        assert len({span.span_id for span in found}) == len(found)
        return {span.name: span for span in found}


def trail(begun_s: float = 0.0) -> Trail:
    return Trail(TRACE, PARENT, begun_s)


def join(core: LoopingCore | SinglePassCore, name: str, stage: int, at_s: float, *, looping: bool) -> None:
    kv = 1000 if looping else 0
    hello = api.Hello(1, "p", (stage,), name, "b", "emulated", 4, kv, 8, name, 1, "n", looping)
    assert core.fleet.hello(name, hello, at_s) is None
    core.fleet.credit(name, api.Credit(name, 4, kv))
    core.fleet.ready(name, at_s)
    core.worker_ready(name, at_s)


def span_of(seen: Seen) -> tuple[float, float]:
    return seen.start_s, seen.end_s


# ---------------------------------------------------------------- single-pass


def test_an_item_leaves_queue_hand_off_and_compute_of_every_stage() -> None:
    core = SinglePassCore(Fleet(2, "p"), AdmissionBounds(), 100)
    join(core, "a", 0, 1.0, looping=False)
    join(core, "b", 1, 1.0, looping=False)
    number = core.submit(b"in!", None, 10.0)
    core.trails[number] = noted = trail(10.0)
    core.take()
    core.parked(
        "a", api.Parked("a", 0, [number], [0], [api.TensorRef("uint8", (3,), 1, 5, 0, 3, 7)], 0.5, 2.0), 13.0
    )
    core.take()
    core.results("b", api.Results("b", 1, [number], [0], "uint8", [(3,)], [b"out"], 0.0, 0.25), 14.0)
    found = Made().of(noted)
    assert list(found) == [f"stage {k} {part}" for k in (0, 1) for part in ("queue", "hand-off", "compute")]
    assert span_of(found["stage 0 queue"]) == (10.0, 10.0)
    assert span_of(found["stage 0 hand-off"]) == (10.0, 11.0)
    assert span_of(found["stage 0 compute"]) == (11.0, 13.0)
    assert span_of(found["stage 1 hand-off"]) == (13.0, 13.75)
    assert span_of(found["stage 1 compute"]) == (13.75, 14.0)
    assert found["stage 1 compute"].attributes == {
        "keystage.pipeline": "p", "keystage.stage": 1, "keystage.replica": "replica-b"
    }  # fmt: skip
    assert {span.parent_id for span in found.values()} == {PARENT.hex()}
    counters = [meter.counters() for meter in core.meters]
    assert [c.handoff_sum_s for c in counters] == [1.0, 0.75]


def test_a_cold_start_is_named_where_the_item_waited_for_it() -> None:
    core = SinglePassCore(Fleet(2, "p"), AdmissionBounds(), 100)
    join(core, "a", 0, 1.0, looping=False)
    number = core.submit(b"in!", None, 10.0)
    core.trails[number] = noted = trail(10.0)
    core.take()
    core.parked(
        "a", api.Parked("a", 0, [number], [0], [api.TensorRef("uint8", (3,), 1, 5, 0, 3, 7)], 0.0, 1.0), 11.0
    )
    core.take()
    join(core, "b", 1, 16.0, looping=False)
    core.take()
    core.results("b", api.Results("b", 1, [number], [0], "uint8", [(3,)], [b"out"], 0.0, 0.5), 17.0)
    found = Made().of(noted)
    assert span_of(found["stage 1 queue"]) == (11.0, 16.0)
    assert found["stage 1 queue"].attributes["keystage.cold_start"] is True
    assert found["stage 0 queue"].attributes["keystage.cold_start"] is False
    cold = found["cold start"]
    assert span_of(cold) == (11.0, 16.0)
    assert cold.parent_id == found["stage 1 queue"].span_id
    assert (cold.attributes["keystage.stage"], cold.attributes["keystage.replica"]) == (1, "replica-b")


def test_a_request_that_is_refused_while_it_waits_says_why() -> None:
    made = Made()
    found = made.of(trail(5.0), TooLate("deadline of 1 s passed at stage 0"))
    assert list(found) == ["unanswered"]
    assert found["unanswered"].error == "deadline of 1 s passed at stage 0"
    assert found["unanswered"].start_s == 5.0


def test_untraced_requests_leave_nothing() -> None:
    core = SinglePassCore(Fleet(1, "p"), AdmissionBounds(), 100)
    join(core, "a", 0, 1.0, looping=False)
    traced, other = core.submit(b"x", None, 2.0), core.submit(b"y", None, 2.0)
    core.trails[traced] = noted = trail(2.0)
    core.take()
    done = api.Results("a", 0, [traced, other], [0, 0], "uint8", [(1,)] * 2, [b"", b""], 0.0, 0.5)
    core.results("a", done, 3.0)
    assert len(noted.visits) == 1


def test_many_rounds_through_a_module_are_one_span() -> None:
    noted = trail(0.0)
    for k in range(20):
        noted.visited((1, 1), (10.0 + k, 10.25 + k, 11.0 + k, 0.5), "b", 0.0)
    noted.visited((2, 2), (30.0, 30.0, 31.0, 1.0), "c", 0.0)
    found = Made(("text", "denoise", "decode")).of(noted)
    assert list(found) == [
        "module denoise",
        *(f"module decode {p}" for p in ("queue", "hand-off", "compute")),
    ]
    rounds = found["module denoise"]
    assert span_of(rounds) == (10.0, 30.0)
    assert rounds.attributes["keystage.turns"] == 20
    assert rounds.attributes["keystage.queue.total_s"] == pytest.approx(5.0)
    assert rounds.attributes["keystage.handoff.p95_s"] == pytest.approx(0.25)
    assert rounds.attributes["keystage.compute.max_s"] == 0.5


# ---------------------------------------------------------------- looping


def waves_of(addresses: Iterable[str]) -> int:
    return len(set(addresses))


def looping(*ready_s: float) -> LoopingCore:
    core = LoopingCore(Fleet(len(ready_s), "p"), AdmissionBounds(), 100, waves_of)
    for stage, at_s in enumerate(ready_s):
        if math.isfinite(at_s):
            join(core, f"w{stage}", stage, at_s, looping=True)
    return core


def tokens(session: int, position: int, times: list[float] | None, epoch: int = 1) -> api.Tokens:
    return api.Tokens("w1", 1, [session], [epoch], [position], [9], times)


def ask(max_tokens: int) -> Generation:
    return Generation([1, 2], max_tokens, 0.0, 1.0, 0, ())


def test_decode_steps_are_summed_up_in_one_span_a_stage() -> None:
    core = looping(1.0, 1.0)
    noted = trail(10.0)
    number = core.submit(ask(11), 10.0, noted)
    (start,) = [m for _, m in core.take()[0] if isinstance(m, api.Start)]
    assert [spec.is_timed for spec in start.specs] == [True]
    for step in range(11):
        core.tokens(tokens(number, 2 + step, [0.0, 0.125, 0.25, 0.5 if step else 4.0]), 20.0 + step)
    found = Made().of(noted)
    assert list(found) == ["queue", "prefill", "decode", "stage 0", "stage 1"]
    assert span_of(found["queue"]) == (10.0, 10.0)
    assert span_of(found["prefill"]) == (10.0, 20.0)
    assert span_of(found["decode"]) == (20.0, 30.0)
    assert found["decode"].attributes["keystage.steps"] == 10
    assert found["decode"].attributes["keystage.gap.p50_s"] == 1.0
    second = found["stage 1"].attributes
    assert (second["keystage.steps"], second["keystage.replica"]) == (11, "replica-w1")
    assert second["keystage.compute.total_s"] == pytest.approx(9.0)
    assert (second["keystage.compute.p50_s"], second["keystage.compute.max_s"]) == (0.5, 4.0)
    assert second["keystage.compute.first_s"] == 4.0
    assert second["keystage.handoff.p95_s"] == 0.25
    assert found["stage 0"].attributes["keystage.compute.p50_s"] == 0.125


def test_a_session_that_waited_for_a_stage_names_it() -> None:
    core = looping(1.0, 1.0, math.inf)
    noted = trail(10.0)
    number = core.submit(ask(1), 10.0, noted)
    join(core, "w2", 2, 17.0, looping=True)
    core.tokens(tokens(number, 2, None), 18.0)
    found = Made().of(noted)
    assert span_of(found["queue"]) == span_of(found["cold start"]) == (10.0, 17.0)
    assert found["cold start"].attributes["keystage.stage"] == 2
    assert found["cold start"].parent_id == found["queue"].span_id
    assert "decode" not in found


def test_without_a_trace_nobody_is_asked_for_times() -> None:
    core = looping(1.0)
    core.submit(ask(2), 10.0)
    (start,) = [m for _, m in core.take()[0] if isinstance(m, api.Start)]
    assert [spec.is_timed for spec in start.specs] == [False]


# ---------------------------------------------------------------- times of a wave


def test_times_of_a_wave_are_durations_by_each_worker_s_own_clock() -> None:
    times = opened(100.0)
    began(times, 100.25)
    ended(times, 101.25, 2)  # stages 0 and 1 are one span of a device
    arrived(times, 5.0)
    began(times, 5.5)
    ended(times, 7.5, 1)
    ended(times, 9.0, 1)  # a second call is none
    assert times == [0.25, 0.5, 0.0, 0.5, 0.5, 2.0]


@given(st.lists(st.floats(0, 100), min_size=1, max_size=200))
def test_percentiles_are_values_that_came(values: list[float]) -> None:
    total_s, p50_s, p95_s, max_s = spread(values)
    assert total_s == pytest.approx(math.fsum(values))
    assert {p50_s, p95_s, max_s} <= set(values)
    assert min(values) <= p50_s <= p95_s <= max_s == max(values)
    assert sum(v <= p50_s for v in values) * 2 >= len(values)
    assert sum(v <= p95_s for v in values) >= 0.95 * len(values)
