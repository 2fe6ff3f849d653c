"""The working record of one function inside a tick: it is passed from step to step of `decide`."""

from __future__ import annotations

import dataclasses

from keystage.controller.domain.snapshot import FunctionView
from keystage.controller.domain.state import StageState
from keystage.controller.maths.estimator import Estimates
from keystage.controller.policy.settings import MOST_REPLICAS


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What is planned for one function.

    Attributes:
        scale: the function as observed.
        wanted: replicas wanted by the step before.
        reason: why.
        is_stage: whether it is a stage (counts against the budget, never goes to zero by itself).
        is_session: whether customers are sessions and servers are slots (looping).
        pipeline: pipeline of a stage.
        stage: index of a stage.
        is_held: the policy has no say this tick (missing data); intents and bounds still hold.
        is_override: a person decided.
        corrected: what the corrector wanted.
        rank: position in the key-stage list of its pipeline (0 is the most critical).
        score: score in that list.
        memory: state to be kept for the function.
        known: estimates of a stage.
        share_s: its part of the objective.
        model_s: modelled sojourn at the present replicas.
        trim: output of the PID.
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
    corrected: int = 0
    rank: int = 0
    score: float = 0.0
    memory: StageState = dataclasses.field(default_factory=StageState)
    known: Estimates = dataclasses.field(default_factory=Estimates)
    share_s: float | None = None
    model_s: float | None = None
    trim: float = 0.0

    @property
    def lowest(self) -> int:
        """Fewest replicas the policy may ask for."""
        least = 1 if self.is_stage else 0
        return min(MOST_REPLICAS, max(least, self.scale.min_replicas))

    @property
    def highest(self) -> int:
        """Most replicas: label and machine, but never below the lowest."""
        bound = min(MOST_REPLICAS, self.scale.max_replicas)
        if self.scale.cap is not None:
            bound = min(bound, self.scale.cap)
        return max(self.lowest, bound)
