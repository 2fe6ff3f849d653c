"""Where replicas go: key stages apart, the others packed (QUART section 6.2, corrected).

Before it: final numbers. After it: `SetReplicas` carries sites and victims. Only stages whose number
changes are placed; nothing that runs is moved.

Regime `spare` while there are GPUs to spare: key stages go to the nodes with most free GPUs, others are
packed tightly. Regime `contended`: key stages are added one at a time where sum_j n_j log(n_j / q_j)
grows least. What start times, memory and neighbours count against that is in `placement_cost`.
The test: (held + asked + one more replica of each key stage) / all GPUs; contended from CONTENDED_RATIO,
spare again below SPARE_RATIO. The paper's "key stages cannot fully occupy an entire machine" names no figure.

Greedy is exact for one stage; several stages wish for the same GPU, so where a key stage is new or the
divergence exceeds the best possible by THRESHOLD the places chosen this tick are looked at again, each
moved where it would cost less; LOOKS places at most, the key stages' first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from keystage.controller.domain.decision import PlacementReport, Site
from keystage.controller.domain.snapshot import Snapshot
from keystage.controller.domain.state import PolicyState
from keystage.controller.policy.placement_cost import Want, place_cost, want_of
from keystage.controller.policy.placement_ground import Ground, Member, Orders, key_stages, members
from keystage.controller.policy.placement_search import Place, Search
from keystage.controller.policy.placement_victims import victims
from keystage.controller.policy.plan import Plan
from keystage.controller.policy.settings import PolicySettings

CONTENDED_RATIO = 0.75
SPARE_RATIO = 0.65
"""A node of four GPUs has one free at the first; the gap keeps single replicas from switching it often."""

THRESHOLD = 0.25
"""Nats above the least divergence; two of three key replicas on one of many nodes are 0.46 above."""

LOOKS = 64

MOST_NAMED = 8
"""Functions without room that the report names."""


KEPT = 2
"""Clusters kept from call to call, the least recently decided about goes first."""

_kept: list[Ground] = []
"""Grounds of earlier calls: reading a large cluster anew takes longer than a tick may.

