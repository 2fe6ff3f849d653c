"""How many standby workers there are: as many idle ones of each shape class as are wanted.

A used one is replaced a little later, one that died too, one that could not start after a growing
rest; surplus ones are ended. `ledger_requests` uses them. Lack of memory ends none of them: what they
hold is their own, and whoever wanted them may want fewer.
"""

from __future__ import annotations

from keystage.keysmanager import events
from keystage.keysmanager.events import Instruction
from keystage.keysmanager.ledger_state import Idle, Shape, State


def want(state: State, event: events.StandbysWanted) -> None:
    """Takes over the wish; a new one is tried at once."""
    shape = state.shapes.setdefault(event.shape, Shape(0))
    if event.count > shape.count:
        shape.start_at_s = 0.0
        shape.failures = 0
    shape.count = max(0, event.count)


def ready(state: State, event: events.StandbyReady, now_s: float) -> None:
    """A standby is idle."""
    standby = state.standbys.get(event.standby)
    if standby is None or standby.state != "starting":
        return
    standby.state = "idle"
    standby.pid = event.pid
    standby.since_s = now_s
    shape = state.shapes.get(standby.shape)
    if shape is not None:
        shape.failures = 0


def gone(state: State, event: events.StandbyGone, now_s: float) -> None:
    """A standby ended; one that is being filled is told by its request's `SpawnFailed` as well."""
    standby = state.standbys.pop(event.standby, None)
    shape = state.shapes.get(standby.shape) if standby is not None else None
    if standby is None or shape is None or standby.is_ending:
        return
    settings = state.settings
    rest_s = settings.standby_refill_s
    if standby.state == "starting":
        grown_s = settings.standby_backoff_s * 2.0 ** min(shape.failures, 16)
        rest_s = min(settings.backoff_limit_s, grown_s)
        shape.failures += 1
    shape.start_at_s = max(shape.start_at_s, now_s + rest_s)


def keep(state: State, now_s: float) -> list[Instruction]:
    """Starts those missing, ends surplus ones (the newest first), forgets shapes nobody wants."""
    done: list[Instruction] = []
    for name, shape in list(state.shapes.items()):
        kept = [
            s
            for s in state.standbys.values()
            if s.shape == name and s.state in ("starting", "idle") and not s.is_ending
        ]
        surplus = len(kept) - shape.count
        for standby in [s for s in reversed(kept) if s.state == "idle"][: max(0, surplus)]:
            standby.is_ending = True
            done.append(events.EndStandby(standby.number))
        if surplus < 0 and now_s >= shape.start_at_s:
            for _ in range(-surplus):
                number = state.next_standby
                state.next_standby += 1
                state.standbys[number] = Idle(number, name, "starting", now_s)
                done.append(events.StartStandby(number, name))
        if shape.count == 0 and not any(s.shape == name for s in state.standbys.values()):
            del state.shapes[name]
    return done
