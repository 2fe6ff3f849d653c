"""What `keystage explain` makes of a report: decisions it tells, names it offers, numbers in words."""

from __future__ import annotations

import pytest
from support.reports import decision, pipeline, report

from keystage.cli import explaining, naming
from keystage.cli.figures import named, number, rate
from keystage.observability.api import FunctionReport

ORDER = {"kind": "key-stages", "before": None, "after": None, "inputs": {}}


def test_orders_that_the_next_one_replaced_do_not_hide_decisions() -> None:
    noise = [decision(n, 100 + n, "llm", text=f"order {n}", **ORDER) for n in range(10, 60)]
    told = report(
        pipeline(),
        decisions=(
            decision(1, 90, "llm", text="order 1", **ORDER),
            decision(2, 91),
            *noise,
            decision(70, 170, "llm", kind="hold", text="held"),
            decision(71, 171, "llm", text="order 71", **ORDER),
        ),
    )
    found = explaining.decisions(told, naming.stage(told, "llm/3"), 10)
    assert [one.number for one in found] == [1, 2, 59, 70, 71]
    assert [one.number for one in explaining.decisions(told, naming.stage(told, "llm"), 2)] == [70, 71]


def test_each_pipeline_keeps_its_own_last_order() -> None:
    both = [decision(n, 100 + n, ("a", "b")[n % 2], **ORDER) for n in range(6)]
    assert [one.number for one in explaining.settled(both)] == [4, 5]


def test_an_unknown_name_in_a_large_world_is_answered_with_pipelines_and_functions() -> None:
    told = report(
        *(pipeline(f"p{n}", 8) for n in range(4)),
        functions=(FunctionReport(function="hello", desired=1, ready=1),),
    )
    with pytest.raises(naming.Unknown) as caught:
        naming.stage(told, "zzzzzz")
    assert "there are p0, p1, p2, p3, hello, p0-stage-0, " in str(caught.value)
    with pytest.raises(naming.Unknown, match="did you mean p2-stage-7"):
        naming.stage(told, "p2-stge-7")


@pytest.mark.parametrize(
    ("value", "text"), [(4.41e-31, "0"), (-1e-9, "0"), (0.00142, "0.00142"), (14.2, "14.2")]
)
def test_what_decayed_to_next_to_nothing_is_nothing(value: float, text: str) -> None:
    assert number(value) == text
    assert rate(value) == f"{text}/s"


def test_a_ratio_far_above_one_is_no_percentage() -> None:
    assert named("stage_3_score_ratio", 0.25) == "stage 3 score 25 %"
    assert named("stage_3_score_ratio", 1664546.34) == "stage 3 score 1.66e+06 times"
