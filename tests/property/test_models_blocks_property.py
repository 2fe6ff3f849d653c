"""The block pool against a plain dict: nobody shares a block, none is lost, refusals change nothing."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from keystage.models.blocks import BLOCK_TOKENS, BlockPool, blocks_for

SLOTS = st.integers(-1, 6)


class PoolMachine(RuleBasedStateMachine):
    """`BlockPool` of 9 blocks beside {slot: tokens it asked for}."""

    TOTAL = 9

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.TOTAL)
        self.tokens: dict[int, int] = {}

    def used(self) -> int:
        return sum(-(-tokens // 16) for tokens in self.tokens.values())

    @rule(slot=SLOTS, tokens=st.integers(0, 200))
    def reserve(self, slot: int, tokens: int) -> None:
        before = list(self.pool.table(slot))
        has = self.tokens.get(slot, 0)
        grown = max(tokens, has)
        fits = self.used() - -(-has // 16) + -(-grown // 16) <= self.TOTAL
        table = self.pool.reserve(slot, tokens)
        assert (table is not None) == fits
        if table is None:
            assert self.pool.table(slot) == before
            return
        self.tokens[slot] = grown
        assert table[: len(before)] == before
        assert len(table) == blocks_for(grown)

    @rule(slot=SLOTS)
    def free(self, slot: int) -> None:
        assert self.pool.free(slot) == -(-self.tokens.pop(slot, 0) // 16)
        assert self.pool.table(slot) == []

    @invariant()
    def nothing_is_lost_or_shared(self) -> None:
        tables = [block for slot in self.pool.slots for block in self.pool.table(slot)]
        assert len(set(tables)) == len(tables) == self.used()
        assert all(0 <= block < self.TOTAL for block in tables)
        assert self.pool.free_blocks == self.TOTAL - self.used()


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_pool_of_a_million_blocks_costs_nothing_until_it_is_used() -> None:
    pool = BlockPool(1 << 40)
    assert pool.reserve(1, 3 * BLOCK_TOKENS + 1) == [0, 1, 2, 3]
    assert pool.free_blocks == (1 << 40) - 4


def test_a_pool_without_blocks_refuses_everything_but_nothing() -> None:
    pool = BlockPool(-1)
    assert pool.total == pool.free_blocks == 0
    assert pool.reserve(1, 1) is None
    assert pool.reserve(1, 0) == []
