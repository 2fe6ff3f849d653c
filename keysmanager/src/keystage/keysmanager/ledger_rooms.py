"""Who gets room and who gives it: admission before every load, loads ahead of demand, pressure.

`ledger` calls these after the requests that can be served at once were served. Room is reserved before
a `Load` or `StartHolder` goes out, and what is being given back is not free until its `HolderGone` or
`LoadFailed`: so full segments and reservations together never pass the budget by our own doing.

What may go: holders (and lone raw segments) that nobody maps, waits for or is being started from, and
loads nobody waits for. Demand may take from all of them, a load ahead of demand only from unlisted
ones and those ranked below it. Standbys are never ended here: their memory is their own, and they
give way only by `StandbysWanted`.
"""

from __future__ import annotations

from keystage.keysmanager import budget, events
from keystage.keysmanager.events import Instruction
from keystage.keysmanager.ledger_requests import answer, bare, idle_standby
from keystage.keysmanager.ledger_state import Asked, Entry, Prepare, State


def see(state: State, event: events.MemorySeen) -> None:
    """Takes over what the host says."""
    state.memory = budget.seen(
        state.memory,
        event.used_bytes,
        event.budget_bytes,
        state.held_bytes(is_huge=False),
        state.reserved_bytes(is_huge=False),
    )
    state.huge = budget.seen_huge(
        state.huge,
        event.huge_free_bytes,
        state.held_bytes(is_huge=True),
        state.reserved_bytes(is_huge=True),
    )


def relieve(state: State, now_s: float) -> list[Instruction]:
    """Ends as many as needed to come under the budget, in the order of `budget.order`."""
    short_bytes = -(state.free_bytes(is_huge=False) + _coming_bytes(state))
    if short_bytes <= 0:
        return []
    state.ahead_from_s = now_s + state.settings.pressure_rest_s
    candidates = _candidates(state)
    chosen = budget.victims(candidates, short_bytes)
    return _end(state, candidates if chosen is None else chosen)


def demand(state: State, now_s: float) -> list[Instruction]:
    """Makes what waiting requests wait for, first come first; without a way to room they fall back."""
    done: list[Instruction] = []
    claimed_bytes = 0  # what earlier ones wait for: later ones must not take it
    for identity, waiting in _demands(state):
        entry = state.entry(waiting[0].parameters or state.listed[identity])
        if entry.is_leaving or entry.is_doomed or entry.is_loading or entry.holder == "starting":
            continue
        prepare = _prepare_of(state, entry, waiting)
        if entry.raw is not None and prepare is None:
            continue
        raw_bytes, packed_bytes, is_huge = _needs(state, entry, prepare)
        need_bytes = packed_bytes + (0 if is_huge else raw_bytes)
        free_bytes = state.free_bytes(is_huge=False) - claimed_bytes
        coming_bytes = free_bytes + _coming_bytes(state)
        if need_bytes == 0 or need_bytes <= free_bytes:
            done.append(_go(entry, prepare, raw_bytes, packed_bytes, is_huge))
            continue
        if need_bytes > coming_bytes:
            chosen = budget.victims(_candidates(state), need_bytes - coming_bytes)
            if chosen is None:
                done += _no_room(state, waiting, need_bytes, free_bytes, now_s)
                continue
            done += _end(state, chosen)
        claimed_bytes += need_bytes
    return done


def ahead(state: State, now_s: float) -> list[Instruction]:
    """Loads key stages by rank as room allows, a few at a time, never while demand waits for room."""
    if now_s < state.ahead_from_s or _is_demand_short(state):
        return []
    busy = sum(e.is_loading or e.holder == "starting" for e in state.entries.values())
    for identity, rank in state.ranks.items():
        if busy >= state.settings.loads_at_once:
            break
        entry = state.entry(state.listed[identity])
        if entry.holder != "none" or entry.is_loading or entry.is_leaving or entry.is_doomed:
            continue
        if now_s < entry.retry_at_s:
            continue
        prepare = state.settings.prepare
        raw_bytes, packed_bytes, is_huge = _needs(state, entry, prepare)
        need_bytes = packed_bytes + (0 if is_huge else raw_bytes)
        free_bytes = state.free_bytes(is_huge=False)
        if need_bytes == 0 or need_bytes <= free_bytes:
            return [_go(entry, prepare, raw_bytes, packed_bytes, is_huge), *ahead(state, now_s)]
        coming_bytes = free_bytes + _coming_bytes(state)
        if need_bytes <= coming_bytes:
            break
        below = [
            c for c in _candidates(state) if (c.rank is None or c.rank > rank) and c.identity != identity
        ]
        chosen = budget.victims(below, need_bytes - coming_bytes)
        if chosen is not None:
            return _end(state, chosen)
    return []


def tidy(state: State) -> list[Instruction]:
    """Ends what was invalidated, cancels loads nobody wants, drops raw forms beside packed ones."""
    done: list[Instruction] = []
    for entry in list(state.entries.values()):
        identity = entry.identity
        is_wanted = bool(state.waiting(identity)) or identity in state.ranks
        if entry.is_loading:
            if not entry.is_cancelled and (entry.is_doomed or not is_wanted):
                entry.is_cancelled = True
                done.append(events.CancelLoad(identity))
            continue
        if entry.holder == "starting" or entry.is_leaving:
            continue
        entry.is_doomed = entry.is_doomed and entry.is_present()
        if entry.is_doomed and not state.is_starting(identity):
            entry.is_leaving = True
            done.append(events.EndHolder(identity))
            continue
        raw = entry.raw
        if raw is not None and entry.packed is not None and not raw.users and not _has_get(state, identity):
            entry.raw = None
            state.disown(raw)
            done.append(events.DropRaw(identity))
    return done


