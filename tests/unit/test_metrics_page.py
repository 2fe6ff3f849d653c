"""Every metric is documented: the page is the registry's, and every name keeps to the rules."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from keystage.wire.metrics import METRICS
from keystage.wire.metrics_page import PARTS, page, part_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
LABELS = {
    "pipeline", "stage", "replica", "node", "reason", "found", "phase", "via", "source", "gpu",
    "function_name", "tenant",
}  # fmt: skip


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == page(), "run `make metrics`"


def test_every_metric_is_on_it_once() -> None:
    text = page()
    for name, spec in METRICS.items():
        shown = f"{name}_total" if spec.kind == "counter" else name
        assert len(re.findall(rf"^\| `{shown}` \|", text, re.MULTILINE)) == 1, name


def test_every_part_shows_some() -> None:
    assert {part_of(name) for name in METRICS} == {part for part, _, _ in PARTS}


@pytest.mark.parametrize("name", METRICS)
def test_names_and_labels_keep_to_the_rules(name: str) -> None:
    spec = METRICS[name]
    assert re.fullmatch(r"keystage_[a-z0-9]+(_[a-z0-9]+)*", name)
    assert not name.endswith(("_total", "_count", "_sum", "_bucket"))
    assert set(spec.labels) <= LABELS
    assert bool(spec.bounds) == (spec.kind == "histogram")
    assert list(spec.bounds) == sorted(set(spec.bounds))
    assert len(spec.meaning) > 10
    assert not spec.meaning.endswith(".")
