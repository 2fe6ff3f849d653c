"""Who answers as an OpenFaaS gateway, and what it takes. Pure.

Before it: GET /system/info. After it: `openfaas.findings` (before a deployment) and the controller's
platform (bounds of replica numbers). The limits are those read in the sources of faas 0.27.14, faas-netes
0.18.17 and faasd; docs/openfaas.md lists where each comes from.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, assert_never

from keystage.local.labels import TARGET, TYPE, ZERO_DURATION
from keystage.openfaas.types import GatewayInfo

Kind = Literal["keystage", "openfaas-ce", "openfaas-pro", "faasd", "unknown"]

PRO_LABELS = (ZERO_DURATION, TARGET, TYPE)
"""Refused by the community edition, whatever their value."""


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """What a gateway takes.

    Attributes:
        name: the gateway's kind in words.
        least: fewest replicas that can be stated.
        most: most replicas of a function, None for no bound.
        functions: most functions in all, None for no bound.
        namespace: the only namespace, empty where there may be several.
        has_gpu: whether a GPU that is asked for is given.
        has_constraints: whether node constraints are kept.
        has_pro_labels: whether scale to zero and targets by label are taken.
        has_private_images: whether images may need credentials.
        has_free_annotations: whether any annotation is taken.
        has_scaling: whether a function can have another number of replicas than one.
        is_steered: whether a controller of its own already sets replica numbers from our counters.
        answer_s: longest answer by default, seconds; None where it does not cut answers.
        streams_by_accept: whether an answer is streamed only if the request's Accept header says so.
    """

    name: str
    least: int = 0
    most: int | None = None
    functions: int | None = None
    namespace: str = ""
    has_gpu: bool = True
    has_constraints: bool = True
    has_pro_labels: bool = True
    has_private_images: bool = True
    has_free_annotations: bool = True
    has_scaling: bool = True
    is_steered: bool = False
    answer_s: float | None = 60.0
    streams_by_accept: bool = True

    def bounded(self, replicas: int) -> int:
        """The nearest number that can be stated."""
        return max(self.least, replicas if self.most is None else min(self.most, replicas))


def kind_of(info: GatewayInfo) -> Kind:
    """Recognises a gateway by what it says of its provider.

    The community edition calls its provider `faas-netes-ce`. Another faas-netes, or the operator, is a
    licensed one (or one from before 2024, whose limits were fewer still).
    """
    provider, orchestration = info.provider.provider.lower(), info.provider.orchestration.lower()
    if provider.startswith("keystage"):
        return "keystage"
    if provider == "faas-netes-ce":
        return "openfaas-ce"
    if provider.startswith("faasd") or orchestration == "containerd":
        return "faasd"
    if provider.startswith(("faas-netes", "openfaas")) and orchestration == "kubernetes":
        return "openfaas-pro"
    return "unknown"


def limits(kind: Kind) -> Limits:
    """What a gateway of this kind takes; of an unknown one nothing is assumed."""
    match kind:
        case "keystage":
            return Limits(
                name="Keystage",
                namespace="openfaas-fn",
                is_steered=True,
                answer_s=None,
                streams_by_accept=False,
            )
        case "openfaas-ce":
            return Limits(
                name="OpenFaaS Community Edition",
                least=1,
                most=5,
                functions=15,
                namespace="openfaas-fn",
                has_gpu=False,
                has_constraints=False,
                has_pro_labels=False,
                has_private_images=False,
                has_free_annotations=False,
            )
        case "openfaas-pro":
            return Limits(name="OpenFaaS Pro (or older)")
        case "faasd":
            return Limits(
                name="faasd",
                least=1,
                most=1,
                functions=15,
                namespace="openfaas-fn",
                has_gpu=False,
                has_constraints=False,
                has_pro_labels=False,
                has_scaling=False,
            )
        case "unknown":
            return Limits(name="an unknown provider")
    assert_never(kind)