def prune(state: State, now_s: float) -> None:
    """Gives back reservations nobody uses and forgets entries that stand for nothing."""
    for entry in list(state.entries.values()):
        if entry.is_loading or entry.holder == "starting":
            continue
        entry.reserved_packed_bytes = 0
        if entry.is_present() or entry.is_leaving or state.waiting(entry.identity):
            continue
        if entry.identity in state.ranks or now_s < entry.retry_at_s:
            continue
        if not any(held.identity == entry.identity for held in state.held):
            del state.entries[entry.identity]


# ------------------------------------------------------------------ parts


def _demands(state: State) -> list[tuple[str, list[Asked]]]:
    """Identities somebody waits for, with those who wait, first come first."""
    waiting: dict[str, list[Asked]] = {}
    for asked in state.asked.values():
        if asked.state == "waiting" and asked.kind != "evict" and asked.identity not in state.revoked:
            waiting.setdefault(asked.identity, []).append(asked)
    return list(waiting.items())


def _is_demand_short(state: State) -> bool:
    """Somebody waits for a load or a holder that could not be begun."""
    for identity, _ in _demands(state):
        entry = state.entries.get(identity)
        if entry is None or not (entry.is_loading or entry.holder == "starting"):
            return True
    return False


def _has_get(state: State, identity: str) -> bool:
    return any(a.kind == "get" for a in state.waiting(identity))


def _prepare_of(state: State, entry: Entry, waiting: list[Asked]) -> Prepare | None:
    """For what a holder is to be made ready; None: none is needed (it is there, or a standby will do)."""
    if entry.holder != "none":
        return None
    return next((a.prepare for a in waiting if a.kind == "fork" and not idle_standby(state, a)), None)


def _needs(state: State, entry: Entry, prepare: Prepare | None) -> tuple[int, int, bool]:
    """Bytes to reserve for the raw form, for the packed form, and whether the raw form goes to huge pages."""
    nbytes = entry.parameters.nbytes
    packed_bytes = 0
    if prepare == "cpu" and entry.holder == "none" and not entry.reserved_packed_bytes:
        packed_bytes = budget.rounded(int(nbytes * state.settings.packed_ratio), budget.PAGE_BYTES)
    if entry.raw is not None:
        return 0, packed_bytes, False
    huge_bytes = budget.rounded(nbytes, budget.HUGE_BYTES)
    if huge_bytes <= state.free_bytes(is_huge=True):
        return huge_bytes, packed_bytes, True
    return budget.rounded(nbytes, budget.PAGE_BYTES), packed_bytes, False


def _go(
    entry: Entry, prepare: Prepare | None, raw_bytes: int, packed_bytes: int, is_huge: bool
) -> Instruction:
    """Reserves, and begins the load or, with the raw form here, the holder."""
    entry.reserved_packed_bytes += packed_bytes
    if entry.raw is None:
        entry.is_loading = True
        entry.is_huge_planned = is_huge
        entry.reserved_raw_bytes = raw_bytes
        return events.Load(entry.parameters, is_huge)
    entry.holder = "starting"
    entry.prepare = prepare or "none"
    return events.StartHolder(entry.parameters, entry.prepare)


def _no_room(
    state: State, waiting: list[Asked], need_bytes: int, free_bytes: int, now_s: float
) -> list[Instruction]:
    """Replicas read the bundle themselves, a `Get` is refused."""
    note = (
        f"no room for {budget.text(need_bytes)}: {budget.text(max(0, free_bytes))} free of a budget of "
        f"{budget.text(state.memory.budget_bytes)}, and nothing more can be evicted"
    )
    return [
        bare(a, note, now_s) if a.kind == "fork" else answer(state, a, events.Refuse(a.number, note, 507))
        for a in waiting
    ]


def _coming_bytes(state: State) -> int:
    """Bytes of host memory that are being given back."""
    coming = 0
    for entry in state.entries.values():
        if entry.is_leaving:
            coming += _given_bytes(entry)
        elif entry.is_cancelled:
            coming += _reserved_bytes(entry)
    return coming


def _given_bytes(entry: Entry) -> int:
    forms = (entry.raw, entry.packed)
    return sum(h.nbytes for h in forms if h is not None and not h.is_huge and not h.users)


def _reserved_bytes(entry: Entry) -> int:
    return entry.reserved_packed_bytes + (0 if entry.is_huge_planned else entry.reserved_raw_bytes)


def _candidates(state: State) -> list[budget.Candidate]:
    """Who may be ended for host memory."""
    found = []
    for identity, entry in state.entries.items():
        if entry.is_leaving or entry.is_cancelled or entry.holder == "starting" or state.waiting(identity):
            continue
        if any(h is not None and h.users for h in (entry.raw, entry.packed)):
            continue
        # A raw form loaded again beside a packed one: the load goes alone, its holder stays.
        nbytes = _reserved_bytes(entry) if entry.is_loading else _given_bytes(entry)
        if nbytes > 0:
            used_at_s = max(entry.used_at_s, entry.loaded_at_s)
            found.append(budget.Candidate(identity, nbytes, state.ranks.get(identity), used_at_s))
    return found


def _end(state: State, chosen: list[budget.Candidate]) -> list[Instruction]:
    done: list[Instruction] = []
    for candidate in chosen:
        entry = state.entries[candidate.identity]
        if entry.is_loading:
            entry.is_cancelled = True
            done.append(events.CancelLoad(candidate.identity))
        else:
            entry.is_leaving = True
            done.append(events.EndHolder(candidate.identity))
    return done
