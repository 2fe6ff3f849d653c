"""Functions that people make by hand, with nonsense in them, harm nobody but themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from keystage.controller.domain.snapshot import Slo
from keystage.controller.platforms.bundles import Bundles
from keystage.controller.platforms.local_nodes import stage_name
from keystage.controller.platforms.local_view import slo_of
from keystage.kubernetes.api import COMPONENT_LABEL, FunctionStatus
from keystage.kubernetes.checks import check
from keystage.kubernetes.keysmanagers import grants_of
from keystage.kubernetes.manifests import function_labels, gpu_gib_of
from keystage.kubernetes.view import status_of_object
from keystage.local.api import Deployment, FunctionRecord
from keystage.local.key_stages import stages_of

HUGE = "9" * 5000


def stage(**env: str) -> Deployment:
    variables = {"KEYSTAGE_ROLE": "stage", "KEYSTAGE_PIPELINE": "p", "KEYSTAGE_BUNDLE": "b", **env}
    return Deployment(service="s", image="i", envVars=variables)


def record(deployment: Deployment) -> FunctionRecord:
    return FunctionRecord(deployment=deployment, created_at_s=0.0)


@pytest.mark.parametrize("text", [HUGE, f"0-{HUGE}", "0-99999999999", f"{HUGE}-1", "a", "1-b", ""])
def test_stages_that_nothing_has_are_none(text: str) -> None:
    assert not stages_of(text)
    pod: dict[str, Any] = {
        "metadata": {"uid": "u", "labels": {"keystage.dev/function": "s", "keystage.dev/role": "stage"}},
        "spec": {"nodeName": "n"},
    }
    assert grants_of("n", [pod], [stage(KEYSTAGE_STAGES=text)]) == []
    assert stage_name(record(stage(KEYSTAGE_STAGES=HUGE))) is None


@pytest.mark.parametrize("url", ["http://[", "https://[::1", "file:///a%00b", "file://[", "nonsense"])
def test_a_bundle_without_an_address_is_not_known(tmp_path: Path, url: str) -> None:
    assert Bundles(tmp_path).read([url]) == ({}, {})


def test_sizes_that_no_machine_has_are_not_said() -> None:
    deployment = stage(KEYSTAGE_DEVICE="cuda", KEYSTAGE_KV_BYTES=HUGE)
    assert gpu_gib_of(deployment, 0) <= 2
    labelled = Deployment(
        service="s", image="i", envVars=deployment.envVars, labels={"keystage.gpu_gib": HUGE}
    )
    assert gpu_gib_of(labelled, 0) <= 2


def test_an_objective_that_is_nested_without_end_is_none() -> None:
    text = '{"x":' + "[" * 5000 + "]" * 5000 + "}"
    assert slo_of(record(stage(KEYSTAGE_SLO=text))) == Slo()


@pytest.mark.parametrize(
    "status", [{"cores": 1e306}, {"desired": 2_000_000_000}, {"desired": -1}, {"ready": "x"}, {"cores": -1}]
)
def test_a_status_that_the_controller_did_not_write_says_nothing(status: dict[str, Any]) -> None:
    assert status_of_object({"status": status}) == FunctionStatus()
    assert status_of_object({"status": {"desired": 1000, "cores": 2.5}}).cores == 2.5


def test_no_function_passes_for_one_of_keystages_own_parts() -> None:
    deployment = Deployment(service="f", image="i", labels={COMPONENT_LABEL: "gateway", "team": "a"})
    assert COMPONENT_LABEL not in function_labels(deployment, "t")
    assert function_labels(deployment, "t")["team"] == "a"
    with pytest.raises(ValueError, match="its gateways are found by it"):
        check(deployment)
