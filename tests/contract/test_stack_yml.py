"""The stack.yml of `keystage split` deploys as it is: same functions as `keystage up` makes, none refused."""

from __future__ import annotations

from pathlib import Path

import yaml

from keystage.bundle.api import Pipeline, emulated
from keystage.bundle.stack_yml import stack_yml
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
