"""A holder's life: loading, preparing, ready, leaving, gone; and what its failures mean to others.

    Load -> Loaded -> StartHolder -> HolderReady ... EndHolder -> HolderGone
         -> LoadFailed            -> HolderGone (it died: the raw form is still here)

Called by `ledger` with the outcome of an instruction, or with a wish to end something. It begins
nothing by itself: `ledger_rooms` does, afterwards. An outcome that answers no instruction is not
believed; a process it may tell of is found by `reconcile`.
"""

from __future__ import annotations

from keystage.keysmanager import events
from keystage.keysmanager.events import Instruction
from keystage.keysmanager.ledger_requests import answer, bare, revoked_text
from keystage.keysmanager.ledger_state import Asked, Entry, State


def set_key_stages(state: State, event: events.KeyStagesSet) -> None:
    """Replaces the list; the first mention of an identity is its rank."""
    state.ranks.clear()
    state.listed.clear()
    for parameters in event.parameters:
        if parameters.identity not in state.ranks and parameters.identity not in state.revoked:
            state.ranks[parameters.identity] = len(state.ranks)
            state.listed[parameters.identity] = parameters


def invalidate(state: State, event: events.Invalidated) -> list[Instruction]:
    """Nothing of it is handed out any longer; `ledger_rooms.tidy` ends it, mapped copies run on."""
    identity = event.identity
    if event.is_revoked:
        state.revoked.pop(identity, None)
        state.revoked[identity] = None
    while len(state.revoked) > state.settings.revoked_limit:
        del state.revoked[next(iter(state.revoked))]
    if state.ranks.pop(identity, None) is not None:
        del state.listed[identity]
        state.ranks = {other: rank for rank, other in enumerate(state.ranks)}
    done = [
        answer(state, asked, events.Refuse(asked.number, revoked_text(identity), 409))
        for asked in state.waiting(identity)
        if asked.kind != "evict"
    ]
    entry = state.entries.get(identity)
    if entry is not None:
        entry.is_doomed = True
        done.append(events.Remember(entry.parameters.name, identity, is_valid=False))
    return done


def ask_evict(state: State, event: events.EvictAsked, now_s: float) -> list[Instruction]:
    """Somebody wants a holder ended; it is done when its memory is given back."""
    if event.request in state.asked:
        return []
    entry = state.entries.get(event.identity)
    if entry is None or not (entry.is_present() or entry.is_loading):
        return [events.Refuse(event.request, f"no holder of {event.identity[:12]} here", 404)]
    why = "" if entry.is_leaving else _why_kept(state, entry)
    if why:
        return [events.Refuse(event.request, f"holder of {event.identity[:12]} is kept: {why}", 409)]
    state.asked[event.request] = Asked(event.request, "evict", None, event.identity, now_s)
    if entry.is_leaving:
        return []
    entry.is_leaving = True
    entry.retry_at_s = max(entry.retry_at_s, now_s + state.settings.evict_rest_s)
    return [events.EndHolder(event.identity)]


def _why_kept(state: State, entry: Entry) -> str:
    if entry.is_loading:
        return "it is being loaded"
    if entry.holder == "starting":
        return "it is starting"
    users = sum(len(held.users) for held in (entry.raw, entry.packed) if held is not None)
    if users:
        return f"{users} consumers map it or start from it"
    waiting = len(state.waiting(entry.identity))
    return f"{waiting} requests wait for it" if waiting else ""


# ------------------------------------------------------------------ outcomes


def loaded(state: State, event: events.Loaded, now_s: float) -> list[Instruction]:
    """A segment is here."""
    entry = state.entries.get(event.identity)
    if entry is None:
        return [events.EndHolder(event.identity)]
    if not entry.is_loading:
        return []
    is_huge = entry.is_huge_planned and event.huge_bytes > 0
    _end_load(entry)
    entry.raw = state.hold(event.identity, event.nbytes, is_huge)
    entry.source = event.source
    entry.load_s = event.load_s
    entry.loaded_at_s = now_s
    if entry.holder == "none":
        _clear_failure(entry)
    return []


def load_failed(state: State, event: events.LoadFailed, now_s: float) -> list[Instruction]:
    """No source has it: replicas read the bundle themselves; a cancelled load leaves its waiters waiting."""
    entry = state.entries.get(event.identity)
    if entry is None or not entry.is_loading:
        return []
    was_cancelled = entry.is_cancelled
    _end_load(entry)
    if was_cancelled:
        return []
    _note_failure(state, entry, event.reason, now_s)
    done: list[Instruction] = []
    for asked in state.waiting(event.identity):
        match asked.kind:
            case "fork":
                done.append(bare(asked, f"load failed: {event.reason}", now_s))
            case "get":
                done.append(answer(state, asked, events.Refuse(asked.number, event.reason, 502)))
            case "evict":
                pass
    return done


def holder_ready(state: State, event: events.HolderReady) -> list[Instruction]:
    """Children can be forked from it; its packed form takes the place of the raw one."""
    entry = state.entries.get(event.identity)
    if entry is None:
        return [events.EndHolder(event.identity)]
    if entry.holder != "starting":
        return []
    entry.holder = "ready"
    entry.pid = event.pid
    entry.reserved_packed_bytes = 0
    _clear_failure(entry)
    if event.packed_bytes <= 0:
        return []
    entry.packed = state.hold(event.identity, event.packed_bytes, is_huge=False)
    raw, entry.raw = entry.raw, None
    state.disown(raw)
    return [events.DropRaw(event.identity)]


def holder_gone(state: State, event: events.HolderGone, now_s: float) -> list[Instruction]:
    """It is gone; unasked, that is a failure, and those who wait for it have lost one of their starts."""
    entry = state.entries.get(event.identity)
    if entry is None or (entry.holder == "none" and not entry.is_leaving):
        return []
    was_asked = entry.is_leaving
    packed, entry.packed = entry.packed, None
    state.disown(packed)
    entry.holder = "none"
    entry.pid = 0
    entry.reserved_packed_bytes = 0
    entry.is_leaving = False
    if was_asked:
        raw, entry.raw = entry.raw, None
        state.disown(raw)
        return []
    _note_failure(state, entry, event.reason, now_s)
    for asked in state.waiting(event.identity):
        asked.failures += 1
        asked.reason = f"holder ended: {event.reason}"
    return []


def _end_load(entry: Entry) -> None:
    entry.is_loading = entry.is_cancelled = False
    entry.reserved_raw_bytes = 0
    entry.is_huge_planned = False


def _note_failure(state: State, entry: Entry, reason: str, now_s: float) -> None:
    rest_s = min(
        state.settings.backoff_limit_s, state.settings.load_backoff_s * 2.0 ** min(entry.failures, 16)
    )
    entry.failures += 1
    entry.retry_at_s = now_s + rest_s
    entry.reason = reason


def _clear_failure(entry: Entry) -> None:
    entry.failures = 0
    entry.retry_at_s = 0.0
    entry.reason = ""
