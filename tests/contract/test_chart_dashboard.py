"""The dashboard asks for metrics that there are, by labels that they have."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.helm import CHART, named, render

from keystage.gateway.metrics import Metrics
from keystage.wire.metrics import METRICS

DASHBOARD = CHART / "dashboards" / "keystage.json"
TARGET_LABELS = {"pod", "le"}
"""Given by Prometheus, or by the form of a histogram."""


def _known() -> dict[str, set[str]]:
    """Labels of every series that Keystage exposes, by its name."""
    series: dict[str, set[str]] = {}
    for name, spec in METRICS.items():
        ends = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"], "gauge": [""]}[spec.kind]
        for end in ends:
            series[name + end] = set(spec.labels)
    metrics = Metrics()
    metrics.begin("f")
    metrics.end("f", 200, 0.1)
    for family in text_string_to_metric_families(metrics.render([])[0].decode()):
        for sample in family.samples:
            series[sample.name] = set(sample.labels) - {"le"}
    return series


def _expressions() -> Iterator[tuple[str, str]]:
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]


@pytest.mark.parametrize(("title", "expression"), list(_expressions()))
def test_metrics_and_labels_exist(title: str, expression: str) -> None:
    known = _known()
    names = re.findall(r"\b(?:keystage|gateway)_[a-z_]+", expression)
    assert names, title
    labels = {
        label.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(",")
    } | set(re.findall(r"\b([a-z_]+)=~?\"", expression))
    for name in names:
        assert name in known, f"{title}: {name}"
        assert labels <= known[name] | TARGET_LABELS, (
            f"{title}: {name} has {known[name]}, not all of {labels}"
        )


def test_rates_are_of_counters_and_nothing_else() -> None:
    for title, expression in _expressions():
        for name in re.findall(r"(?:rate|increase)\(([a-z_]+)", expression):
            assert name.endswith(("_total", "_bucket", "_sum", "_count")), f"{title}: {name}"


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_it_is_in_its_config_map_as_it_is() -> None:
    config_map = named(render(sets=["monitoring.dashboard.enabled=true"]), "ConfigMap", "keystage-dashboard")
    assert json.loads(config_map["data"]["keystage.json"]) == json.loads(DASHBOARD.read_text())
    assert config_map["metadata"]["labels"]["grafana_dashboard"] == "1"
