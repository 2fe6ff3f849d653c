"""What Keystage can and cannot do behind an OpenFaaS gateway that is not its own. Pure.

Before it: what the gateway says of itself and of its functions. A stock gateway states one number of
replicas per function and nothing else, so everything that needs a say in single pods is out of reach there.
"""

from __future__ import annotations

from collections.abc import Sequence

from keystage.cli.doctor_report import Check, Level
from keystage.local.api import Deployment, role_of
from keystage.openfaas.findings import Finding, Present, check
from keystage.openfaas.provider import Limits
from keystage.openfaas.types import FunctionStatus

AREA = "openfaas"
_OWN = "use Keystage's own gateway for that (chart value openfaas.gateway empty)"
_LEVELS: dict[str, Level] = {"refused": "fail", "dropped": "fail", "notice": "warn"}


def checks(taken: Limits, functions: Sequence[FunctionStatus]) -> list[Check]:
    """What is lost, and what the functions that are deployed there run into.

    Args:
        taken: what the gateway takes.
        functions: deployed there now.
    """
    deployed = [_deployment(function) for function in functions]
    ours = [d for d in deployed if role_of(d) in ("router", "stage")]
    present = Present(frozenset(function.name for function in functions))
    return [
        _scaling(taken),
        _placement(taken),
        _resize(taken),
        _parked(taken),
        *(_of(finding) for finding in check(ours, taken, present)),
    ]


def _scaling(taken: Limits) -> Check:
    most = "any number" if taken.most is None else str(taken.most)
    return Check(
        area=AREA,
        level="ok" if taken.most is None else "warn" if taken.has_scaling else "fail",
        thing="scaling of stages",
        bound="any number of replicas",
        actual=f"{taken.name}: {taken.least} to {most}",
        advice=""
        if taken.most is None
        else "a key stage gets no more, however long its queue"
        if taken.has_scaling
        else "nothing is scaled there",
    )


def _placement(taken: Limits) -> Check:
    return Check(
        area=AREA,
        level="warn",
        thing="placement",
        bound="a node for each replica, and the victim by name",
        actual="POST /system/scale-function states a number"
        + (", constraints hold for all replicas of a function" if taken.has_constraints else ""),
        advice="kube-scheduler places replicas and the Deployment chooses victims: key stages are not "
        f"spread, nodes with their parameters are not preferred; {_OWN}",
    )


def _resize(taken: Limits) -> Check:
    return Check(
        area=AREA,
        level="warn",
        thing="in-place resize",
        bound="new CPU for a running replica",
        actual=f"{taken.name} changes resources by replacing pods",
        advice=f"the CPU compensator stays off, replicas are added instead; {_OWN}",
    )


def _parked(taken: Limits) -> Check:
    return Check(
        area=AREA,
        level="warn",
        thing="parked pods",
        bound="pods without a function, with a folder of their node",
        actual=f"{taken.name} makes pods of functions only, without volumes",
        advice="a new replica is a new pod that loads its parameters itself, and no KeysManager can help it; "
        + _OWN,
    )


def _of(finding: Finding) -> Check:
    where = f"function {finding.function}: " if finding.function else ""
    return Check(
        area=AREA,
        level=_LEVELS[finding.effect],
        thing=f"{where}{finding.limit}",
        bound=finding.bound,
        actual=f"{finding.actual} ({finding.effect})",
        advice=finding.why,
    )


def _deployment(status: FunctionStatus) -> Deployment:
    return Deployment(
        service=status.name,
        image=status.image,
        namespace=status.namespace,
        envProcess=status.envProcess,
        envVars=status.envVars,
        constraints=status.constraints,
        secrets=status.secrets,
        labels=status.labels,
        annotations=status.annotations,
        limits=status.limits,
        requests=status.requests,
        readOnlyRootFilesystem=status.readOnlyRootFilesystem,
    )
