"""Feedback: what the model gets wrong, as a bounded correction of the modelled wait.

Before it: the modelled sojourn at the present replicas. After it: the feed-forward demand allows
exp(-trim) times the wait. The error is log(T_measured / T_model): on raw delays a PID cannot be
tuned, because the plant's gain differs 80-fold between utilisation 0.6 and 0.95. Correcting the wait
rather than the replica number keeps the model's cliff at full utilisation: a model that is
pessimistic at two replicas does not talk the stage into one.
It learns only from the plant at rest: from an action until it has taken effect and its queues are
gone the output stays. The integral leaks, since traffic changes and old model errors with it.
"""

from __future__ import annotations

import math

import msgspec

from keystage.controller.domain.snapshot import FunctionView
from keystage.controller.domain.state import PidState, StageState
from keystage.controller.maths import pid
from keystage.controller.maths.estimator import Estimates
from keystage.controller.policy.settings import PolicySettings


def trim(
    settings: PolicySettings,
    memory: StageState,
    scale: FunctionView,
    known: Estimates,
    model_s: float,
    at_s: float,
    dt_s: float,
) -> tuple[float, StageState]:
    """Advances the trim by one tick.

    Args:
        settings: gains and times.
        memory: the stage's memory.
        scale: replica numbers.
        known: estimates, valid.
        model_s: modelled sojourn at the ready replicas, may be infinite.
        at_s: now.
        dt_s: seconds since the last tick, >= 0.

    Returns:
        The output in nepers within the gains' limit, and the new memory.
    """
    if not settings.feedback:
        return 0.0, memory
    gains = settings.gains
    if not known.tick_services > 0 and memory.trim.integral == 0 and not memory.trim.error:
        return 0.0, memory
    fading = math.exp(-dt_s / settings.forget_s)
    state = PidState(memory.trim.integral * fading, memory.trim.error)
    served = known.tick_services
    if not is_at_rest(settings, memory, scale, at_s) or not served > 0 or not math.isfinite(model_s):
        return pid.output(gains, state), msgspec.structs.replace(memory, trim=state)
    fade = math.exp(-dt_s / settings.estimator.slow_s)
    measured_s = memory.measured_s * fade + known.tick_sojourn_s
    modelled_s = memory.modelled_s * fade + served * model_s
    if not (math.isfinite(measured_s) and math.isfinite(modelled_s)):
        measured_s = modelled_s = 0.0
    memory = msgspec.structs.replace(memory, measured_s=measured_s, modelled_s=modelled_s)
    if known.samples < settings.estimator.services or not (measured_s > 0 and 0 < modelled_s < math.inf):
        return pid.output(gains, state), msgspec.structs.replace(memory, trim=state)
    error = math.log(measured_s / modelled_s)
    if not math.isfinite(error):
        return pid.output(gains, state), msgspec.structs.replace(memory, trim=state)
    value, state = pid.step(gains, state, error, dt_s)
    return value, msgspec.structs.replace(memory, trim=state)


def is_at_rest(settings: PolicySettings, memory: StageState, scale: FunctionView, at_s: float) -> bool:
    """Whether the last action has taken effect and its transient is over."""
    if scale.starting or scale.ready != scale.current:
        return False
    return memory.acted_at_s is None or at_s - memory.acted_at_s >= settings.settle_s
