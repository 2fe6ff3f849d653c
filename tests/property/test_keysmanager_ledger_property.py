"""Whatever happens in whatever order, the ledger's orders are possible and its promises kept.

`support.keysmanager_ledger.Node` carries out what the ledger says and asserts with every order that
it is possible; here are the promises that need a look at the whole.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.keysmanager_ledger import MIB, Node, parameters

from keystage.keysmanager import events as e
from keystage.keysmanager.api import Parameters
from keystage.keysmanager.ledger import Ledger, LedgerSettings

SIZES = (60, 100, 100, 100, 250, 400)
STAGES = [parameters(number, nbytes * MIB) for number, nbytes in enumerate(SIZES)]
BUDGET = 350 * MIB

stage = st.sampled_from(STAGES)
prepare = st.sampled_from(["cpu", "none"])
shape = st.sampled_from(["", "s", "t"])
index = st.integers(0, 10)


def pick(items: Any, number: int) -> Any:
    """One of a collection, the same for the same number."""
    ordered = sorted(items)
    return ordered[number % len(ordered)]


class LedgerMachine(RuleBasedStateMachine):
    """Random questions, outcomes and deaths on a node without processes."""

    @initialize(default=prepare, huge=st.sampled_from([0, 0, 110]))
    def begin(self, default: Any, huge: int) -> None:
        self.default = default
        self.node = Node(LedgerSettings(prepare=default, packed_ratio=1.0), BUDGET)
        self.node.huge_total_bytes = huge * MIB
        self.node.look()
        self.next = 1
        self.asked: set[int] = set()
        self.listed: tuple[Parameters, ...] = ()

    # -------------------------------------------------------------- promises

    def check(self, instructions: list[e.Instruction], before: Before, evicts: str = "") -> None:
        """Who was ended went in order, and nothing was begun above the budget."""
        node = self.node
        if any(takes_memory(i) for i in instructions):
            assert node.taken_bytes() + node.others_bytes <= BUDGET
            assert node.taken_bytes(is_huge=True) <= node.huge_total_bytes
        ended = [
            i.identity
            for i in instructions
            if isinstance(i, e.EndHolder) and i.identity not in node.doomed and i.identity != evicts
        ]
        ranks = {p.identity: rank for rank, p in reversed(list(enumerate(self.listed)))}
        left = before.evictable - set(ended) - node.doomed - {evicts}
        left = {i for i in left if i in node.evictable() and memory_of(node, i)}
        for identity in ended:
            assert identity in before.evictable
            for other in left:
                # Of two unlisted ones the one used longer ago goes, and a listed one never first.
                if identity not in ranks and other not in ranks:
                    assert node.used_at_s[identity] <= node.used_at_s[other]
                if identity in ranks:
                    assert other in ranks
                    assert ranks[identity] > ranks[other]

    def tell(self, event: e.Event, evicts: str = "") -> list[e.Instruction]:
        before = Before(self.node.evictable())
        instructions = self.node.tell(event)
        self.check(instructions, before, evicts)
        return instructions

    @invariant()
    def bytes_agree(self) -> None:
        node = self.node
        assert node.ledger.segment_bytes == sum(s.nbytes for s in node.segments)
        assert sum(entry.claims for entry in node.ledger.entries()) == sum(
            len(s.users) for s in node.segments
        )

        if not node.loads and not node.packing:
            assert node.ledger.state.reserved_bytes(is_huge=False) == 0
            assert node.ledger.state.reserved_bytes(is_huge=True) == 0

    # -------------------------------------------------------------- questions

    @rule(stage=stage, shape=shape)
    def fork(self, stage: Parameters, shape: str) -> None:
        self.ask(e.ForkAsked(self.next, (stage,), self.default, shape))

    @rule(stage=stage, prepare=prepare, shape=shape, private=st.booleans())
    def fork_unusual(self, stage: Parameters, prepare: Any, shape: str, private: bool) -> None:
        self.ask(e.ForkAsked(self.next, (stage,), prepare, shape, private))

    @rule(stage=stage, shape=shape)
    def fork_whole(self, stage: Parameters, shape: str) -> None:
        """A replica from question to claim, if nothing is in its way."""
        number = self.next
        self.fork(stage, shape)
        identity = stage.identity
        if identity in self.node.loads:
            self.outcome(lambda: self.node.load(identity))
        if self.node.holders.get(identity) == "starting":
            self.outcome(lambda: self.node.hold(identity))
        if number in self.node.starts and self.node.starts[number].segment is None:
            self.outcome(lambda: self.node.spawn(number))

    @rule(number=index)
    @precondition(lambda self: any(s.segment is not None for s in self.node.starts.values()))
    def fail_start(self, number: int) -> None:
        request = pick((n for n, s in self.node.starts.items() if s.segment is not None), number)
        self.outcome(lambda: self.node.fail_spawn(request))

    @rule(stage=stage, takes_packed=st.booleans())
    def get(self, stage: Parameters, takes_packed: bool) -> None:
        self.ask(e.GetAsked(self.next, stage, takes_packed))

    @rule(needs=st.lists(stage, max_size=2))
    def fork_bare(self, needs: list[Parameters]) -> None:
        self.ask(e.ForkAsked(self.next, tuple(needs) if len(needs) > 1 else (), "cpu"))

    @rule(stage=stage)
    def evict(self, stage: Parameters) -> None:
        self.asked.add(self.next)
        self.next += 1
        self.tell(e.EvictAsked(self.next - 1, stage.identity), evicts=stage.identity)

    def ask(self, event: e.ForkAsked | e.GetAsked) -> None:
        self.asked.add(self.next)
        self.next += 1
        self.tell(event)

    @rule(stages=st.lists(stage, max_size=4, unique_by=lambda p: p.identity))
    def list_key_stages(self, stages: list[Parameters]) -> None:
        self.listed = tuple(p for p in stages if p.identity not in self.node.revoked)
        self.tell(e.KeyStagesSet(tuple(stages)))

    @rule(stage=stage, is_revoked=st.booleans())
    def invalidate(self, stage: Parameters, is_revoked: bool) -> None:
        if is_revoked and len(self.node.revoked) >= 2:
            return
        self.listed = tuple(p for p in self.listed if p.identity != stage.identity)
        self.tell(e.Invalidated(stage.identity, is_revoked))

    @rule(number=index)
    @precondition(lambda self: self.node.open)
    def go_away(self, number: int) -> None:
        self.tell(e.AskerGone(pick(self.node.open, number)))

    @rule(shape=st.sampled_from(["s", "t"]), count=st.integers(0, 2))
    def want_standbys(self, shape: str, count: int) -> None:
        self.tell(e.StandbysWanted(shape, count))

    # -------------------------------------------------------------- outcomes

    @rule(number=index, is_good=st.booleans())
    @precondition(lambda self: self.node.loads)
    def end_load(self, number: int, is_good: bool) -> None:
        identity = pick(self.node.loads, number)
        self.outcome(lambda: self.node.load(identity) if is_good else self.node.fail_load(identity))

    @rule(number=index)
    @precondition(lambda self: "starting" in self.node.holders.values())
    def holder_ready(self, number: int) -> None:
        identity = pick((i for i, s in self.node.holders.items() if s == "starting"), number)
        self.outcome(lambda: self.node.hold(identity))

    @rule(number=index)
    @precondition(lambda self: self.node.holders)
    def holder_gone(self, number: int) -> None:
        identity = pick(self.node.holders, number)
        self.outcome(lambda: self.node.end(identity))

    @rule(number=index, is_good=st.booleans())
    @precondition(lambda self: self.node.starts)
    def end_start(self, number: int, is_good: bool) -> None:
        request = pick(self.node.starts, number)
        self.outcome(lambda: self.node.spawn(request) if is_good else self.node.fail_spawn(request))

    @rule(number=index)
    @precondition(lambda self: self.node.claims)
    def release(self, number: int) -> None:
        request = pick(self.node.claims, number)
        self.outcome(lambda: self.node.release(request))

    @rule(number=index, is_good=st.booleans())
    @precondition(lambda self: self.node.standbys)
    def end_standby(self, number: int, is_good: bool) -> None:
        standby = pick(self.node.standbys, number)
        state = self.node.standbys[standby]
        if state == "filling":
            return
        if state == "starting" and is_good:
            self.node.standbys[standby] = "idle"
            self.outcome(lambda: self.node.tell(e.StandbyReady(standby, 1)))
        else:
            del self.node.standbys[standby]
            self.outcome(lambda: self.node.tell(e.StandbyGone(standby, "gone")))

    def outcome(self, act: Any) -> None:
        before = Before(self.node.evictable())
        # What an outcome itself makes evictable may go in the same breath.
        told: list[e.Instruction] = act()
        self.check(told, Before(before.evictable | self.node.evictable() | ended_in(told)))

    # -------------------------------------------------------------- the host

    @rule(others=st.sampled_from([0, 0, 50, 150, 400]), filled=st.floats(0.0, 1.0))
    def look(self, others: int, filled: float) -> None:
        node = self.node
        if not node.loads and not node.packing:
            node.others_bytes = others * MIB
        before = node.evictable()
        told = node.look(filled)
        self.check(told, Before(before))
        ended = [i.identity for i in told if isinstance(i, e.EndHolder)]
        if ended and not any(isinstance(i, e.Load | e.StartHolder | e.CancelLoad) for i in told):
            # Without the last of them there would be too much, or somebody waits for its room.
            is_awaited = bool(node.open - set(node.starts)) or self.listed
            over = node.taken_bytes() + node.others_bytes - BUDGET
            given = sum(memory_of(node, i) for i, s in node.holders.items() if s == "ending")
            assert is_awaited or over > given - memory_of(node, ended[-1])

    @rule(step_s=st.sampled_from([0.1, 2.0, 30.0, 400.0]))
    def pass_time(self, step_s: float) -> None:
        self.node.now_s += step_s
        self.tell(e.Ticked())

    # -------------------------------------------------------------- the end

    def teardown(self) -> None:
        if not hasattr(self, "node"):
            return
        node = self.node
        node.tell(e.KeyStagesSet(()))
        for name in ("s", "t"):
            node.tell(e.StandbysWanted(name, 0))
        for _ in range(200):
            if not (node.loads or node.holders or node.starts or node.claims or node.standbys):
                if not (node.raw or node.packed):
                    break
                node.tell(e.Invalidated(pick({*node.raw, *node.packed}, 0)))
            self.finish_one()
        # Every request was answered once, or its asker has gone; nothing is left anywhere.
        assert node.open <= node.gone
        assert all(len(answers) == 1 for answers in node.answers.values())
        assert node.segments == []
        node.now_s += 10_000.0
        node.tell(e.Ticked())
        state = node.ledger.state
        assert (state.entries, state.asked, state.held, state.standbys, state.shapes) == ({}, {}, [], {}, {})
        assert node.ledger.entries() == []

    def finish_one(self) -> None:
        node = self.node
        for identity in list(node.loads):
            node.load(identity)
        for identity, state in list(node.holders.items()):
            if state == "starting":
                node.hold(identity)
            elif state == "ending":
                node.end(identity)
        for request in list(node.starts):
            node.spawn(request)
        for request in list(node.claims):
            node.release(request)
        self.finish_standbys()
        is_quiet = not (node.loads or node.starts or "ending" in node.holders.values())
        if is_quiet and node.open <= node.gone:
            for identity in list(node.holders):
                node.tell(e.Invalidated(identity))

    def finish_standbys(self) -> None:
        node = self.node
        for standby, state in list(node.standbys.items()):
            if state == "starting":
                node.standbys[standby] = "idle"
                node.tell(e.StandbyReady(standby, 1))
            elif state == "ending":
                del node.standbys[standby]
                node.tell(e.StandbyGone(standby, "told"))


@dataclasses.dataclass(frozen=True)
class Before:
    """What could be ended when the event came."""

    evictable: set[str]


def ended_in(instructions: list[e.Instruction]) -> set[str]:
    return {i.identity for i in instructions if isinstance(i, e.EndHolder)}


def takes_memory(instruction: e.Instruction) -> bool:
    """It is begun in host memory that was not reserved before (a CPU holder's may have been)."""
    return isinstance(instruction, e.Load) and not instruction.is_huge


def memory_of(node: Node, identity: str) -> int:
    """Bytes of host memory that ending it gives back."""
    forms = (node.raw.get(identity), node.packed.get(identity))
    return sum(s.nbytes for s in forms if s is not None and not s.is_huge and not s.users)


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(
    max_examples=200,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


# ------------------------------------------------------------------ any event at all

number = st.integers(0, 4)
identity = st.sampled_from([p.identity for p in STAGES[:3]] + ["unknown"])
few = st.sampled_from(STAGES[:3])
any_event = st.one_of(
    st.builds(e.ForkAsked, number, st.lists(few, max_size=2).map(tuple), prepare, shape, st.booleans()),
    st.builds(e.GetAsked, number, few, st.booleans()),
    st.builds(e.AskerGone, number),
    st.builds(e.KeyStagesSet, st.lists(few, max_size=3).map(tuple)),
    st.builds(e.Invalidated, identity, st.booleans()),
    st.builds(e.EvictAsked, number, identity),
    st.builds(
        e.Loaded,
        identity,
        st.just("disk"),
        st.integers(0, 200 * MIB),
        st.just(1.0),
        st.sampled_from([0, 2 * MIB]),
    ),
    st.builds(e.LoadFailed, identity, st.just("r")),
    st.builds(e.HolderReady, identity, number, st.integers(-1, 200 * MIB)),
    st.builds(e.HolderGone, identity, st.just("r")),
    st.builds(e.Spawned, number, number),
    st.builds(e.SpawnFailed, number, st.just("r")),
    st.builds(e.Progressed, number, st.just("ready")),
    st.builds(e.Released, number),
    st.builds(e.StandbysWanted, st.sampled_from(["s", "t"]), st.integers(-1, 2)),
    st.builds(e.StandbyReady, number, number),
    st.builds(e.StandbyGone, number, st.just("r")),
    st.builds(e.MemorySeen, st.integers(0, 800 * MIB), st.integers(0, 800 * MIB), st.integers(0, 300 * MIB)),
    st.just(e.Ticked()),
)


@given(st.lists(st.tuples(any_event, st.floats(0.0, 50.0)), max_size=60))
@settings(max_examples=300, deadline=None)
def test_no_order_of_events_raises(told: list[tuple[e.Event, float]]) -> None:
    ledger = Ledger(LedgerSettings())
    now_s = 0.0
    answered: dict[int, int] = {}
    for event, step_s in told:
        now_s += step_s
        for instruction in ledger.handle(event, now_s):
            if isinstance(instruction, e.Refuse | e.Done | e.GiveSegment):
                answered[instruction.request] = answered.get(instruction.request, 0) + 1
        ledger.entries()
        ledger.standbys()
    asked = [x.request for x, _ in told if isinstance(x, e.ForkAsked | e.GetAsked | e.EvictAsked)]
    assert all(count <= asked.count(request) for request, count in answered.items())
