"""A function's status as the controller writes it: what is wanted, what there is, what is wrong. Pure.

Before it: the reconciler's functions and pods. After it: `status` of the custom resource, which gateways,
`kubectl get functions` and the next leader read. It must not talk to the cluster.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from keystage.kubernetes.api import FunctionStatus
from keystage.kubernetes.manifests import selector_text
from keystage.kubernetes.view import MAX_TROUBLE, state_of, trouble_of

Object = Mapping[str, Any]


def status_of(
    obj: Object,
    *,
    desired: int | None,
    cores: float | None,
    template: str,
    pods: Iterable[Object],
    lost: Collection[str] = (),
    trouble: Sequence[str] = (),
) -> FunctionStatus:
    """Status of one function.

    Args:
        obj: its custom resource.
        desired: replicas wanted, None: nobody decided yet.
        cores: of each replica, None: as deployed.
        template: hash of its pods' present template.
        pods: its pods, leaving ones too.
        lost: names of nodes that are not heard from.
        trouble: what pods do not say themselves.
    """
    mine = [pod for pod in pods if pod.get("spec", {}).get("nodeName", "") not in lost]
    states = [state_of(pod) for pod in mine]
    ready = states.count("ready")
    words = (*trouble, *trouble_of(mine))
    return FunctionStatus(
        desired=desired,
        replicas=ready + states.count("starting"),
        ready=ready,
        cores=cores,
        selector=selector_text(obj["metadata"]["name"]),
        template=template,
        trouble=list(dict.fromkeys(words))[:MAX_TROUBLE],
        observedGeneration=obj["metadata"].get("generation", 0),
    )


def status_patch(status: FunctionStatus) -> dict[str, Any]:
    """Merge patch of the status subresource; what is not said any longer is removed."""
    fields: dict[str, Any] = msgspec.to_builtins(status)
    whole: dict[str, Any] = {name: fields.get(name) for name in status.__struct_fields__}
    counts = ("replicas", "ready", "observedGeneration")
    whole |= {name: getattr(status, name) for name in counts}
    return {"status": whole}


def is_urgent(before: FunctionStatus, after: FunctionStatus) -> bool:
    """Whether a change is more than of words about trouble."""
    return msgspec.structs.replace(before, trouble=[]) != msgspec.structs.replace(after, trouble=[])
