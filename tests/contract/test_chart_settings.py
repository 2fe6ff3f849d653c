"""What the chart writes into the environment is what the programs read there, and is documented."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic_settings import BaseSettings
from support.helm import CHART, ROOT, Object, of_kind, render

from keystage.controller.config import ControllerSettings
from keystage.gateway.config import GatewaySettings
from keystage.keysmanager.config import KeysManagerConfig
from keystage.keysmanager.device_plugin_config import DevicePluginConfig
from keystage.kubernetes.manifests import Bundles

CASES = sorted((CHART / "ci").glob("*-values.yaml"))
READERS: dict[str, type[BaseSettings]] = {
    "gateway": GatewaySettings,
    "controller": ControllerSettings,
    "keysmanager": KeysManagerConfig,
    "device-plugin": DevicePluginConfig,
}
FIELDS = {"metadata.namespace": "keystage", "spec.nodeName": "node1"}
"""What the kubelet would put there."""


def environments(objects: list[Object]) -> Iterator[tuple[str, dict[str, str]]]:
    """(container, environment) of all Keystage programs that the chart starts."""
    for one in of_kind(objects, "Deployment", "DaemonSet"):
        for container in one["spec"]["template"]["spec"]["containers"]:
            yield container["name"], {e["name"]: _value(e) for e in container["env"]}


def _value(entry: Any) -> str:
    if "value" in entry:
        return str(entry["value"])
    source = entry["valueFrom"]
    if "fieldRef" in source:
        return FIELDS[source["fieldRef"]["fieldPath"]]
    return "redis://redis:6379/0"


@pytest.fixture(params=[None, *CASES], ids=["defaults", *(c.stem for c in CASES)], scope="module")
def rendered(request: pytest.FixtureRequest) -> list[tuple[str, dict[str, str]]]:
    """As `environments`, with the chart's defaults and with every file of `ci/`."""
    return list(environments(render(values=[request.param] if request.param else [])))


def _read(monkeypatch: pytest.MonkeyPatch, name: str, env: dict[str, str]) -> Any:
    with monkeypatch.context() as patched:
        for key, value in env.items():
            patched.setenv(key, value)
        return READERS[name]()


def test_each_program_takes_its_environment(
    rendered: list[tuple[str, dict[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rendered
    for name, env in rendered:
        _read(monkeypatch, name, env)
        fields = set(READERS[name].model_fields)
        unknown = {
            key
            for key in env
            if key.startswith("KEYSTAGE_") and key.removeprefix("KEYSTAGE_").lower() not in fields
        }
        assert not unknown, f"{name} does not read {unknown}"


def test_what_the_chart_sets_is_documented(rendered: list[tuple[str, dict[str, str]]]) -> None:
    text = (ROOT / "docs" / "environment.md").read_text()
    for name, env in rendered:
        for key in env:
            if key.startswith("KEYSTAGE_"):
                assert re.search(rf"`{key}`", text), f"{name}: {key} is not in docs/environment.md"


def test_values_reach_the_pods_that_the_controller_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    def pods(case: str) -> Any:
        env = dict(environments(render(values=[CHART / "ci" / case])))["controller"]
        return _read(monkeypatch, "controller", env)

    everything = pods("everything-values.yaml")
    made = everything.pod_settings()
    assert made.namespace == "keystage"
    assert made.function_namespace == "models"
    assert made.bundles == Bundles(host_path="/srv/bundles", claim="", mount_path="/bundles")
    assert made.image_pull_policy == "Always"
    assert made.image_pull_secrets == ("registry",)
    assert made.wire_plain
    assert made.has_keysmanager
    assert made.parked_per_pipeline == 4
    assert made.cluster_domain == "cluster.local"
    assert dict(made.requests) == {"cpu": "100m", "memory": "256Mi"}
    assert made.timeout_s == 1200
    assert made.gpu_runtime_class == "nvidia"
    assert (made.redis_secret, made.redis_key) == ("journal", "address")
    assert everything.policy_settings().hold_s == 16
    assert everything.budget_replicas == 24
    one = pods("one-namespace-values.yaml").pod_settings()
    assert one.namespace == one.function_namespace == "keystage"
    assert one.bundles.claim == "bundles"
    assert not one.has_keysmanager
    steering = pods("openfaas-values.yaml")
    assert steering.backend == "local"
    assert steering.gateway == "http://gateway.openfaas:8080"
    assert steering.gateway_password_file == Path("/var/secrets/basic-auth-password")
    assert steering.gateway_namespace == "openfaas-fn"
