"""The stack.yml of `keystage split` deploys as it is: same functions as `keystage up` makes, none refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from keystage.bundle.api import Pipeline, emulated
from keystage.bundle.split import bundle_emulated
from keystage.bundle.stack_yml import STACK_FILE, stack_yml
from keystage.local.api import Deployment
from keystage.local.pipeline import deployments_for
from keystage.local.program import check

TEMPLATES = Path(__file__).parents[2] / "stage-function" / "template"
FOLDER = Path("/srv/some bundles/$x/em")


def deployments(pipeline: Pipeline) -> list[Deployment]:
    """What faas-cli makes of the file: texts, whatever YAML would take them for."""
    functions = yaml.load(stack_yml(pipeline, FOLDER), Loader=yaml.BaseLoader)["functions"]
    return [
        Deployment(
            service=name,
            image=f["image"],
            envProcess=f["fprocess"],
            envVars=f["environment"],
            labels=f["labels"],
            annotations=f["annotations"],
        )
        for name, f in functions.items()
    ]


def test_no_function_is_refused_and_all_are_as_up_makes_them() -> None:
    pipeline = emulated("em", 3, execution="looping")
    told = deployments(pipeline)
    for deployment in told:
        check(deployment)
    made = deployments_for(FOLDER, pipeline, device="emulated")
    assert [d.service for d in told] == [d.service for d in made]
    for ours, theirs in zip(told, made, strict=True):
        # One thread is the default of a stage.
        assert ours.envVars == {k: v for k, v in theirs.envVars.items() if k != "KEYSTAGE_THREADS"}
        assert ours.labels == {**theirs.labels, "com.openfaas.scale.factor": "0"}


def test_faas_cli_finds_nothing_to_replace_and_needs_no_template() -> None:
    text = stack_yml(emulated("em", 2, execution="single-pass"), FOLDER)
    # It would put its environment in place of anything that begins with a dollar.
    assert "$" not in text
    for function in yaml.safe_load(text)["functions"].values():
        # Without fprocess it looks for the template's; without skip_build it builds.
        assert function["fprocess"] in ("keystage router", "keystage worker")
        assert function["skip_build"] is True
        template = yaml.safe_load((TEMPLATES / function["lang"] / "template.yml").read_text())
        assert template["fprocess"] == function["fprocess"]


def test_another_place_has_its_own_addresses_and_nothing_else_differs(tmp_path: Path) -> None:
    bundle = bundle_emulated("em", 2, "looping", 64, 128, tmp_path / "em")
    command = [sys.executable, "-m", "keystage.cli.main", "stack", str(bundle)]
    told = ["--home", "https://models.example/em/", "--registry", "registry.example/ks/", "--tag", "7"]
    own = yaml.safe_load((bundle / STACK_FILE).read_text())["functions"]
    there = yaml.safe_load(subprocess.check_output([*command, *told], text=True))["functions"]
    assert list(there) == list(own)
    for name, function in there.items():
        role = "router" if name == "em" else "stage"
        assert function["image"] == f"registry.example/ks/{role}:7"
        assert function["environment"]["KEYSTAGE_BUNDLE"] == "https://models.example/em"
        function["image"] = own[name]["image"]
        function["environment"]["KEYSTAGE_BUNDLE"] = own[name]["environment"]["KEYSTAGE_BUNDLE"]
    assert there == own


@pytest.mark.parametrize("told", [["--home", "/bundles/em"], ["--tag", "$TAG"]])
def test_what_faas_cli_or_a_pod_could_not_use_is_refused(tmp_path: Path, told: list[str]) -> None:
    bundle = bundle_emulated("em", 2, "looping", 64, 128, tmp_path / "em")
    command = [sys.executable, "-m", "keystage.cli.main", "stack", str(bundle), *told]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert told[0] in ended.stderr
    assert told[1] in ended.stderr
    assert not ended.stdout
