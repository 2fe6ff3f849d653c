"""Which replicas of a stage go when there are too many.

Before it: a plan with fewer replicas than run. After it: `SetReplicas.victims`. Starting ones go first
(they carry nothing), then those whose going helps most:
    key stages    where the divergence falls most, ties where a new one would start fastest;
    other stages  from nodes that host key stages (most where their reserve has no room), then from the
                  emptiest nodes, so that what stays is packed tightly.
Among equals the idlest goes first where batches are deferred (`policy.advice` names them), then the youngest.
Whoever keeps parameters in host memory keeps them: nodes stay useful.
"""

from __future__ import annotations

from keystage.controller.domain.snapshot import Placed
from keystage.controller.maths import divergence
from keystage.controller.policy.placement_cost import HOST, TRADE_S, Want, start_s
from keystage.controller.policy.placement_index import NodeIndex


def victims(
    want: Want, index: NodeIndex, placed: tuple[Placed, ...], surplus: int, idlest: tuple[str, ...] = ()
) -> tuple[str, ...]:
    """Names of replicas that go, first to last; at most `surplus`.

    Args:
        want: the stage.
        index: the nodes.
        placed: its replicas.
        surplus: how many are too many.
        idlest: names of replicas, the idlest first; empty where nobody tells.
    """
    busy = {name: place for place, name in enumerate(idlest)}
    starting = [p.replica for p in reversed(placed) if not p.is_ready][:surplus]
    ready = [(p.replica, index.number.get(p.node, -1)) for p in reversed(placed) if p.is_ready]
    going: dict[int, int] = {}
    named = list(starting)
    while ready and len(named) < surplus:
        best = max(ready, key=lambda r: (_relief(want, index, r[1], going.get(r[1], 0)), -busy.get(r[0], 0)))
        ready.remove(best)
        named.append(best[0])
        going[best[1]] = going.get(best[1], 0) + 1
    return tuple(named)


def _relief(want: Want, index: NodeIndex, j: int, gone: int) -> float:
    """What it is worth, in nats, that one more replica leaves a node that `gone` leave already."""
    if j < 0:  # on a node that is not seen any more
        return 1e6
    if want.is_key:
        units = want.key_units
        share = len(index.gpus[j]) / max(1, index.total_gpus) if want.gpus else 1 / len(index.nodes)
        left = (index.key_gpus if want.gpus else index.key_cpu)[j] - (gone + 1) * units
        return divergence.marginal(max(0, left), units, share) - 1e-3 * start_s(want, index, j) / TRADE_S
    hosts = bool(index.key_gpus[j] or index.key_cpu[j])
    is_short = index.reserved[j] > index.free[j] + gone * want.gpus
    total = len(index.gpus[j])
    emptiness = (index.free[j] + gone * want.gpus) / total if want.gpus and total else 0.0
    return HOST * (hosts + is_short) + emptiness
