"""What `keystage top` draws and what its keys do, at every size from 40 columns and 10 lines on."""

from __future__ import annotations

import pytest
from rich.text import Text
from support.reports import pipeline, report, stage

from keystage.cli import report_tables as tables
from keystage.cli.columns import Column, lines
from keystage.cli.keyboard import parsed
from keystage.cli.status import table
from keystage.cli.top_view import Seen, View, pressed, screen
from keystage.observability.api import FunctionReport, Report

MANY = report(*(pipeline(f"pipeline-{n:02}-of-a-long-name", 4) for n in range(12)))
LONG = report(pipeline(stages=tuple(stage(i, queue=float(i)) for i in range(1000))))


def _text(made: list[Text]) -> str:
    return "\n".join(line.plain for line in made)


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
@pytest.mark.parametrize("height", [10, 16, 24, 50])
@pytest.mark.parametrize(
    "told", [report(), MANY, LONG, report(pipelines=())], ids=["one", "many", "long", "none"]
)
def test_every_screen_fits(width: int, height: int, told: object) -> None:
    made, _ = screen(View(), Seen(told, error="x" * 300), width, height)  # type: ignore[arg-type]
    assert len(made) <= height
    assert max(line.cell_len for line in made) <= width
    assert made[-1].plain.startswith("q quit")


def test_at_40_columns_the_stages_are_there() -> None:
    made, _ = screen(View(), Seen(report()), 40, 24)
    rows = [line.plain.split() for line in made]
    assert next(row for row in rows if row[:1] == ["stage"])[:3] == ["stage", "replicas", "queue"]
    assert ["3", "key", "2/2", "1"] in [row[:4] for row in rows]


def test_a_wide_screen_has_functions_reasons_nodes_and_decisions() -> None:
    text = _text(screen(View(), Seen(report()), 200, 50)[0])
    for words in (
        "llm-stage-3",
        "waits within 80 ms",
        "12.0 GiB of 80.0 GiB",
        "predicted wait 310 ms > 80 ms",
    ):
        assert words in text
    assert text.index("stage 3: 2 -> 3") < text.index("key stages in order: 3")  # the newest first


def test_age_error_trouble_and_pause_are_told() -> None:
    told = report(trouble="another controller leads")
    assert "has not changed for 9 s" in _text(screen(View(), Seen(told, 9.0), 80, 24)[0])
    assert "another controller leads" in _text(screen(View(), Seen(told), 80, 24)[0])
    assert "no answer: refused" in _text(screen(View(), Seen(told, 9.0, "refused"), 80, 24)[0])
    assert "PAUSED" in _text(screen(View(is_paused=True), Seen(told, 9.0), 40, 24)[0])


def test_keys_choose_pipelines_and_stop_at_the_ends() -> None:
    view = View()
    for key, name in (("j", 1), ("down", 2), ("k", 1), ("up", 0), ("up", 0)):
        view = pressed(view, key, MANY)
        assert view.chosen == MANY.pipelines[name].pipeline
    for _ in range(30):
        view = pressed(view, "j", MANY)
    made, view = screen(view, Seen(MANY), 80, 24)
    assert view.chosen == MANY.pipelines[-1].pipeline
    assert sum(line.plain.startswith("> ") for line in made) == 1


def test_pages_go_through_the_stages_and_stop_at_the_ends() -> None:
    made, view = screen(View(), Seen(LONG), 80, 24)
    assert view.page > 4
    assert f"stages 0-{view.page - 1} of 1000" in _text(made)
    made, view = screen(pressed(view, "page-down", LONG), Seen(LONG), 80, 24)
    assert view.first == view.page
    for _ in range(1000):
        view = pressed(view, "page-down", LONG)
    assert "-999 of 1000" in _text(screen(view, Seen(LONG), 80, 24)[0])
    for _ in range(1000):
        view = pressed(view, "page-up", LONG)
    assert view.first == 0


def test_pause_end_and_unknown_keys() -> None:
    assert pressed(View(), "p", MANY).is_paused
    assert not pressed(pressed(View(), "p", MANY), " ", MANY).is_paused
    assert pressed(View(), "q", MANY).is_ended
    assert pressed(View(), "end", MANY).is_ended
    assert pressed(View(), "x", MANY) == View()
    assert pressed(View(), "j", report(pipelines=())) == View()


def test_a_pipeline_that_is_gone_gives_way_to_the_first() -> None:
    made, _ = screen(View(chosen="gone"), Seen(MANY), 80, 24)
    assert any(line.plain.startswith("> pipeline-00-o") for line in made)


@pytest.mark.parametrize(
    ("data", "found", "left"),
    [
        (b"jq", ["j", "q"], b""),
        (b"\x1b[A\x1b[B", ["up", "down"], b""),
        (b"\x1bOA\x1b[5~\x1b[6~", ["up", "page-up", "page-down"], b""),
        (b"j\x1b[", ["j"], b"\x1b["),
        (b"\x1b", [], b"\x1b"),
        (b"\x1b[1;5Cp", ["p"], b""),
        (b"\x1bq", ["q"], b""),
        (b"\x1b[" + b"1" * 14, [], b""),
    ],
)
def test_bytes_become_keys(data: bytes, found: list[str], left: bytes) -> None:
    assert parsed(data) == (found, left)


def test_columns_that_matter_less_go_first_and_names_are_cut() -> None:
    columns = (Column("name", is_text=True), Column("a", 1), Column("b", 2))
    rows = [(Text("a-name-of-twenty-one-"), Text("1"), Text("22"))]
    assert [line.plain for line in lines(columns, rows, None)] == [
        "name                   a   b",
        "a-name-of-twenty-one-  1  22",
    ]
    assert [line.plain for line in lines(columns, rows, 14)] == ["name      a  b", "a-name-o… 1 22"]
    assert [line.plain for line in lines(columns, rows, 10)] == ["name     a", "a-name-… 1"]
    assert [line.plain for line in lines(columns, rows, 8)] == ["name", "a-name-…"]


def test_bars_are_plain_where_the_terminal_is() -> None:
    longest = tables.longest_queue(LONG.pipelines[0].stages)
    row = tables.stage_row(LONG.pipelines[0].stages[999], longest, is_plain=True)
    assert row[3].plain == "#" * tables.BAR
    assert tables.stage_row(stage(0, queue=0.0), longest)[3].plain == ""
    assert tables.stage_row(stage(0, queue=None), 0.0)[3].plain == ""


def test_replicas_tell_what_comes_and_goes() -> None:
    assert tables.replicas(stage(0, desired=4, ready=2, starting=2, draining=1)) == "2/4 +2 -1"


def test_status_without_bounds_leaves_nothing_out() -> None:
    text = _text(table(report(), None, is_one=True, is_plain=True))
    assert "waits within 80 ms" in text
    assert "llm-stage-0" in text
    whole = _text(table(MANY, None, is_one=False, is_plain=True))
    assert MANY.pipelines[11].pipeline in whole
    assert "echo" in whole


def test_without_pipelines_the_functions_are_shown() -> None:
    many = tuple(FunctionReport(function=f"f{n:03}", desired=1, ready=1) for n in range(1000))
    made, _ = screen(View(), Seen(Report(controller="c", number=1, at_s=1.0, functions=many)), 80, 24)
    text = _text(made)
    assert "no pipeline is deployed" in text
    assert "f000" in text
    assert "981 more: keystage status" in text
    assert len(made) == 24


def test_one_of_a_thing_is_not_told_as_many() -> None:
    assert "1 pipeline, 2 nodes" in _text(screen(View(), Seen(report()), 80, 24)[0])
