"""Who gets room in memory, who gives it, and what is loaded ahead of demand."""

from __future__ import annotations

from support.keysmanager_ledger import MIB, Node, fork, holding, only, parameters

from keystage.keysmanager import events as e
from keystage.keysmanager.ledger import Ledger, LedgerSettings

A, B, C = parameters(1), parameters(2), parameters(3)
CPU = LedgerSettings(prepare="cpu", packed_ratio=1.0)


class TestRoom:
    def test_the_least_recently_used_goes_and_only_then_is_loaded(self) -> None:
        node = Node(budget_bytes=200 * MIB)
        holding(node, A, B)
        assert node.tell(fork(1, C)) == [e.EndHolder(A.identity)]
        assert node.tell(fork(2, A)) == []
        assert node.end(A.identity)[0] == e.Load(C)

    def test_mapped_and_starting_ones_stay(self) -> None:
        node = Node(budget_bytes=300 * MIB)
        holding(node, A, B, C)
        node.tell(fork(1, A))
        node.spawn(1)
        node.tell(fork(2, B))  # starting
        assert node.tell(fork(3, parameters(4))) == [e.EndHolder(C.identity)]

    def test_no_more_than_needed_and_none_in_vain(self) -> None:
        node = Node(budget_bytes=300 * MIB)
        holding(node, A, B, C)
        node.tell(fork(1, B))
        node.spawn(1)
        assert only(node.tell(fork(2, parameters(4, 250 * MIB))), e.Spawn)  # 200 would be freed: too little
        assert node.tell(fork(3, parameters(5, 150 * MIB))) == [
            e.EndHolder(A.identity),
            e.EndHolder(C.identity),
        ]

    def test_key_stages_go_last_and_the_lowest_rank_first(self) -> None:
        node = Node(budget_bytes=300 * MIB)
        holding(node, A, B, C)  # A least recently used, C most
        node.tell(e.KeyStagesSet((A, B)))
        assert node.tell(fork(1, parameters(4))) == [e.EndHolder(C.identity)]
        assert node.tell(fork(2, parameters(5))) == [e.EndHolder(B.identity)]
        assert node.tell(fork(3, parameters(6))) == [e.EndHolder(A.identity)]

    def test_pressure_ends_until_it_is_under_the_budget(self) -> None:
        node = Node(budget_bytes=1000 * MIB)
        holding(node, A, B, C)
        node.others_bytes = 850 * MIB
        assert node.look() == [e.EndHolder(A.identity), e.EndHolder(B.identity)]
        assert node.look() == []  # still being given back
        node.end(A.identity)
        node.end(B.identity)
        assert node.look() == []

    def test_pressure_with_everything_mapped_ends_nothing(self) -> None:
        node = Node(budget_bytes=1000 * MIB)
        holding(node, A)
        node.tell(fork(1, A))
        node.spawn(1)
        node.others_bytes = 2000 * MIB
        assert node.look() == []
        assert node.release(1) == []
        assert node.look() == [e.EndHolder(A.identity)]

    def test_the_memory_of_a_dead_holder_counts_while_it_is_mapped(self) -> None:
        node = Node(budget_bytes=150 * MIB)
        node.tell(fork(1, A))
        node.load(A.identity)
        node.hold(A.identity)
        node.spawn(1)
        node.tell(e.Invalidated(A.identity))
        node.end(A.identity)
        assert node.ledger.segment_bytes == A.nbytes
        assert only(node.tell(fork(2, B)), e.Spawn)
        node.release(1)
        assert node.tell(fork(3, B)) == [e.Load(B)]

    def test_huge_pages_are_a_budget_of_their_own(self) -> None:
        node = Node(budget_bytes=100 * MIB)
        node.huge_total_bytes = 150 * MIB
        node.look()
        assert node.tell(fork(1, A)) == [e.Load(A, is_huge=True)]
        assert node.tell(fork(2, B)) == [e.Load(B)]
        node.load(A.identity)
        node.look()
        assert node.ledger.state.free_bytes(is_huge=True) == 50 * MIB
        assert node.ledger.state.free_bytes(is_huge=False) == 0

    def test_room_for_a_packed_form_nobody_wants_any_longer_is_given_back(self) -> None:
        node = Node(CPU, budget_bytes=200 * MIB)
        node.tell(fork(1, A, prepare="cpu"))
        node.tell(e.AskerGone(1))
        assert node.load(A.identity) == []  # done before it could be cancelled: kept while there is room
        assert node.tell(e.GetAsked(2, B)) == [e.Load(B)]

    def test_what_demand_waits_for_is_not_taken_ahead_of_it(self) -> None:
        node = Node(budget_bytes=300 * MIB)
        holding(node, A, B)
        large = parameters(5, 200 * MIB)
        assert node.tell(fork(1, large)) == [e.EndHolder(A.identity)]
        assert node.tell(e.KeyStagesSet((C,))) == []
        assert node.tell(e.GetAsked(2, C)) == [e.EndHolder(B.identity)]
        assert node.end(A.identity) == [e.Load(large)]

    def test_before_memory_was_seen_nothing_is_loaded(self) -> None:
        ledger = Ledger(LedgerSettings())
        assert isinstance(ledger.handle(fork(1, A), 0.0)[0], e.Spawn)


