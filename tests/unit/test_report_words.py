"""What the command line makes of a report: figures, judgements, names, explanations."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.reports import decision, pipeline, report, stage

from keystage.cli import explaining, judging, naming
from keystage.cli.figures import clean, duration, named, number, percent, rate
from keystage.cli.report_tables import pipeline_row
from keystage.observability.api import FunctionReport, Report


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("predicted_wait_s", 0.31, "predicted wait 310 ms"),
        ("arrival_rps", 14.25, "arrival 14.2/s"),
        ("utilisation_ratio", 0.93, "utilisation 93 %"),
        ("arrival_cv", 3.0, "arrival CV 3"),
        ("ready_replicas", 1200.0, "ready replicas 1200"),
        ("free_bytes", float(3 << 30), "free 3.0 GiB"),
        ("s", 2.0, "s 2"),
    ],
)
def test_inputs_have_words_and_units(name: str, value: float, words: str) -> None:
    assert named(name, value) == words


def test_what_was_not_measured_is_a_dash() -> None:
    assert {duration(None), rate(None), percent(None), number(None)} == {"-"}


def test_a_name_cannot_steer_the_terminal() -> None:
    assert clean("a\x1b[2Jb\u202ec\n") == "a\N{REPLACEMENT CHARACTER}[2Jb\N{REPLACEMENT CHARACTER}c "
    assert len(clean("x" * 5000)) == 400


def test_nothing_is_wrong_where_all_is_well() -> None:
    assert judging.faults(report()) == ()


@pytest.mark.parametrize(
    ("changes", "about", "words"),
    [
        ({"ready": 0, "starting": 1}, "llm/1", "0 of 2 replicas ready, 1 starting: nothing is served"),
        ({"ready": 1}, "llm/1", "1 of 2 replicas ready, 0 starting"),
        ({"utilisation_ratio": 1.2}, "llm/1", "utilisation 120 % > 100 % and no replica is starting"),
    ],
)
def test_a_stage_that_is_ill_is_named(changes: dict[str, Any], about: str, words: str) -> None:
    stages = (stage(0), stage(1, **changes), stage(2))
    (fault,) = judging.faults(report(pipeline(stages=stages)))
    assert fault.about == about
    assert fault.text.startswith(words)


def test_more_replicas_on_their_way_are_no_fault() -> None:
    stages = (stage(0, utilisation_ratio=1.5, desired=3, starting=1),)
    assert judging.faults(report(pipeline(stages=stages))) == ()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attainment_ratio": 0.5}, "50 % of requests met the objective of 2 s, at least 90 %"),
        ({"attainment_ratio": None, "latency_s": 3.0}, "latency 3 s > objective 2 s"),
        (
            {"deadline_s": None, "ttft_s": 2.0, "attainment_ratio": 0.1, "latency_s": 30.0},
            "10 % of requests met the objective of TTFT 2 s, at least 90 %",
        ),
        (
            {"deadline_s": None, "ttft_s": 2.0, "tpot_s": 0.1, "entry_wait_s": 43.0, "latency_s": 30.0},
            "queue 1: the last waits about 43 s > objective TTFT 2 s, TPOT 100 ms",
        ),
        (
            {"deadline_s": None, "ttft_s": 2.0, "stages": (stage(0, queue=86.0, wait_s=3.4),)},
            "queue 86: those served waited 3.4 s > objective TTFT 2 s",
        ),
        (
            {"missing": "router llm does not answer"},
            "its numbers stay as they are: router llm does not answer",
        ),
    ],
)
def test_a_pipeline_that_is_ill_is_named(changes: dict[str, Any], words: str) -> None:
    (fault,) = judging.faults(report(pipeline(**changes)))
    assert (fault.about, fault.text) == ("llm", words)


def test_a_wait_that_is_over_or_has_no_objective_is_no_fault() -> None:
    over = (stage(0, queue=0.0, wait_s=3.4),)
    assert judging.faults(report(pipeline(stages=over, ttft_s=2.0, entry_wait_s=0.0))) == ()
    long = {"entry_wait_s": 43.0, "deadline_s": None}
    assert judging.faults(report(pipeline(**long))) == ()
    assert judging.faults(report(pipeline(**long, ttft_s=2.0, execution="single-pass"))) == ()


def test_the_objective_of_a_looping_pipeline_is_in_the_table() -> None:
    one = pipeline(deadline_s=None, ttft_s=2.0, tpot_s=0.1, attainment_ratio=0.97)
    cells = [cell.plain for cell in pipeline_row(one)]
    assert (cells[4], cells[5]) == ("TTFT 2 s, TPOT 100 ms", "97 %")
    assert "objective TTFT 2 s, TPOT 100 ms, met by 97 %" in " ".join(
        explaining.standing(naming.stage(report(one), "llm"))
    )


def test_controller_age_and_functions_are_judged() -> None:
    echo = FunctionReport(function="echo", desired=1)
    found = judging.faults(report(trouble="no lease", functions=(echo,)), "the report is 9 s old")
    assert [str(fault) for fault in found] == [
        "controller: the report is 9 s old",
        "controller: no lease",
        "echo: 0 of 1 replicas ready, 0 starting: nothing is served",
    ]


@pytest.mark.parametrize("name", ["llm-stage-3", "llm/3"])
def test_a_stage_is_found_by_its_function_and_its_place(name: str) -> None:
    meant = naming.stage(report(), name)
    assert (meant.function, meant.stage and meant.stage.stage) == ("llm-stage-3", 3)


def test_pipelines_and_other_functions_are_found() -> None:
    assert naming.stage(report(), "llm").stage is None
    assert naming.stage(report(), "echo").alone == FunctionReport(function="echo", desired=1, ready=1)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("llm-stage-33", "did you mean llm-stage-3"),
        ("llm/9", "pipeline 'llm' has stages 0 to 3"),
        ("zzzz", "there are llm, echo, llm-stage-0, llm/0"),
    ],
)
def test_an_unknown_name_is_answered_with_near_ones(name: str, words: str) -> None:
    with pytest.raises(naming.Unknown, match="no stage") as caught:
        naming.stage(report(), name)
    assert words in str(caught.value)


def test_without_any_function_there_is_nothing_near() -> None:
    with pytest.raises(naming.Unknown, match="nothing is deployed"):
        naming.pipeline(Report(controller="c", number=1, at_s=0.0), "llm")


def test_a_stage_is_explained_with_its_pipelines_decisions() -> None:
    told = report(at_s=1000.0)
    meant = naming.stage(told, "llm/3")
    assert list(explaining.standing(meant)) == [
        "llm-stage-3: stage 3 of pipeline llm (looping), 1st key stage",
        "replicas: 2 of 2 ready",
        (
            "load: arrivals 14.2/s, CV 3.1, queue 1, in flight 3, wait 20 ms, service 61 ms, "
            "utilisation 43 %, share of the objective 200 ms"
        ),
        "why this number: waits within 80 ms",
    ]
    head, order, change, inputs = explaining.history(explaining.decisions(told, meant, 10), told.at_s)
    assert head == "last decisions, the newest at the end:"
    assert order.endswith("(40 s ago) key stages in order: 3")
    assert change.endswith("(4 s ago) stage 3: 2 -> 3, predicted wait 310 ms > 80 ms")
    assert inputs == "    from predicted wait 310 ms, arrival 14.2/s, arrival CV 3.1, ready replicas 2"


def test_another_stages_decisions_and_faults_are_left_out() -> None:
    ill = pipeline(stages=(stage(0), stage(1, ready=0)))
    told = report(ill, at_s=1000.0, decisions=tuple(decision(n, 900.0 + n, "llm-stage-1") for n in range(9)))
    assert explaining.decisions(told, naming.stage(told, "llm/0"), 5) == ()
    assert explaining.faults(naming.stage(told, "llm/0")) == ()
    newest = explaining.decisions(told, naming.stage(told, "llm/1"), 5)
    assert [one.number for one in newest] == [4, 5, 6, 7, 8]
    assert len(explaining.faults(naming.stage(told, "llm/1"))) == 1
    assert len(explaining.decisions(told, naming.stage(told, "llm"), 5)) == 5


def test_a_function_without_stages_is_explained() -> None:
    told = report(functions=(FunctionReport(function="echo", desired=1, reason="a request waits"),))
    meant = naming.stage(told, "echo")
    assert list(explaining.standing(meant))[1:] == [
        "replicas: 0 of 1 ready, 0 starting",
        "why this number: a request waits",
    ]
    assert [fault.about for fault in explaining.faults(meant)] == ["echo"]
    assert list(explaining.history((), 0.0)) == ["no decision about it is among the last 500"]


def test_places_have_ordinals() -> None:
    many = tuple(stage(i, is_key=True, rank=i) for i in range(23))
    told = report(pipeline(stages=many))
    shown = [
        next(explaining.standing(naming.stage(told, f"llm/{i}"))).split(", ")[-1] for i in (0, 1, 2, 10, 22)
    ]
    assert [text.split()[0] for text in shown] == ["1st", "2nd", "3rd", "11th", "23rd"]


def test_reports_survive_the_wire() -> None:
    told = report()
    assert msgspec.json.decode(msgspec.json.encode(told), type=Report) == told
