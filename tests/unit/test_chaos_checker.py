"""The chaos checker finds what is planted: lost, wrong, duplicated, late answers; right ones it lets be."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from chaos.checker import FAILING, Answer, judge
from chaos.client import Broken, Events
from chaos.report import Run, document, text
from chaos.requests import DEADLINE_S, Case, Request

EXPECTED = (5, 9, 9, 4, 7)
CASE = Case((3, 4), len(EXPECTED), 0.0, 1.0, 0, EXPECTED)
REQUEST = Request(0, "run-0", CASE, is_streamed=True, deadline_s=10.0)


def answered(tokens: tuple[int, ...] = EXPECTED, **changes: Any) -> Answer:
    """An answer that ended a second after it began."""
    whole = Answer(100.0, 101.0, list(tokens), finish="length", billed=len(tokens))
    return dataclasses.replace(whole, **changes)


@pytest.mark.parametrize(
    ("answer", "verdict", "named"),
    [
        (answered(), "right", ""),
        (answered(billed=-1), "right", ""),
        (answered((5, 9, 8, 4, 7)), "wrong", "token 2 is 8, not 9"),
        (answered((5, 9, 4, 7)), "wrong", "token 2 is 4, not 9"),
        (answered(EXPECTED[:-1]), "wrong", "4 tokens, 5 were asked for"),
        (answered((*EXPECTED, 7)), "duplicated", "6 tokens, 5 were asked for"),
        (answered((5, 9, 9, 9, 4, 7)), "wrong", "token 3 is 9, not 4"),
        (answered(repeated=2), "duplicated", "2 tokens came again"),
        (answered(skipped=1), "wrong", "1 tokens are missing"),
        (answered(billed=10), "duplicated", "10 tokens billed, 5 made"),
        (answered(billed=4), "wrong", "4 tokens billed, 5 made"),
        (answered(finish="stop"), "wrong", "finish reason 'stop'"),
        (answered(EXPECTED[:2], ended_s=0.0, said="its bound passed"), "lost", "2 of 5 tokens came"),
        (answered((), refused="stage_failed", said="no worker"), "lost", "stage_failed: no worker"),
        (answered((), refused="queue_full"), "lost", "queue_full"),
        (answered((), refused="deadline_exceeded"), "refused", "deadline_exceeded"),
        (answered((5, 8), refused="deadline_exceeded"), "wrong", "token 1 is 8, not 9"),
        (answered(ended_s=111.0), "late", "after 11.0 s of 10 s"),
        (answered(ended_s=110.2), "right", ""),
    ],
)
def test_every_answer_gets_its_verdict(answer: Answer, verdict: str, named: str) -> None:
    found = judge(REQUEST, answer)
    assert (found.verdict, found.reason[: len(named)]) == (verdict, named) or named in found.reason
    assert found.verdict == verdict


@pytest.mark.parametrize("code", ["deadline_exceeded", "deadline_unreachable"])
def test_who_has_time_enough_for_every_fault_is_not_refused_for_it(code: str) -> None:
    patient = dataclasses.replace(REQUEST, deadline_s=DEADLINE_S)
    assert judge(patient, answered((), refused=code)).verdict == "lost"


def event(*ids: int, finish: str | None = None) -> bytes:
    return json.dumps({"choices": [{"token_ids": list(ids), "finish_reason": finish}]}).encode()


def take(answer: Answer, *events: tuple[bytes, int | None]) -> Answer:
    """One connection's events."""
    reading = Events(answer)
    for data, number in events:
        assert not reading.take(data, number)
    return answer


def test_a_resumed_stream_that_goes_on_where_it_was_is_right() -> None:
    answer = take(Answer(100.0), (event(5, 9), 2), (event(9), 3))
    take(answer, (event(4), 4), (event(7, finish="length"), 5))
    answer.ended_s = 101.0
    assert (answer.resumed, judge(REQUEST, answer).verdict) == (1, "right")


def test_a_token_that_comes_again_after_a_resume_is_duplicated() -> None:
    answer = take(Answer(100.0), (event(5, 9), 2), (event(9), 3))
    take(answer, (event(9, 4), 4), (event(7, finish="length"), 5))
    answer.ended_s = 101.0
    assert answer.repeated == 1
    assert judge(REQUEST, answer).verdict == "duplicated"


def test_a_token_that_is_left_out_at_a_resume_is_wrong() -> None:
    answer = take(Answer(100.0), (event(5, 9), 2))
    take(answer, (event(4), 4), (event(7, finish="length"), 5))
    answer.ended_s = 101.0
    assert answer.skipped == 1
    assert judge(REQUEST, answer).verdict == "wrong"


def test_a_stream_without_numbers_that_begins_anew_must_say_the_same() -> None:
    answer = take(Answer(100.0), (event(5, 9), None), (event(9), None))
    take(answer, (event(5), None), (event(9, 9, 4), None), (event(7, finish="length"), None))
    answer.ended_s = 101.0
    assert judge(REQUEST, answer).verdict == "right"
    other = take(Answer(100.0), (event(5, 9), None))
    take(other, (event(5), None), (event(8, 9), None), (event(4, 7, finish="length"), None))
    other.ended_s = 101.0
    assert judge(REQUEST, other).verdict == "wrong"


def test_an_end_without_a_finish_reason_is_none() -> None:
    with pytest.raises(Broken, match="without a finish reason"):
        Events(Answer(100.0)).take(b"[DONE]", None)


def test_a_run_with_a_planted_fault_fails_and_prints_its_counts() -> None:
    late = dataclasses.replace(REQUEST, deadline_s=DEADLINE_S)
    asked = [
        (REQUEST, answered()),
        (REQUEST, answered((5, 9, 8, 4, 7))),
        (REQUEST, answered(repeated=1)),
        (REQUEST, answered((), ended_s=0.0)),
        (late, answered(ended_s=100.0 + DEADLINE_S + 1)),
    ]
    told = document(Run(7, (), 1, asked, (), ()))
    assert text(told).splitlines()[-1] == "lost 1 wrong 1 duplicated 1 late 1"
    assert told["faults"] == [f"1 requests {verdict}" for verdict in FAILING]
    assert [one["number"] for one in told["failed"]] == [0, 0, 0]
    right = document(Run(7, (), 1, asked[:1], (), ()))
    assert text(right).splitlines()[-1] == "lost 0 wrong 0 duplicated 0 late 0"
    assert right["faults"] == []
