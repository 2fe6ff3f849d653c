"""Alerts and exposed metrics as Prometheus' own promtool reads them; alerts ask for series that there are."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from support.helm import CHART, named, render

from keystage.cli.main import app
from keystage.gateway.metrics import Metrics
from keystage.wire.metric_spec import MetricSpec
from keystage.wire.metrics import METRICS, Sample, expose

RULES = CHART / "rules" / "keystage.yaml"
TIME_LINES = Path(__file__).resolve().parents[1] / "support" / "alerts" / "keystage_test.yaml"
TARGET_LABELS = {"pod", "node", "instance", "namespace"}
TIMEOUT_S = 60.0


def _promtool(*arguments: str, cwd: Path | None = None, given: bytes = b"") -> str:
    """What promtool says; the test fails where it finds fault."""
    program = shutil.which("promtool")
    if program is None:
        text = "no promtool: install Debian's prometheus"
        if os.environ.get("KEYSTAGE_REQUIRE_ALL") == "1":
            pytest.fail(text)
        pytest.skip(text)
    done = subprocess.run(
        [program, *arguments], cwd=cwd, input=given, capture_output=True, timeout=TIMEOUT_S, check=False
    )
    said = (done.stdout + done.stderr).decode()
    assert done.returncode == 0, said
    return said


def _rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def test_promtool_takes_the_rules() -> None:
    assert f"{len(_rules())} rules found" in _promtool("check", "rules", str(RULES))


def test_time_lines_raise_the_alerts_they_should_and_no_others(tmp_path: Path) -> None:
    shutil.copy(RULES, tmp_path / "keystage.yaml")
    shutil.copy(TIME_LINES, tmp_path / "keystage_test.yaml")
    assert "SUCCESS" in _promtool("test", "rules", "keystage_test.yaml", cwd=tmp_path)


@pytest.mark.parametrize("alert", [rule["alert"] for rule in _rules()])
def test_every_alert_has_a_time_line_that_raises_it_and_one_that_does_not(alert: str) -> None:
    looks = [
        look
        for line in yaml.safe_load(TIME_LINES.read_text())["tests"]
        for look in line["promql_expr_test"]
        if re.search(rf"\b{alert}\b", look["expr"])
    ]
    assert any(look["exp_samples"] for look in looks)
    assert any(not look["exp_samples"] for look in looks)


@pytest.mark.parametrize("rule", _rules(), ids=lambda rule: rule["alert"])
def test_an_alert_leads_to_a_section_of_the_documentation(rule: dict[str, Any]) -> None:
    path, _, anchor = rule["annotations"]["runbook"].partition("#")
    page = CHART.parents[1] / path
    assert anchor
    titles = re.findall(r"^#+ +(.*)$", page.read_text(), flags=re.MULTILINE)
    assert anchor in {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("rule", _rules(), ids=lambda rule: rule["alert"])
def test_commands_and_settings_that_an_alert_names_exist(rule: dict[str, Any]) -> None:
    text = rule["annotations"]["description"]
    for line in re.findall(r"`keystage ([^`]+)`", text):
        command: Any = typer.main.get_command(app)
        for word in line.split():
            if not hasattr(command, "commands"):
                options = {option for one in command.params for option in one.opts}
                assert not word.startswith("-") or word in options, line
                continue
            assert word in command.commands, line
            command = command.commands[word]
        assert not hasattr(command, "commands"), f"keystage {line} is a group"
    documented = (CHART.parents[1] / "docs" / "environment.md").read_text()
    for setting in re.findall(r"KEYSTAGE_[A-Z_]+", text):
        assert f"`{setting}`" in documented, setting
    for name in re.findall(r"\b(?:keystage)_[a-z_]+", text):
        spec = METRICS.get(name.removesuffix("_total"))
        assert spec is not None, name
        assert (spec.kind == "counter") == name.endswith("_total"), name


def test_promtool_finds_no_fault_with_any_metric() -> None:
    _promtool("check", "metrics", given=expose([_sample(name, spec) for name, spec in METRICS.items()]))


def test_promtool_finds_no_fault_with_the_gateway_but_a_name_that_openfaas_chose() -> None:
    metrics = Metrics()
    metrics.begin("f")
    metrics.end("f", 200, 0.1)
    text, _ = metrics.render([])
    kept = [line for line in text.splitlines() if b"gateway_function_invocation_started" not in line]
    _promtool("check", "metrics", given=b"\n".join(kept) + b"\n")


@pytest.mark.parametrize("rule", _rules(), ids=lambda rule: rule["alert"])
def test_an_alert_asks_for_series_that_there_are_and_says_what_to_do(rule: dict[str, Any]) -> None:
    names = re.findall(r"\b((?:keystage|gateway)_[a-z_]+)", rule["expr"])
    assert names
    for name in names:
        spec = METRICS.get(name.removesuffix("_total"))
        if name.startswith("gateway_"):
            assert name == "gateway_function_invocation_total"
        else:
            assert spec is not None, name
            assert (spec.kind == "counter") == name.endswith("_total"), name
    known = {label for name in names for label in _labels(name)} | TARGET_LABELS
    wanted = {
        label.strip()
        for group in re.findall(r"(?:by|on) \(([^)]*)\)", rule["expr"])
        for label in group.split(",")
    }
    assert wanted <= known, rule["alert"]
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert rule["annotations"]["summary"]
    assert len(rule["annotations"]["description"]) > 40


def test_the_rules_are_in_their_object_as_they_are() -> None:
    sets = ["monitoring.rules.enabled=true", "monitoring.rules.labels.release=prometheus"]
    rule = named(render(sets=sets), "PrometheusRule", "keystage")
    assert rule["spec"] == yaml.safe_load(RULES.read_text())
    assert rule["metadata"]["labels"]["release"] == "prometheus"


def _labels(name: str) -> tuple[str, ...]:
    spec = METRICS.get(name.removesuffix("_total"))
    return spec.labels if spec is not None else ("function_name", "code")


def _sample(name: str, spec: MetricSpec) -> Sample:
    counts = tuple(range(1, len(spec.bounds) + 2)) if spec.kind == "histogram" else ()
    return Sample(name, dict.fromkeys(spec.labels, "x"), 1.0, counts)
