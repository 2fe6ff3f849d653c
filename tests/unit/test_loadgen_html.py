"""The page of a report: whole, without scripts, and deaf to what servers say."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.load_reports import assembled, rows

from keystage.loadgen import html
from keystage.loadgen.report import Watching
from keystage.loadgen.sender import Row
from keystage.loadgen.series import StageSample, StageSeries
from keystage.loadgen.sheets import printable, sheets
from keystage.loadgen.starts import ReplicaStart

_VOID = {"meta", "path", "rect"}


class Page(HTMLParser):
    """Elements in order, with attributes, and the text; an element that is not closed is an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def tags(self) -> list[str]:
        return [tag for tag, _ in self.elements]


def full_page() -> str:
    series = StageSeries()
    for k in range(10):
        for stage in range(2):
            series.samples.append(StageSample(float(k), stage, k, 1, 1 + k // 5, 0, None, k / 10, None, None))
    start = ReplicaStart("a", "f", "holder", "memory", "", 0.5, 0.1, 0.1, 0.2, 0.25, 0.375)
    made = assembled(
        rows(1, 300, failed_ratio=0.1),
        series=series,
        watching=Watching(10, 1, ""),
        starts=[start],
        unloaded=rows(2, 12),
        notes=["a note <b>"],
    )
    return html.page(made)


def test_it_has_every_table_and_plot() -> None:
    page = Page(full_page())
    text = " ".join(page.texts)
    for said in (
        "Overview",
        "Latency",
        "SLO",
        "Stages",
        "Replicas started",
        "Failures",
        "a note <b>",
        "p99.9",
    ):
        assert said in text
    assert page.tags.count("svg") == page.tags.count("figure") == 10
    assert page.tags.count("desc") == page.tags.count("svg"), "every plot is told in words"


def test_it_needs_nothing_and_runs_nothing() -> None:
    text = full_page()
    page = Page(text)
    assert not {"script", "img", "link", "iframe", "object", "a", "form"} & set(page.tags)
    for _, attributes in page.elements:
        assert not [name for name in attributes if name.startswith("on") or name in ("src", "href")]
    assert "url(" not in text
    assert "@import" not in text
    policy = next(a for tag, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert str(policy["content"]).startswith("default-src 'none'")


def test_headers_have_a_scope_and_ids_are_unique() -> None:
    page = Page(full_page())
    scopes = [attributes.get("scope") for tag, attributes in page.elements if tag == "th"]
    assert scopes
    assert set(scopes) == {"row", "col"}
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    labels = [str(a["aria-labelledby"]).split() for tag, a in page.elements if tag == "svg"]
    assert all(name in ids for names in labels for name in names)


def test_light_and_dark() -> None:
    style = re.search(r"<style>(.*?)</style>", full_page(), re.DOTALL)
    assert style is not None
    light, _, dark = style[1].partition("@media(prefers-color-scheme:dark)")
    names = set(re.findall(r"(--[\w]+):", light))
    assert names == set(re.findall(r"(--[\w]+):", dark.partition("}}")[0]))
    assert set(re.findall(r"var\((--[\w]+)\)", style[1])) <= names


@pytest.mark.slow
@given(error=st.text(min_size=1, max_size=60))
def test_whatever_a_server_says_is_text(error: str) -> None:
    def page(told: str) -> Page:
        failed = Row(0, 0.0, 0.0, None, 0.1, 500, error=told)
        return Page(html.page(assembled([failed, Row(1, 1.0, 1.0, 1.1, 1.2, 200, 1, 2)])))

    said = page(f"http_500: {error}")
    assert said.tags == page("http_500: no").tags
    assert printable(f"http_500: {error}") in said.texts


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\nb\tc", "a b c"),
        ("\x1b[31mred\x1b[0m", "\ufffd[31mred\ufffd[0m"),
        ("\u202egnp.exe\x00", "\ufffdgnp.exe\ufffd"),
        ("\u00fcber \u4e2d\u6587", "\u00fcber \u4e2d\u6587"),
        ("x" * 501, "x" * 499 + "\u2026"),
    ],
)
def test_printable(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_every_text_of_a_server_in_the_sheets_is_printable() -> None:
    failed = Row(0, 0.0, 0.0, None, 0.1, 500, error="\x1b]0;http\x07: \x1b[2J")
    cells = [cell for sheet in sheets(assembled([failed])) for row in sheet.rows for cell in row]
    assert not [cell for cell in cells if "\x1b" in cell or "\x07" in cell]


def test_nothing_served_and_nothing_sent_still_make_a_page() -> None:
    lost = Row(0, 0.0, 0.0, None, 0.5, 0, error="connect: refused")
    assert "Requests sent" in " ".join(Page(html.page(assembled([lost]))).texts)
    assert "svg" not in Page(html.page(assembled([]))).tags


def test_an_invalid_run_says_so_first() -> None:
    text = html.page(assembled(rows(1, 200, lag_s=0.2)))
    assert text.index("Not valid.") < text.index("Overview")
