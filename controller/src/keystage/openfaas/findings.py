"""What a gateway will not do for these functions, told before anything is deployed. Pure.

Before it: the deployments (a stack file) and what the gateway told of itself. After it: people, through
`keystage check-gateway`. Each finding names the function, the limit, the bound and the actual value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal

from keystage.local.api import Deployment, role_of
from keystage.local.labels import MAX, MIN, ZERO, whole
from keystage.openfaas.advice import advice
from keystage.openfaas.provider import PRO_LABELS, Limits

Effect = Literal["refused", "dropped", "notice"]
"""`refused`: the deployment is answered with an error. `dropped`: it succeeds and does not do what was
asked. `notice`: it depends on what cannot be seen from here."""

CE_ANNOTATIONS = ("amazonaws.com", "gke.io")


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One thing a gateway will not do.

    Attributes:
        function: function name, empty where it is about all of them.
        limit: what is limited.
        bound: what the gateway takes.
        actual: what was asked.
        effect: see `Effect`.
        why: the consequence, and what can be done.
    """

    function: str
    limit: str
    bound: str
    actual: str
    effect: Effect
    why: str

    @property
    def bites(self) -> bool:
        """Whether something that was asked for certainly does not happen."""
        return self.effect != "notice"

    def __str__(self) -> str:
        where = f"function {self.function}: " if self.function else ""
        return f"{self.effect}: {where}{self.limit}: bound {self.bound}, asked {self.actual}: {self.why}"


@dataclasses.dataclass(frozen=True, slots=True)
class Present:
    """What a gateway has already.

    Attributes:
        functions: names of deployed functions.
        secrets: names of secrets, None where they could not be listed.
    """

    functions: frozenset[str] = frozenset()
    secrets: frozenset[str] | None = None


def check(deployments: Sequence[Deployment], limits: Limits, present: Present) -> list[Finding]:
    """Everything in which a gateway falls short of these deployments, the most certain first.

    Args:
        deployments: what shall be deployed.
        limits: see `provider.limits`.
        present: what the gateway has already.
    """
    found = [*_number(deployments, limits, present)]
    for deployment in deployments:
        found += _replicas(deployment, limits)
        found += _labels(deployment, limits)
        found += _resources(deployment, limits)
        found += _placing(deployment, limits)
        found += _secrets(deployment, present)
        found += [Finding(deployment.service, *fields) for fields in advice(deployment, limits)]
    order: dict[Effect, int] = {"refused": 0, "dropped": 1, "notice": 2}
    return sorted(found, key=lambda finding: order[finding.effect])


def _number(deployments: Sequence[Deployment], limits: Limits, present: Present) -> Iterator[Finding]:
    most = limits.functions
    together = present.functions | {d.service for d in deployments}
    if most is None or len(together) <= most:
        return
    beyond = sorted(together - present.functions)[max(0, most - len(present.functions)) :]
    yield Finding(
        "",
        "functions in all",
        str(most),
        f"{len(together)} ({len(present.functions)} deployed already)",
        "refused",
        f"{limits.name} refuses the {most + 1}th and later ones, in the order they are deployed"
        + (f": the last {len(beyond)} of these would fail" if beyond else ""),
    )


def _replicas(deployment: Deployment, limits: Limits) -> Iterator[Finding]:
    if limits.most is None:
        return
    for label in (MIN, MAX):
        asked = whole(deployment.labels.get(label, ""))
        if asked is None or asked <= limits.most:
            continue
        effect: Effect = "refused" if limits.has_scaling else "dropped"
        why = (
            "the deployment fails" if limits.has_scaling else "there is one replica, whatever the labels say"
        )
        yield Finding(deployment.service, f"label {label}", str(limits.most), str(asked), effect, why)
    if limits.has_scaling and MAX not in deployment.labels and _is_stage(deployment):
        why = f"this stage never has more than {limits.most} replicas, however long its queue"
        yield Finding(
            deployment.service, "replicas", f"{limits.least} to {limits.most}", "no bound", "notice", why
        )


def _labels(deployment: Deployment, limits: Limits) -> Iterator[Finding]:
    labels = deployment.labels
    if limits.has_pro_labels:
        return
    effect: Effect = "refused" if limits.has_scaling else "dropped"
    if labels.get(ZERO, "").lower() == "true":
        yield Finding(
            deployment.service,
            f"label {ZERO}",
            "at least one replica",
            "true",
            effect,
            f"{limits.name} does not scale to zero: leave the label out",
        )
    elif whole(labels.get(MIN, "")) == 0:
        yield Finding(
            deployment.service, f"label {MIN}", "1", "0", "dropped", "at least one replica always runs"
        )
    for label in PRO_LABELS:
        if label in labels:
            yield Finding(
                deployment.service,
                f"label {label}",
                "not available",
                labels[label],
                effect,
                "leave it out; stages are sized by Keystage's controller anyway",
            )


def _resources(deployment: Deployment, limits: Limits) -> Iterator[Finding]:
    if limits.has_gpu:
        return
    for kind, amounts in (("limits", deployment.limits), ("requests", deployment.requests)):
        for name, amount in sorted((amounts or {}).items()):
            if name not in ("cpu", "memory"):
                yield Finding(
                    deployment.service,
                    f"{kind} {name}",
                    "cpu and memory only",
                    amount,
                    "dropped",
                    f"{limits.name} deploys it without the GPU and says nothing",
                )
    device = deployment.envVars.get("KEYSTAGE_DEVICE", "")
    if device.split(":", 1)[0] == "cuda":
        yield Finding(
            deployment.service,
            "KEYSTAGE_DEVICE",
            "no GPU in any container",
            device,
            "dropped",
            "the worker finds no GPU and ends; use Keystage's own gateway, or KEYSTAGE_DEVICE=cpu",
        )


def _placing(deployment: Deployment, limits: Limits) -> Iterator[Finding]:
    name = deployment.service
    if deployment.constraints and not limits.has_constraints:
        asked = ", ".join(deployment.constraints)
        yield Finding(name, "constraints", "ignored", asked, "dropped", "replicas run on any node")
    if limits.namespace and deployment.namespace not in ("", limits.namespace):
        yield Finding(
            name, "namespace", limits.namespace, deployment.namespace, "refused", "there is no other one"
        )
    if not limits.has_private_images and not deployment.image:
        yield Finding(name, "image", "required", "none", "refused", "it is pulled from a registry")
    if limits.has_free_annotations:
        return
    for annotation, value in sorted(deployment.annotations.items()):
        if any(part in annotation for part in CE_ANNOTATIONS):
            yield Finding(
                name,
                f"annotation {annotation}",
                "none of " + " or ".join(CE_ANNOTATIONS),
                value,
                "refused",
                "leave it out",
            )
        elif annotation == "topic" and "," in value:
            yield Finding(name, "annotation topic", "one topic", value, "refused", "name one topic only")


def _secrets(deployment: Deployment, present: Present) -> Iterator[Finding]:
    if present.secrets is None:
        return
    for secret in deployment.secrets:
        if secret not in present.secrets:
            why = f"make it first: faas-cli secret create {secret}"
            yield Finding(deployment.service, f"secret {secret}", "must exist", "absent", "refused", why)


def _is_stage(deployment: Deployment) -> bool:
    return role_of(deployment) == "stage"
