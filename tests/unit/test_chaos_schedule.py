"""The chaos suite's schedule can be played again, and its proof says who held work when it was hit."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from chaos import schedule
from chaos.checker import Answer
from chaos.proof import Found, Hit, prove, read_events
from chaos.report import Run, document, reached
from chaos.requests import Case, Request, drawn


def test_a_seed_gives_the_same_schedule_and_another_seed_another() -> None:
    first = schedule.schedule(1, schedule.names(), 20, 3.0)
    assert first == schedule.schedule(1, schedule.names(), 20, 3.0)
    assert first != schedule.schedule(2, schedule.names(), 20, 3.0)
    assert Counter(fault.kind for fault in first) == dict.fromkeys(schedule.names(), 20)
    for fault in first:
        low_s, high_s = schedule.by_name(fault.kind).hold_s
        assert low_s <= fault.hold_s <= high_s
        assert 1.5 <= fault.gap_s <= 4.5
        assert 0 <= fault.pick < 1


def test_an_unknown_class_is_refused_by_name() -> None:
    with pytest.raises(KeyError, match="no class of faults 'kill-cat'; there are kill-worker, "):
        schedule.by_name("kill-cat")


def test_what_was_reached_too_seldom_comes_again() -> None:
    seen = {"kill-worker": 2, "cut-nodes": 1}
    short = schedule.missing(2, seen, ["kill-worker", "cut-nodes", "kill-redis"])
    assert short == ["cut-nodes", "kill-redis", "kill-redis"]


def test_a_seed_gives_the_same_requests_under_keys_of_their_run() -> None:
    cases = [Case((3,), 1, 0.0, 1.0, 0, (n,)) for n in range(9)]
    first = [drawn(1, "a", number, cases) for number in range(50)]
    assert first == [drawn(1, "a", number, cases) for number in range(50)]
    assert len({request.key for request in first}) == 50
    assert {request.is_streamed for request in first} == {True, False}
    assert all(request.key.startswith("a-") for request in first)


def line(t: float, event: str, **fields: Any) -> dict[str, Any]:
    return {"t": t, "event": event, **fields}


EVENTS = [
    line(1.0, "route", path=1, replicas=["s0", "s1"]),
    line(1.0, "route", path=2, replicas=["s0", "s2"]),
    line(2.0, "start", replica="s0", sessions=[10, 11], epochs=[1, 1], paths=[1, 1]),
    line(3.0, "release", replica="s0", sessions=[10], epochs=[1]),
    line(3.0, "release", replica="s1", sessions=[10], epochs=[1]),
    line(4.5, "lost", replica="s1", why="exited"),
    line(4.6, "move", replica="s0", sessions=[11], epochs=[2], paths=[2]),
    line(4.7, "release", replica="s1", sessions=[11], epochs=[1]),
    line(6.0, "release", replica="s0", sessions=[11], epochs=[2]),
    line(6.0, "release", replica="s2", sessions=[11], epochs=[2]),
]


def hit(kind: str, part: str, victim: str, at_s: float) -> Hit:
    return Hit(kind, part, (victim,), at_s, at_s)


def test_sessions_are_held_from_their_start_to_their_release() -> None:
    hits = [
        hit("kill-worker", "worker", "s1", 4.0),  # session 11
        hit("kill-worker", "worker", "s1", 5.0),  # moved away
        hit("kill-worker", "worker", "s2", 5.0),
        hit("kill-worker", "worker", "s1", 2.5),  # both
        hit("kill-redis", "redis", "redis", 4.0),
        hit("kill-redis", "redis", "redis", 7.0),  # nobody at work
        hit("kill-worker", "worker", "s1", 1.5),  # before the start
    ]
    found = prove(EVENTS, hits)
    assert [one.held for one in found] == [1, 0, 1, 2, 1, 0, 0]
    assert (found[0].noticed_s, found[0].lost_as) == (0.5, "exited")
    assert found[1].noticed_s is None
    assert reached(hits, found) == {"kill-worker": 3, "kill-redis": 1}


def test_a_dead_router_holds_nothing_any_more() -> None:
    hits = [hit("kill-router", "router", "r", 4.0), hit("stop-redis", "redis", "redis", 4.2)]
    assert [one.held for one in prove(EVENTS[:5], hits)] == [1, 0]
    hits = [hit("stop-router", "router", "r", 4.0), hit("stop-redis", "redis", "redis", 4.2)]
    assert [one.held for one in prove(EVENTS[:5], hits)] == [1, 1]


def test_logs_of_routers_are_read_in_order_of_time_and_cut_lines_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "tiny-1.jsonl").write_text(json.dumps(line(2.0, "b")) + '\n{"t": 3.0, "ev')
    (tmp_path / "tiny-0.jsonl").write_text(json.dumps(line(1.0, "a")) + "\n")
    (tmp_path / "tiny-stage-0-0.jsonl").write_text(json.dumps(line(1.5, "wave")) + "\n")
    assert [one["event"] for one in read_events(tmp_path, "tiny")] == ["a", "b"]


def test_a_class_that_found_nobody_at_work_fails_the_run() -> None:
    request = Request(0, "r-0", Case((3,), 1, 0.0, 1.0, 0, (5,)), is_streamed=True, deadline_s=9.0)
    answer = Answer(1.0, 2.0, [5], [1.8], finish="length", billed=1)
    hits = [hit("kill-worker", "worker", "s1", 1.5), hit("kill-worker", "worker", "s1", 5.0)]
    run = Run(1, ("kill-worker",), 2, [(request, answer)], hits, [Found(1, 0.2, "exited"), Found(0)])
    told = document(run)
    assert told["faults"] == ["kill-worker struck 1 times in mid-request, 2 were asked for"]
    (row,) = told["classes"]
    assert (row["done"], row["mid_request"], row["held"], row["latency"]["count"]) == (2, 1, 1, 1)
    assert row["pause"]["most_s"] == pytest.approx(0.3)
    assert row["noticed_p50_s"] == 0.2
