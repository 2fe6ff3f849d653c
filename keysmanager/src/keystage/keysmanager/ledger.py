"""The pure core of the KeysManager: events in, instructions out.

`daemon` feeds it what was asked, what came of its instructions, and what the host's memory looks
like; it carries the instructions out. One event at a time, no IO, no clock, no waiting: every request
is a record, and after each event one pass over the records decides what happens next:

    event -> records (`ledger_requests`, `ledger_holders`, `ledger_standbys`)
          -> end what was invalidated -> serve who waits -> room for demand -> loads ahead -> standbys

Nothing may raise: an event that fits nothing here (an unknown number, an outcome twice) changes
nothing, or clears away what it tells of. Times are those of `now_s`, any clock that never goes back.
"""

from __future__ import annotations

from typing import assert_never

from keystage.keysmanager import events, ledger_holders, ledger_requests, ledger_rooms, ledger_standbys
from keystage.keysmanager.api import CacheEntry, HolderState, StandbyEntry
from keystage.keysmanager.events import Event, Instruction
from keystage.keysmanager.ledger_state import Entry, LedgerSettings, State

__all__ = ["Ledger", "LedgerSettings"]


class Ledger:
    """Decides what is held on this node and from what replicas start.

    Until the first `MemorySeen` the budget is 0: nothing is loaded, replicas read bundles themselves.
    `Ticked` is due about once a second; rests (back-off, refill) end at the next event after them.
    """

    def __init__(self, settings: LedgerSettings) -> None:
        self.state = State(settings)

    def handle(self, event: Event, now_s: float) -> list[Instruction]:
        """Takes one event; the instructions are to be carried out in order.

        Args:
            event: what happened.
            now_s: seconds of a clock that never goes back.
        """
        state = self.state
        done = self._record(event, now_s)
        done += ledger_rooms.tidy(state)
        done += ledger_requests.serve(state, now_s)
        done += ledger_rooms.demand(state, now_s)
        done += ledger_rooms.ahead(state, now_s)
        done += ledger_standbys.keep(state, now_s)
        ledger_rooms.prune(state, now_s)
        return done

    def _record(self, event: Event, now_s: float) -> list[Instruction]:
        """What the event itself changes and answers."""
        match event:
            case events.ForkAsked() | events.GetAsked() | events.EvictAsked() | events.AskerGone():
                return self._question(event, now_s)
            case events.Loaded() | events.LoadFailed() | events.HolderReady() | events.HolderGone():
                return self._holder(event, now_s)
            case events.Spawned() | events.SpawnFailed() | events.Released() | events.Progressed():
                return self._start(event, now_s)
            case events.StandbysWanted() | events.StandbyReady() | events.StandbyGone():
                return self._standby(event, now_s)
            case events.KeyStagesSet():
                ledger_holders.set_key_stages(self.state, event)
            case events.Invalidated():
                return ledger_holders.invalidate(self.state, event)
            case events.MemorySeen():
                ledger_rooms.see(self.state, event)
                return ledger_rooms.relieve(self.state, now_s)
            case events.Ticked():
                pass
            case _:
                assert_never(event)
        return []

    def _question(
        self, event: events.ForkAsked | events.GetAsked | events.EvictAsked | events.AskerGone, now_s: float
    ) -> list[Instruction]:
        match event:
            case events.ForkAsked():
                return ledger_requests.ask_fork(self.state, event, now_s)
            case events.GetAsked():
                return ledger_requests.ask_get(self.state, event, now_s)
            case events.EvictAsked():
                return ledger_holders.ask_evict(self.state, event, now_s)
            case events.AskerGone():
                return ledger_requests.asker_gone(self.state, event)

    def _holder(
        self,
        event: events.Loaded | events.LoadFailed | events.HolderReady | events.HolderGone,
        now_s: float,
    ) -> list[Instruction]:
        match event:
            case events.Loaded():
                return ledger_holders.loaded(self.state, event, now_s)
            case events.LoadFailed():
                return ledger_holders.load_failed(self.state, event, now_s)
            case events.HolderReady():
                return ledger_holders.holder_ready(self.state, event)
            case events.HolderGone():
                return ledger_holders.holder_gone(self.state, event, now_s)

    def _start(
        self,
        event: events.Spawned | events.SpawnFailed | events.Released | events.Progressed,
        now_s: float,
    ) -> list[Instruction]:
        match event:
            case events.Spawned():
                return ledger_requests.spawned(self.state, event, now_s)
            case events.SpawnFailed():
                return ledger_requests.spawn_failed(self.state, event, now_s)
            case events.Released():
                return ledger_requests.released(self.state, event)
            case events.Progressed():
                return []  # for the timeline of `metrics`; a claim is what counts here

    def _standby(
        self, event: events.StandbysWanted | events.StandbyReady | events.StandbyGone, now_s: float
    ) -> list[Instruction]:
        match event:
            case events.StandbysWanted():
                ledger_standbys.want(self.state, event)
            case events.StandbyReady():
                ledger_standbys.ready(self.state, event, now_s)
            case events.StandbyGone():
                ledger_standbys.gone(self.state, event, now_s)
        return []

    # ------------------------------------------------------------------ lists

    @property
    def segment_bytes(self) -> int:
        """Bytes of all full segments, those in huge pages and those only mapped included."""
        return sum(held.nbytes for held in self.state.held)

    def entries(self, unix_offset_s: float = 0.0) -> list[CacheEntry]:
        """What is held, listed ones by rank first, then the last used first.

        Args:
            unix_offset_s: added to times of `now_s` to give Unix seconds (`time.time() - now_s`).
        """
        ranks = self.state.ranks
        shown = [e for e in self.state.entries.values() if self._is_shown(e)]
        shown.sort(key=lambda e: (ranks.get(e.identity, len(ranks)), -e.used_at_s, e.identity))
        return [self._entry(entry, unix_offset_s) for entry in shown]

    def standbys(self, unix_offset_s: float = 0.0) -> list[StandbyEntry]:
        """Standby workers in order of start; the device is the daemon's to fill in."""
        return [
            StandbyEntry(
                shape=s.shape, device="", state=s.state, pid=s.pid, since_s=s.since_s + unix_offset_s
            )
            for s in self.state.standbys.values()
        ]

    def _is_shown(self, entry: Entry) -> bool:
        is_waited_for = bool(self.state.waiting(entry.identity))
        return (
            entry.is_present()
            or entry.is_loading
            or entry.is_leaving
            or is_waited_for
            or bool(entry.reason or self._held_bytes(entry))
        )

    def _held_bytes(self, entry: Entry) -> int:
        return sum(held.nbytes for held in self.state.held if held.identity == entry.identity)

    def _entry(self, entry: Entry, unix_offset_s: float) -> CacheEntry:
        claims = {n for h in self.state.held if h.identity == entry.identity for n in h.users}
        name = entry.parameters.name
        return CacheEntry(
            pipeline=entry.parameters.pipeline,
            stage=name.stage,
            identity=entry.identity,
            state=self._state(entry),
            rank=self.state.ranks.get(entry.identity),
            nbytes=self._held_bytes(entry),
            source=entry.source,
            load_s=entry.load_s,
            loaded_at_s=entry.loaded_at_s + unix_offset_s if entry.loaded_at_s else 0.0,
            used_at_s=entry.used_at_s + unix_offset_s if entry.used_at_s else 0.0,
            uses=entry.uses,
            claims=len(claims),
            pid=entry.pid,
            reason=entry.reason,
        )

    def _state(self, entry: Entry) -> HolderState:
        if entry.is_leaving:
            return "leaving"
        if entry.holder == "ready":
            return "ready"
        if entry.is_loading or entry.holder == "starting" or self.state.waiting(entry.identity):
            return "loading"
        if entry.reason:
            return "failed"
        # A lone raw segment, loaded for a `Get`, is ready; a mapped one that nobody owns is on its way out.
        return "ready" if entry.raw is not None else "leaving"