class TestKeyStages:
    def test_loaded_by_rank_two_at_a_time(self) -> None:
        node = Node()
        assert node.tell(e.KeyStagesSet((A, B, C))) == [e.Load(A), e.Load(B)]
        assert node.load(A.identity) == [e.StartHolder(A, "none")]
        assert node.hold(A.identity) == [e.Load(C)]

    def test_only_unlisted_and_lower_ranked_ones_make_room(self) -> None:
        node = Node(budget_bytes=200 * MIB)
        holding(node, B, C)
        assert node.tell(e.KeyStagesSet((A, B))) == [e.EndHolder(C.identity)]
        assert node.end(C.identity) == [e.Load(A)]
        node.load(A.identity)
        node.hold(A.identity)
        assert node.tell(e.KeyStagesSet((A, B, C))) == []
        assert node.tell(e.KeyStagesSet((C, A, B))) == [e.EndHolder(B.identity)]

    def test_one_no_longer_listed_is_not_loaded_further(self) -> None:
        node = Node()
        node.tell(e.KeyStagesSet((A,)))
        assert node.tell(e.KeyStagesSet(())) == [e.CancelLoad(A.identity)]

    def test_a_failed_load_rests_longer_each_time(self) -> None:
        node = Node()
        node.tell(e.KeyStagesSet((A,)))
        for rest_s in (10.0, 20.0, 40.0):
            assert node.fail_load(A.identity) == []
            node.now_s += rest_s - 0.1
            assert node.tell(e.Ticked()) == []
            node.now_s += 0.2
            assert node.tell(e.Ticked()) == [e.Load(A)]
        node.fail_load(A.identity)
        assert node.tell(fork(1, A)) == [e.Load(A)]  # demand does not rest

    def test_nothing_is_loaded_ahead_right_after_pressure(self) -> None:
        node = Node()
        node.tell(e.KeyStagesSet((A,)))
        node.load(A.identity)
        node.hold(A.identity)
        node.others_bytes = 950 * MIB
        assert node.look() == [e.EndHolder(A.identity)]
        node.end(A.identity)
        node.others_bytes = 0
        assert node.look() == []
        node.now_s += 10.0
        assert node.tell(e.Ticked()) == [e.Load(A)]

    def test_pressure_cancels_a_load_nobody_waits_for(self) -> None:
        node = Node()
        node.tell(e.KeyStagesSet((A, B)))
        node.tell(fork(1, A))
        node.others_bytes = 850 * MIB
        assert node.look(filled_ratio=0.0) == []  # 200 MiB more would be 1050: not known yet
        assert node.look(filled_ratio=1.0) == [e.CancelLoad(B.identity)]
