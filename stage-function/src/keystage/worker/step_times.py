"""The times that a wave takes at the stages, for the trace of one of its sessions (`Step.times`). Pure.

A wave that nobody traces has None in their place, and nothing here runs. Per stage two numbers: seconds from
the wave's arrival at the worker to the start of compute (the hand-off: fetching the activation, and waiting
for the device behind other waves), and of compute. Each worker takes both from its own clock, so no two
clocks are compared; until a duration is known its place holds the negative of the time at which it began.
"""

from __future__ import annotations


def opened(now_s: float) -> list[float]:
    """Times of a wave that is formed now."""
    return [-now_s]


def arrived(times: list[float], now_s: float) -> None:
    """The wave has come to a worker."""
    times.append(-now_s)


def began(times: list[float], now_s: float) -> None:
    """Its compute begins."""
    times[-1] += now_s
    times.append(-now_s)


def ended(times: list[float], now_s: float, stages: int) -> None:
    """Its compute ended; stages that are computed as one share the time. Only the first call counts.

    Args:
        times: of the wave.
        now_s: the time.
        stages: how many were computed.
    """
    if times[-1] < 0:
        share_s = (times[-1] + now_s) / stages
        times[-1] = share_s
        times.extend((0.0, share_s) * (stages - 1))
