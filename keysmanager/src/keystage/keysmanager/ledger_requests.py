"""What a request gets, and when: the rules by which a replica is started or a segment handed out.

`serve` walks over those who wait, after every event. Best first:

    standby of its shape and the raw form here   -> FillStandby
    a holder made ready for its device           -> Spawn from it
    neither, but one can come                    -> it waits (`ledger_rooms` loads)
    nothing can come, or two starts came to nothing -> Spawn from the fork server with a note: the
                                                    worker reads the bundle itself

It must not decide about memory. Every request is answered once: by its start, by `GiveSegment`,
`Refuse` or `Done`; or by nothing, if its asker has gone.
"""

from __future__ import annotations

from typing import assert_never

from keystage.keysmanager import events
from keystage.keysmanager.events import Instruction
from keystage.keysmanager.ledger_state import Asked, Entry, Held, Idle, State

START_LIMIT = 2
"""Starts from a holder or standby before the fork server takes over: the first and one retry."""


def ask_fork(state: State, event: events.ForkAsked, now_s: float) -> list[Instruction]:
    """A replica is wanted; those that need no segment of ours are started at once."""
    if event.request in state.asked:
        return []
    for parameters in event.parameters:
        if parameters.identity in state.revoked:
            return [events.Refuse(event.request, revoked_text(parameters.identity), 409)]
    only = event.parameters[0] if len(event.parameters) == 1 else None
    asked = Asked(
        event.request,
        "fork",
        only,
        only.identity if only else "",
        now_s,
        event.prepare,
        event.shape,
        event.is_private,
    )
    state.asked[event.request] = asked
    if only is None:
        return [bare(asked, "", now_s)]
    if event.is_private and event.prepare == "cpu":
        return [bare(asked, "a private copy on the CPU is read by the worker itself", now_s)]
    return []


def ask_get(state: State, event: events.GetAsked, now_s: float) -> list[Instruction]:
    """A raw segment is wanted."""
    if event.request in state.asked:
        return []
    identity = event.parameters.identity
    if identity in state.revoked:
        return [events.Refuse(event.request, revoked_text(identity), 409)]
    state.asked[event.request] = Asked(
        event.request, "get", event.parameters, identity, now_s, takes_packed=event.takes_packed
    )
    return []


def revoked_text(identity: str) -> str:
    """Why parameters are not handed out."""
    return f"parameters {identity[:12]} were invalidated and are not handed out any longer"


def serve(state: State, now_s: float) -> list[Instruction]:
    """Answers all who wait and can be served now; the others are marked as having waited."""
    done: list[Instruction] = []
    for asked in [a for a in state.asked.values() if a.state == "waiting"]:
        entry = state.entries.get(asked.identity)
        is_usable = entry is not None and not entry.is_leaving and not entry.is_doomed
        usable = entry if is_usable else None
        instruction: Instruction | None
        match asked.kind:
            case "fork":
                instruction = _fork(state, asked, usable, now_s)
            case "get":
                instruction = _get(state, asked, usable, now_s)
            case "evict":
                is_over = entry is None or not entry.is_leaving
                instruction = answer(state, asked, events.Done(asked.number)) if is_over else None
            case _:
                assert_never(asked.kind)
        if instruction is None:
            asked.has_waited = True
        else:
            done.append(instruction)
    return done


def answer(state: State, asked: Asked, instruction: Instruction) -> Instruction:
    """The last word to a request; it is forgotten."""
    del state.asked[asked.number]
    return instruction


def bare(asked: Asked, note: str, now_s: float) -> Instruction:
    """Starts a replica from the fork server; `note` says why not better."""
    asked.state = "starting"
    asked.is_bare = True
    return events.Spawn(asked.number, None, "fork-server", "", note, _waited_s(asked, now_s))


def idle_standby(state: State, asked: Asked) -> Idle | None:
    """A standby that can become this replica, the oldest first."""
    if asked.kind != "fork" or not asked.shape or asked.is_private:
        return None
    fitting = (s for s in state.standbys.values() if s.shape == asked.shape and s.state == "idle")
    return next((s for s in fitting if not s.is_ending), None)


