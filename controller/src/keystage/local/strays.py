"""Stage functions that their pipeline does not have (any longer): its model was split anew into fewer stages.

Asked by `local.supervisor` whenever a function is deployed and when it starts. The router of such a pipeline
refuses their workers, so that they would be started again and again. How many stages there are stands in
the bundle's pipeline.json; of a bundle that is elsewhere, or cannot be read now, nothing is known and nothing
is refused. It must not remove anything.
"""

from __future__ import annotations

from collections.abc import Iterable

from keystage.bundle.errors import BundleError
from keystage.bundle.store import load
from keystage.local.api import Deployment, role_of
from keystage.local.errors import BadDeployment
from keystage.local.key_stages import stages_of


def check(deployment: Deployment) -> None:
    """Refuses a stage that its own bundle does not have.

    Raises:
        BadDeployment: names the stage, the bundle, and how many stages that has.
    """
    found = _beyond(deployment, _bundle_of(deployment)) if role_of(deployment) == "stage" else ""
    if found:
        raise BadDeployment(f"function {deployment.service}: {found}")


def may_leave(deployment: Deployment) -> bool:
    """Whether stages may be gone when it is deployed: routers say how many there are."""
    return role_of(deployment) == "router"


def strays(deployments: Iterable[Deployment]) -> dict[str, str]:
    """Stage functions beyond the stages of their router's bundle, or of their own, and why each is."""
    known = list(deployments)
    routers = {_pipeline_of(d): _bundle_of(d) for d in known if role_of(d) == "router" and _pipeline_of(d)}
    found = {}
    for deployment in known:
        if role_of(deployment) != "stage":
            continue
        for bundle in dict.fromkeys((routers.get(_pipeline_of(deployment), ""), _bundle_of(deployment))):
            if reason := _beyond(deployment, bundle):
                found[deployment.service] = reason
                break
    return found


def _beyond(deployment: Deployment, bundle: str) -> str:
    """Why a bundle has none of its stages, empty where it has one or cannot be asked."""
    stages = stages_of(deployment.envVars.get("KEYSTAGE_STAGES", ""))
    if not bundle.startswith("file://") or not stages:
        return ""
    try:
        count = len(load(bundle).stages)
    except BundleError:
        return ""
    if stages[-1] < count:
        return ""
    return (
        f"there is no stage {stages[-1]} of pipeline {_pipeline_of(deployment)}: {bundle} has {count} "
        f"stages, 0 to {count - 1}"
    )


def _pipeline_of(deployment: Deployment) -> str:
    return deployment.envVars.get("KEYSTAGE_PIPELINE", "")


def _bundle_of(deployment: Deployment) -> str:
    return deployment.envVars.get("KEYSTAGE_BUNDLE", "")
