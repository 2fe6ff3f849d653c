"""The working record of one function inside a tick: it is passed from step to step of `decide`.

Steps change it with `msgspec.structs.replace`, which takes a tenth of the time of `dataclasses.replace`.
"""

from __future__ import annotations

import math

import msgspec

from keystage.controller.domain.decision import Site
from keystage.controller.domain.snapshot import FunctionView
from keystage.controller.domain.state import PlainState, StageState
from keystage.controller.maths.estimator import Estimates
from keystage.controller.policy.service import Service
from keystage.controller.policy.settings import MOST_REPLICAS


class Plan(msgspec.Struct, frozen=True):
    """What is planned for one function.

    Attributes:
        scale: the function as observed.
        wanted: replicas wanted by the step before.
        reason: why.
        is_stage: whether it is a stage (counts against the budget).
        is_session: whether customers are sessions and servers are slots (looping).
        pipeline: pipeline of a stage.
        stage: index of a stage.
        is_held: the policy has no say this tick (missing data); intents and bounds still hold.
        is_override: a person decided.
        is_idle: nothing came for so long that the stage may go to zero.
        is_waking: something waits somewhere in the pipeline, so that no stage may stay at zero.
        is_resting: nothing changed, so nobody looked at it this tick.
        is_cut: the budget had fewer for it than wanted.
        corrected: what the corrector wanted.
        modelled: what the queueing model and the backlog alone ask for, without the trim.
        reclaimed: replicas the smoother took back this tick.
        rank: position in the key-stage list of its pipeline (0 is the most critical).
        score: score in that list.
        memory: state to be kept for the function.
        known: estimates of a stage.
        share_s: its part of the objective.
        model_s: modelled sojourn at the present replicas.
        trim: output of the PID.
        serving: how a replica of a single-pass stage serves, None where nobody said.
        horizon_s: start plus drain time: a queue that is gone within it asks for nothing.
        cv: predicted CV of the stage's arrivals (smoother), None when nobody predicted it.
        cores: CPU cores each replica shall have (compensator), None: as they are.
        sites: places of the new replicas, in order (placement).
        victims: replicas that go, in order (placement).
        plain: state to be kept for a plain function, None where nobody tells its load.
    """

    scale: FunctionView
    wanted: int
    reason: str
    is_stage: bool = False
    is_session: bool = False
    pipeline: str = ""
    stage: int = 0
    is_held: bool = False
    is_override: bool = False
    is_idle: bool = False
    is_waking: bool = False
    is_resting: bool = False
    is_cut: bool = False
    corrected: int = 0
    modelled: int = 0
    reclaimed: int = 0
    rank: int = 0
    score: float = 0.0
    memory: StageState = StageState()
    known: Estimates = Estimates()
    share_s: float | None = None
    model_s: float | None = None
    trim: float = 0.0
    serving: Service | None = None
    horizon_s: float = math.inf
    cv: float | None = None
    cores: float | None = None
    sites: tuple[Site, ...] = ()
    victims: tuple[str, ...] = ()
    plain: PlainState | None = None

    @property
    def lowest(self) -> int:
        """Fewest replicas the policy may ask for."""
        if self.is_idle:
            return 0
        least = self.scale.min_replicas
        return least if 0 <= least <= MOST_REPLICAS else min(MOST_REPLICAS, max(0, least))

    @property
    def highest(self) -> int:
        """Most replicas: label and machine, but never below the lowest."""
        bound = min(MOST_REPLICAS, self.scale.max_replicas)
        if self.scale.cap is not None:
            bound = min(bound, self.scale.cap)
        return max(self.lowest, bound)
