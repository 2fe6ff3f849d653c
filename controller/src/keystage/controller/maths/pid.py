"""One step of a PID controller with a bounded output and anti-windup.

Before it: the corrector forms an error. After it: the corrector applies the output. State goes in
and comes out; there is no clock here.

    u = kp e + I + kd de/dt,  I <- I + ki e dt,  u in [-limit, limit]

Anti-windup by conditional integration: I is bounded by the limit and does not grow while the
output is at its bound and the error pushes further outwards.
Sign (QUART Eq. 3 has it the other way round, which removes replicas when the queue is too long):
the error is positive when the measured time is too long, and a positive output asks for more.
"""

from __future__ import annotations

import msgspec

from keystage.controller.domain.state import PidState


class PidGains(msgspec.Struct, frozen=True):
    """Gains for an error in nepers (natural logarithm of a ratio).

    Attributes:
        kp: output per error.
        ki: output per error and second.
        kd: output per error slope (seconds).
        limit: bound of the output's magnitude.
    """

    kp: float = 0.2
    ki: float = 0.02
    kd: float = 0.0
    limit: float = 0.7


def step(gains: PidGains, state: PidState, error: float, dt_s: float) -> tuple[float, PidState]:
    """Advances by `dt_s` seconds with the given error.

    Returns:
        The output within +-limit, and the new state.
    """
    dt_s = max(0.0, dt_s)
    slope = 0.0 if state.error is None or dt_s <= 0 else (error - state.error) / dt_s
    direct = gains.kp * error + gains.kd * slope
    integral = _bound(state.integral + gains.ki * error * dt_s, gains.limit)
    raw = direct + integral
    if abs(raw) > gains.limit and raw * error > 0:
        integral = state.integral
    return _bound(direct + integral, gains.limit), PidState(integral, error)


def output(gains: PidGains, state: PidState) -> float:
    """The output without a new error: what holds while the loop is frozen."""
    return _bound(gains.kp * (state.error or 0.0) + state.integral, gains.limit)


def _bound(value: float, limit: float) -> float:
    return min(limit, max(-limit, value))