def _fork(state: State, asked: Asked, entry: Entry | None, now_s: float) -> Instruction | None:
    if asked.failures >= START_LIMIT:
        return bare(asked, asked.reason, now_s)
    if entry is None:
        return None
    standby = idle_standby(state, asked)
    if standby is not None and entry.raw is not None:
        _start(asked, entry, entry.raw, now_s)
        asked.standby = standby.number
        standby.state = "filling"
        standby.since_s = now_s
        _rest(state, standby.shape, now_s)
        source = entry.source if asked.has_waited else "memory"
        return events.FillStandby(
            asked.number, standby.number, asked.identity, source, _waited_s(asked, now_s)
        )
    if entry.holder != "none" and entry.prepare != asked.prepare:
        return bare(asked, f"the holder is prepared for {entry.prepare}, not {asked.prepare}", now_s)
    if entry.holder == "ready" and entry.form is not None:
        _start(asked, entry, entry.form, now_s)
        source = entry.source if asked.has_waited else "memory"
        return events.Spawn(
            asked.number, asked.identity, "holder", source, asked.reason, _waited_s(asked, now_s)
        )
    return None


def _get(state: State, asked: Asked, entry: Entry | None, now_s: float) -> Instruction | None:
    if entry is None:
        return None
    is_packed = asked.takes_packed and entry.packed is not None and entry.holder == "ready"
    held = entry.packed if is_packed else entry.raw
    if held is None:
        return None
    _start(asked, entry, held, now_s)
    asked.state = "open"
    source = entry.source if asked.has_waited else "memory"
    return events.GiveSegment(asked.number, asked.identity, source, is_packed)


def _start(asked: Asked, entry: Entry, held: Held, now_s: float) -> None:
    asked.state = "starting"
    asked.held = held
    held.users.add(asked.number)
    entry.uses += 1
    entry.used_at_s = now_s


def _waited_s(asked: Asked, now_s: float) -> float:
    return max(0.0, now_s - asked.asked_at_s) if asked.has_waited else 0.0


# ------------------------------------------------------------------ outcomes


def spawned(state: State, event: events.Spawned, now_s: float) -> list[Instruction]:
    """The replica runs; what it maps stays mapped until `Released`."""
    asked = state.asked.get(event.request)
    if asked is None or asked.state != "starting":
        return []
    _use_standby(state, asked, now_s)
    asked.state = "open"
    remembered: list[Instruction] = []
    if not asked.is_bare and asked.parameters is not None:
        entry = state.entries.get(asked.identity)
        is_valid = asked.identity not in state.revoked and not (entry is not None and entry.is_doomed)
        remembered.append(events.Remember(asked.parameters.name, asked.identity, is_valid))
    if asked.is_bare or asked.is_released:
        state.unmap(asked)
        del state.asked[asked.number]
    return remembered


def spawn_failed(state: State, event: events.SpawnFailed, now_s: float) -> list[Instruction]:
    """A start came to nothing: once more, then from the fork server, then refused."""
    asked = state.asked.get(event.request)
    if asked is None or asked.state != "starting":
        return []
    _use_standby(state, asked, now_s)
    state.unmap(asked)
    if asked.is_gone:
        del state.asked[asked.number]
        return []
    if asked.is_bare:
        return [answer(state, asked, events.Refuse(asked.number, f"fork server: {event.reason}", 502))]
    if asked.identity in state.revoked:
        return [answer(state, asked, events.Refuse(asked.number, revoked_text(asked.identity), 409))]
    asked.state = "waiting"
    asked.standby = None
    asked.is_released = False
    asked.failures += 1
    asked.reason = event.reason
    return []


def released(state: State, event: events.Released) -> list[Instruction]:
    """A claim was closed; before its start was told it is kept in mind."""
    asked = state.asked.get(event.request)
    if asked is None or asked.state == "waiting":
        return []
    if asked.state == "starting":
        asked.is_released = True
        return []
    state.unmap(asked)
    del state.asked[asked.number]
    return []


def asker_gone(state: State, event: events.AskerGone) -> list[Instruction]:
    """Nobody listens: a waiting request is dropped, a start under way is seen to its end."""
    asked = state.asked.get(event.request)
    if asked is not None and asked.state == "waiting":
        del state.asked[asked.number]
    elif asked is not None:
        asked.is_gone = True
    return []


def _use_standby(state: State, asked: Asked, now_s: float) -> None:
    if asked.standby is None:
        return
    standby = state.standbys.pop(asked.standby, None)
    if standby is not None:
        _rest(state, standby.shape, now_s)


def _rest(state: State, name: str, now_s: float) -> None:
    """The next standby of a shape is started a little later."""
    shape = state.shapes.get(name)
    if shape is not None:
        shape.start_at_s = max(shape.start_at_s, now_s + state.settings.standby_refill_s)
