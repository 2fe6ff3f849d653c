"""The dashboard asks for metrics that there are, by labels that they have."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.helm import CHART, named, render

from keystage.gateway.backend import FunctionState
from keystage.gateway.metrics import Metrics
from keystage.local.api import Deployment
from keystage.wire.metrics import METRICS

DASHBOARD = CHART / "dashboards" / "keystage.json"
TARGET_LABELS = {"pod", "instance", "le"}
"""Given by Prometheus, or by the form of a histogram."""


def _known() -> dict[str, set[str]]:
    """Labels of every series that Keystage exposes, by its name."""
    series: dict[str, set[str]] = {}
    for name, spec in METRICS.items():
        ends = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"], "gauge": [""]}[spec.kind]
        for end in ends:
            series[name + end] = set(spec.labels)
    metrics = Metrics()
    deployment = Deployment(service="f", image="none")
    state = FunctionState(
        deployment=deployment, created_at_s=0.0, replicas=1, ready=(), waking=False, trouble=()
    )
    metrics.begin("f")
    metrics.end("f", 200, 0.1)
    for family in text_string_to_metric_families(metrics.render([state])[0].decode()):
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


def test_ratios_divide_what_belongs_together() -> None:
    """A mean over something else than what was summed up is none."""
    pairs = {
        "keystage_stage_wait_seconds_total": "keystage_stage_waits_total",
        "keystage_stage_service_seconds_total": "keystage_stage_services_total",
        "keystage_stage_handoff_seconds_total": "keystage_stage_services_total",
        "keystage_stage_wave_wait_seconds_total": "keystage_stage_batches_total",
        "keystage_load_seconds_total": "keystage_loads_total",
        "gateway_functions_seconds_sum": "gateway_functions_seconds_count",
        "keystage_requests_in_time_total": "keystage_requests_due_total",
        "keystage_stage_kv_blocks_used": "keystage_stage_kv_blocks",
        "keystage_parameter_gives_total": "keystage_parameter_gives_total",
    }
    seen = set()
    for title, expression in _expressions():
        above, is_ratio, below = expression.partition(" / ")
        if is_ratio:
            (name,) = re.findall(r"\b(?:keystage|gateway)_[a-z_]+", above)
            assert re.findall(r"\b(?:keystage|gateway)_[a-z_]+", below) == [pairs[name]], title
            assert re.findall(r"by \([^)]*\)", above) == re.findall(r"by \([^)]*\)", below), title
            seen.add(name)
    assert seen == pairs.keys()


def test_lines_of_functions_and_replicas_are_bounded_and_chosen() -> None:
    """There may be thousands of them."""
    for title, expression in _expressions():
        groups = {
            label.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(",")
        }
        if groups & {"function_name", "replica"}:
            assert expression.startswith("topk("), title
        known = _known()
        for name, chosen in re.findall(r"\b((?:keystage|gateway)_[a-z_]+)(\{[^}]*\})?", expression):
            for label, variable in (("pipeline", "$pipeline"), ("function_name", "$function")):
                if label in known[name]:
                    assert f'{label}=~"{variable}"' in chosen, f"{title}: {name}"


def test_variables_ask_for_series_that_there_are() -> None:
    known = _known()
    found = json.loads(DASHBOARD.read_text())["templating"]["list"]
    assert [one["name"] for one in found] == ["datasource", "pipeline", "function"]
    for one in found[1:]:
        name, label = re.fullmatch(r"label_values\(([a-z_]+), ([a-z_]+)\)", one["query"]).groups()  # type: ignore[union-attr]
        assert label in known[name]


def test_every_panel_says_what_it_shows_and_in_which_unit() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        if panel["type"] != "row":
            assert panel["description"].endswith("."), panel["title"]
            assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
            references = [target["refId"] for target in panel["targets"]]
            assert len(set(references)) == len(references) > 0
            for target in panel["targets"]:
                _, *names = re.split(r"\{\{", target["legendFormat"])
                by = ",".join(re.findall(r"by \(([^)]*)\)", target["expr"]))
                assert {name.partition("}}")[0] for name in names} <= {
                    label.strip() for label in by.split(",")
                }


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
