"""What the policy answers: actions, the state it wants back next time, and why.

Before it: `policy.decide`. After it: `Platform.apply` carries the actions out; the loop writes the
decision to the log. Actions state desired values, so doing one twice does no harm; they report no
outcome: outcomes come back through `observe`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from keystage.controller.domain.state import PolicyState


class Site(msgspec.Struct, frozen=True, omit_defaults=True):
    """A place for one new replica: a node and the indices of the GPUs it takes there."""

    node: str
    gpus: tuple[int, ...] = ()


class SetReplicas(msgspec.Struct, frozen=True, tag="set-replicas", tag_field="action", omit_defaults=True):
    """A function shall have this many replicas.

    Attributes:
        function: function name.
        replicas: how many.
        sites: where the new ones go, in order; fewer than needed, or none: the world chooses the rest, and
            may take a started replica that waits elsewhere.
        victims: names of the replicas that go when there are too many, first to last; more than needed is
            no harm, and the world chooses (starting ones first, then the youngest) where none is named.
    """

    function: str
    replicas: int
    sites: tuple[Site, ...] = ()
    victims: tuple[str, ...] = ()


class SetCpu(msgspec.Struct, frozen=True, tag="set-cpu", tag_field="action"):
    """Every replica of a function shall have this many CPU cores, without a restart."""

    function: str
    cores: float


class KeyStage(msgspec.Struct, frozen=True):
    """One entry of the key-stage list.

    Attributes:
        stage: stage index.
        score: how far it exceeds its share at its minimum allocation (single-pass: wait / share;
            looping: busy fraction); comparable within one pipeline only.
    """

    stage: int
    score: float


class PublishKeyStages(msgspec.Struct, frozen=True, tag="publish-key-stages", tag_field="action"):
    """The key stages of a pipeline, the most critical first, for KeysManager and placement."""

    pipeline: str
    ranking: tuple[KeyStage, ...]


class LiftOverride(msgspec.Struct, frozen=True, tag="lift-override", tag_field="action"):
    """A person's request has expired (or a waiting request ends an override of zero)."""

    function: str


class ClearWake(msgspec.Struct, frozen=True, tag="clear-wake", tag_field="action"):
    """The function that was to be woken serves."""

    function: str


Action = SetReplicas | SetCpu | PublishKeyStages | LiftOverride | ClearWake


class StageReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the number of one function came about, for people and plots.

    Attributes:
        function: function name.
        replicas: what was decided.
        wanted: what the corrector wanted before clamps, damping and budget.
        reason: the words for it.
        arrival_rps: estimated arrivals a second (fast window).
        arrival_scv: squared coefficient of variation of inter-arrival times.
        service_s: mean service time in seconds.
        utilisation_ratio: arrival rate over capacity of the ready replicas; looping: the busy part of their
            time, at most 1.
        sojourn_s: measured mean of wait + service in seconds.
        model_s: the same by the model at the present replicas.
        share_s: the part of the objective this stage may use, seconds.
        queue: items waiting.
        trim: output of the PID, natural logarithm of the factor on the demand.
    """

    function: str
    replicas: int
    wanted: int
    reason: str
    arrival_rps: float | None = None
    arrival_scv: float | None = None
    service_s: float | None = None
    utilisation_ratio: float | None = None
    sojourn_s: float | None = None
    model_s: float | None = None
    share_s: float | None = None
    queue: float | None = None
    trim: float = 0.0


class PlacementReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How replicas were placed in one tick, for people and plots.

    Attributes:
        regime: `spare` (GPUs to spare) or `contended`.
        why: the words for it, with the numbers of the switch test.
        kl: divergence of the key-stage load over nodes from their capacity share, nats.
        best_kl: the least there is of so much load on so many nodes.
        threshold: excess of kl over best_kl from which this tick's places are reconsidered.
        reserved: GPUs kept for one more replica of each key stage.
        unreserved: GPUs there is no room to keep.
        placed: replicas given a place.
        moved: of these, how many a second look moved.
        replanned: why there was a second look, empty without.
        short: functions without enough room, and which bound was hit.
    """

    regime: Literal["spare", "contended"]
    why: str
    kl: float = 0.0
    best_kl: float = 0.0
    threshold: float = 0.0
    reserved: int = 0
    unreserved: int = 0
    placed: int = 0
    moved: int = 0
    replanned: str = ""
    short: tuple[str, ...] = ()


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of `decide`.

    Attributes:
        actions: what shall change; empty when nothing does.
        state: to be handed to the next `decide`.
        reports: one per function, in the snapshot's order.
        placement: how replicas were placed, None in a world without nodes.
    """

    actions: tuple[Action, ...]
    state: PolicyState
    reports: tuple[StageReport, ...]
    placement: PlacementReport | None = None
