"""A node without processes: carries the ledger's instructions out on plain records, and checks each.

The records are the oracle: what is loaded, held, mapped and asked is noted here from instructions and
outcomes alone, never read from the ledger. Used by unit tests one step at a time, and by the property
test at random.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, assert_never

from keystage.keysmanager import events as e
from keystage.keysmanager.api import Parameters, StageName
from keystage.keysmanager.ledger import Ledger, LedgerSettings

MIB = 1 << 20


def parameters(number: int, nbytes: int = 100 * MIB) -> Parameters:
    """Parameters of stage `number` of a made-up pipeline."""
    return Parameters(
        name=StageName("file:///b", number),
        pipeline="p",
        identity=f"{number:064x}",
        dtype="float32",
        file=f"stage-{number}.safetensors",
        nbytes=nbytes,
        chunks=(),
    )


@dataclasses.dataclass(eq=False)
class Segment:
    """Memory: it exists while owned or mapped."""

    identity: str
    nbytes: int
    is_huge: bool = False
    is_owned: bool = True
    users: set[int] = dataclasses.field(default_factory=set)


@dataclasses.dataclass
class Start:
    """A spawn, fill or standby under way."""

    instruction: e.Spawn | e.FillStandby
    segment: Segment | None


class Node:
    """Carries instructions out; every `tell` gives the instructions of that event."""

    def __init__(self, settings: LedgerSettings | None = None, budget_bytes: int = 1000 * MIB) -> None:
        self.ledger = Ledger(settings or LedgerSettings(prepare="none", packed_ratio=1.0))
        self.now_s = 100.0
        self.budget_bytes = budget_bytes
        self.others_bytes = 0
        self.huge_total_bytes = 0
        self.loads: dict[str, e.Load] = {}
        self.holders: dict[str, Literal["starting", "ready", "ending"]] = {}
        self.packing: dict[str, int] = {}
        self.raw: dict[str, Segment] = {}
        self.packed: dict[str, Segment] = {}
        self.segments: list[Segment] = []
        self.starts: dict[int, Start] = {}
        self.claims: dict[int, Segment] = {}
        self.open: set[int] = set()
        self.gone: set[int] = set()
        self.asked_of: dict[int, str] = {}
        self.answers: dict[int, list[str]] = {}
        self.standbys: dict[int, str] = {}
        self.revoked: set[str] = set()
        self.doomed: set[str] = set()
        self.used_at_s: dict[str, float] = {}
        self.look()

    # -------------------------------------------------------------- what is used

    def taken_bytes(self, is_huge: bool = False) -> int:
        """Segments that exist, and room for what is being loaded or packed."""
        taken = sum(s.nbytes for s in self.segments if s.is_huge == is_huge)
        taken += sum(load.parameters.nbytes for load in self.loads.values() if load.is_huge == is_huge)
        return taken if is_huge else taken + sum(self.packing.values())

    def evictable(self) -> set[str]:
        """Identities that hold memory, mapped by nobody, not starting, not leaving, nobody waiting."""
        waiting = {i for n, i in self.asked_of.items() if n in self.open and n not in self.starts}
        return {
            identity
            for identity in {*self.raw, *self.packed}
            if self.holders.get(identity) in (None, "ready")
            and identity not in self.loads
            and identity not in waiting
            and not self.users_of(identity)
        }

    def users_of(self, identity: str) -> set[int]:
        """Who maps what the node owns of an identity, or starts from it."""
        forms = (self.raw.get(identity), self.packed.get(identity))
        return {n for s in forms if s is not None for n in s.users}

    # -------------------------------------------------------------- telling

    def look(self, filled_ratio: float = 1.0) -> list[e.Instruction]:
        """The host's memory is read; loads under way are filled to `filled_ratio`."""
        held = sum(s.nbytes for s in self.segments if not s.is_huge)
        partly = self.taken_bytes() - held
        huge_free = self.huge_total_bytes - sum(s.nbytes for s in self.segments if s.is_huge)
        return self.tell(
            e.MemorySeen(self.others_bytes + held + int(partly * filled_ratio), self.budget_bytes, huge_free)
        )

    def tell(self, event: e.Event) -> list[e.Instruction]:
        """Tells the ledger, notes what was asked, carries out what it says."""
        match event:
            case e.ForkAsked():
                self.open.add(event.request)
                only = event.parameters[0].identity if len(event.parameters) == 1 else ""
                self.asked_of[event.request] = only
            case e.GetAsked():
                self.open.add(event.request)
                self.asked_of[event.request] = event.parameters.identity
            case e.EvictAsked():
                self.open.add(event.request)
                self.asked_of[event.request] = ""
            case e.Invalidated(identity, is_revoked):
                if is_revoked:
                    self.revoked.add(identity)
                self.doomed |= {identity} & {*self.raw, *self.packed, *self.holders, *self.loads}
            case e.AskerGone() if event.request in self.starts:
                self.gone.add(event.request)
            case e.AskerGone():
                self.open.discard(event.request)
        instructions = self.ledger.handle(event, self.now_s)
        for instruction in instructions:
            self.carry_out(instruction)
        return instructions

    def carry_out(self, instruction: e.Instruction) -> None:
        """Begins what can take time, does the rest; impossible orders fail."""
        match instruction:
            case e.Load(parameters):
                identity = parameters.identity
                assert identity not in self.loads
                assert identity not in self.raw
                assert identity not in self.revoked
                assert self.holders.get(identity) != "ending"
                self.loads[identity] = instruction
            case e.CancelLoad(identity):
                assert identity in self.loads
            case e.StartHolder(parameters, prepare):
                assert parameters.identity in self.raw
                assert parameters.identity not in self.holders
                assert parameters.identity not in self.revoked
                self.holders[parameters.identity] = "starting"
                self.packing[parameters.identity] = parameters.nbytes if prepare == "cpu" else 0
            case e.EndHolder(identity):
                self._end(identity)
            case e.DropRaw(identity):
                assert identity in self.packed
                if identity in self.raw:
                    self._disown(self.raw.pop(identity))
            case e.Spawn() | e.FillStandby():
                self._start(instruction)
            case e.GiveSegment() | e.Refuse() | e.Done():
                self._reply(instruction)
            case e.StartStandby(standby):
                assert standby not in self.standbys
                self.standbys[standby] = "starting"
            case e.EndStandby(standby):
                assert self.standbys[standby] == "idle"
                self.standbys[standby] = "ending"
            case e.Remember():
                pass
            case _:
                assert_never(instruction)

    def _reply(self, instruction: e.GiveSegment | e.Refuse | e.Done) -> None:
        match instruction:
            case e.GiveSegment(request, identity, _, is_packed):
                assert identity not in self.revoked | self.doomed
                assert self.holders.get(identity) == "ready" if is_packed else True
                assert self.holders.get(identity) != "ending"
                self._answer(request, "segment")
                given = (self.packed if is_packed else self.raw)[identity]
                self._map(request, given)
                self.claims[request] = given
                self.used_at_s[identity] = self.now_s
            case e.Refuse(request):
                self._answer(request, "refused")
            case e.Done(request):
                self._answer(request, "done")

    def _end(self, identity: str) -> None:
        assert self.holders.get(identity) in (None, "ready"), "a starting or ending holder is let be"
        assert identity in self.raw or identity in self.packed
        assert identity not in self.loads
        users = self.users_of(identity)
        assert not any(n in self.starts for n in users), "a child is being started from it"
        assert not users or identity in self.doomed, "somebody maps it"
        self.holders[identity] = "ending"

    def _start(self, instruction: e.Spawn | e.FillStandby) -> None:
        request = instruction.request
        assert request in self.open
        assert request not in self.starts
        identity = instruction.identity
        segment: Segment | None = None
        if identity is not None:
            assert identity not in self.revoked | self.doomed
            assert self.holders.get(identity) != "ending", "no claim on a leaving holder"
            if isinstance(instruction, e.Spawn):
                assert self.holders[identity] == "ready"
                segment = self.packed.get(identity) or self.raw[identity]
            else:
                assert self.standbys[instruction.standby] == "idle"
                self.standbys[instruction.standby] = "filling"
                segment = self.raw[identity]
            self._map(request, segment)
            self.used_at_s[identity] = self.now_s
        self.starts[request] = Start(instruction, segment)

    def _map(self, request: int, segment: Segment) -> None:
        assert segment.is_owned
        segment.users.add(request)

    def _answer(self, request: int, answer: str) -> None:
        assert request in self.open, f"{request} has its answer already, or its asker has gone"
        self.open.discard(request)
        self.answers.setdefault(request, []).append(answer)

    def _disown(self, segment: Segment) -> None:
        segment.is_owned = False
        self._forget(segment)

    def _forget(self, segment: Segment) -> None:
        if not segment.is_owned and not segment.users:
            self.segments.remove(segment)

    # -------------------------------------------------------------- outcomes

    def load(self, identity: str) -> list[e.Instruction]:
        """A load succeeds."""
        load = self.loads.pop(identity)
        segment = Segment(identity, load.parameters.nbytes, load.is_huge)
        self.raw[identity] = segment
        self.segments.append(segment)
        self.used_at_s.setdefault(identity, self.now_s)
        self.used_at_s[identity] = max(self.used_at_s[identity], self.now_s)
        huge_bytes = 2 * MIB if load.is_huge else 0
        return self.tell(e.Loaded(identity, "disk", segment.nbytes, 1.0, huge_bytes))

    def fail_load(self, identity: str) -> list[e.Instruction]:
        """A load fails."""
        del self.loads[identity]
        if identity not in {*self.raw, *self.packed, *self.holders}:
            self.doomed.discard(identity)
        return self.tell(e.LoadFailed(identity, "disk: gone"))

    def hold(self, identity: str) -> list[e.Instruction]:
        """A holder is ready; with its packed form the raw one is closed at once."""
        self.holders[identity] = "ready"
        packed_bytes = self.packing.pop(identity)
        if packed_bytes:
            self.packed[identity] = Segment(identity, packed_bytes)
            self.segments.append(self.packed[identity])
            self._disown(self.raw.pop(identity))
        return self.tell(e.HolderReady(identity, 1000, packed_bytes))

    def end(self, identity: str, reason: str = "killed") -> list[e.Instruction]:
        """A holder ends: as told, by itself, or before it was ready."""
        was_told = self.holders.pop(identity) == "ending"
        self.packing.pop(identity, None)
        if identity in self.packed:
            self._disown(self.packed.pop(identity))
        if was_told and identity in self.raw:
            self._disown(self.raw.pop(identity))
        if identity not in {*self.raw, *self.loads}:
            self.doomed.discard(identity)
        return self.tell(e.HolderGone(identity, reason))

    def spawn(self, request: int) -> list[e.Instruction]:
        """A start succeeds: that is the answer."""
        start = self.starts.pop(request)
        self._answer(request, start.instruction.__class__.__name__)
        if start.segment is not None:
            self.claims[request] = start.segment
        if isinstance(start.instruction, e.FillStandby):
            del self.standbys[start.instruction.standby]
        return self.tell(e.Spawned(request, 2000))

    def fail_spawn(self, request: int) -> list[e.Instruction]:
        """A start fails."""
        start = self.starts.pop(request)
        if start.segment is not None:
            start.segment.users.discard(request)
            self._forget(start.segment)
        if isinstance(start.instruction, e.FillStandby):
            del self.standbys[start.instruction.standby]
        self.open -= self.gone & {request}  # nobody is left to be answered
        return self.tell(e.SpawnFailed(request, "fork: out of memory"))

    def release(self, request: int) -> list[e.Instruction]:
        """A claim is closed."""
        segment = self.claims.pop(request)
        segment.users.discard(request)
        self._forget(segment)
        return self.tell(e.Released(request))


def fork(
    number: int, *needs: object, prepare: str = "none", shape: str = "", private: bool = False
) -> e.ForkAsked:
    return e.ForkAsked(number, tuple(needs), prepare, shape, private)  # type: ignore[arg-type]


def holding(node: Node, *stages: object, request: int = 900) -> None:
    """Holders of these stages, ready, mapped by nobody, used one second after the other."""
    for offset, stage in enumerate(stages):
        node.now_s += 1.0
        number = request + offset
        node.tell(fork(number, stage))
        identity = stage.identity  # type: ignore[attr-defined]
        if identity in node.loads:
            node.load(identity)
            node.hold(identity)
        node.spawn(number)
        node.release(number)


def only(instructions: list[e.Instruction], kind: type) -> object:
    found = [i for i in instructions if isinstance(i, kind)]
    assert len(found) == 1, instructions
    return found[0]