They change the time an answer takes, never the answer. A call takes its ground out and puts it back when
all is given back, so one that fails leaves nothing half done, and calls at the same time share nothing.
"""


def place(
    settings: PolicySettings,
    snapshot: Snapshot,
    plans: Sequence[Plan],
    state: PolicyState,
    published: Orders,
) -> tuple[list[Plan], PlacementReport | None]:
    """Gives sites to new replicas and names surplus ones.

    Args:
        settings: `spread` off: the first node with room, nobody named.
        snapshot: nodes and present places; without nodes nothing happens.
        plans: final numbers of the stages that were looked at (and of other functions).
        state: of the last tick: regime and key stages.
        published: key stages of this tick.
    """
    if not snapshot.nodes:
        return list(plans), None
    ground = _ground(snapshot, published)
    placed, report = _placed(settings, snapshot, plans, state, published, ground)
    ground.index.give_back()
    _kept.append(ground)
    del _kept[:-KEPT]
    return placed, report


def _placed(
    settings: PolicySettings,
    snapshot: Snapshot,
    plans: Sequence[Plan],
    state: PolicyState,
    published: Orders,
    ground: Ground,
) -> tuple[list[Plan], PlacementReport]:
    placed = list(plans)
    more: list[tuple[Member, int]] = []
    for member in members(snapshot, plans, published):
        scale = member.plan.scale
        missing = member.plan.wanted - max(len(scale.placed), scale.ready + len(scale.starting))
        if missing > 0:
            more.append((member, missing))
        elif missing < 0 and settings.spread and scale.placed:
            idlest = member.plan.victims
            named = victims(_want(ground, member), ground.index, scale.placed, -missing, idlest)
            placed[member.at] = msgspec.structs.replace(member.plan, victims=named)
    asked = sum(missing * max(0, member.stage.gpus) for member, missing in more)
    contended, why = _regime(ground, asked, state.is_contended)
    reserved, unreserved = ground.reserve()
    more.sort(key=lambda m: (not m[0].is_key, m[0].plan.rank, m[0].at))
    search = Search(ground.index, contended, settings.spread)
    found: list[tuple[Member, Want, list[Place]]] = []
    short: list[str] = []
    for member, missing in more:
        want = _want(ground, member)
        places = search.add(want, missing)
        found.append((member, want, places))
        if len(places) < missing:
            lack = f"{missing - len(places)} of {missing} new replicas have no place"
            short.append(f"{want.function}: {lack}: {search.bound(want)}")
    added: Counter[int] = Counter()
    for _, want, places in found:
        if want.is_key:
            added[want.gpus] += len(places)
    kl, best_kl = ground.divergence(added)
    replanned = _occasion(snapshot, state, published, kl - best_kl) if settings.spread and found else ""
    moved = _look_again(search, found) if replanned else 0
    if moved:
        kl, best_kl = ground.divergence(added)
    for member, _, places in found:
        sites = tuple(Site(ground.index.nodes[p.node].node, p.gpus) for p in places)
        placed[member.at] = msgspec.structs.replace(member.plan, sites=sites)
    return placed, PlacementReport(
        regime="contended" if contended else "spare",
        why=why,
        kl=round(kl, 6),
        best_kl=round(best_kl, 6),
        threshold=THRESHOLD,
        reserved=reserved,
        unreserved=unreserved,
        placed=sum(len(places) for _, _, places in found),
        moved=moved,
        replanned=replanned,
        short=tuple(short[:MOST_NAMED]),
    )


def _ground(snapshot: Snapshot, orders: Orders) -> Ground:
    """The cluster as it is now, taken out of the kept ones if it is among them."""
    others: list[Ground] = []
    found: Ground | None = None
    while found is None:
        try:
            kept = _kept.pop()
        except IndexError:
            break
        if kept.is_of(snapshot.nodes):
            found = kept
        else:
            others.append(kept)
    _kept.extend(reversed(others))
    if found is None or not found.update(snapshot, orders):
        found = Ground(snapshot.nodes)
        found.update(snapshot, orders)
    return found


def _want(ground: Ground, member: Member) -> Want:
    return want_of(
        member.stage,
        member.is_key,
        ground.where(member.stage.scale.placed),
        ground.near(member.around),
    )


def _regime(ground: Ground, asked: int, was_contended: bool) -> tuple[bool, str]:
    total = ground.index.total_gpus
    if not total:
        return False, "the nodes have no GPUs"
    held = total - ground.index.free_gpus
    ratio = (held + asked + ground.key_gpus) / total
    contended = ratio >= (SPARE_RATIO if was_contended else CONTENDED_RATIO)
    bound = f"spare below {SPARE_RATIO:g}" if was_contended else f"contended from {CONTENDED_RATIO:g}"
    why = f"{held} held + {asked} asked + {ground.key_gpus} in reserve of {total} GPUs: {ratio:.2f}, {bound}"
    return contended, why


def _occasion(snapshot: Snapshot, state: PolicyState, published: Orders, excess: float) -> str:
    """Why the places of this tick are looked at again, empty when they are not."""
    if excess > THRESHOLD:
        return f"divergence {excess:.2f} above the least"
    for view in snapshot.pipelines:
        before, now = state.published.get(view.pipeline, ()), published.get(view.pipeline, ())
        if before != now and not key_stages(view, published) <= key_stages(view, state.published):
            return f"new key stage in {view.pipeline}"
    return ""


def _look_again(search: Search, found: Sequence[tuple[Member, Want, list[Place]]]) -> int:
    """Moves key-stage replicas placed this tick to where they cost less now; answers how many moved."""
    moved = looked = 0
    for _, want, places in found:
        if not want.is_key:
            continue
        for n, place in enumerate(places[: LOOKS - looked]):
            looked += 1
            search.take_back(want, place)
            better = search.best(want)
            here = place_cost(want, search.index, place.node, search.contended)
            gain = here - place_cost(want, search.index, better.node, search.contended) if better else 0.0
            if better is not None and gain > 1e-9:
                places[n] = better
                moved += 1
            search.take(want, places[n])
    return moved
