"""One request, one holder, one outcome after the other: what the ledger says to each."""

from __future__ import annotations

import pytest
from support.keysmanager_ledger import MIB, Node, fork, holding, only, parameters

from keystage.keysmanager import events as e
from keystage.keysmanager.ledger import LedgerSettings

A, B, C = parameters(1), parameters(2), parameters(3)
CPU = LedgerSettings(prepare="cpu", packed_ratio=1.0)


class TestFork:
    def test_load_then_holder_then_child(self) -> None:
        node = Node()
        assert node.tell(fork(1, A)) == [e.Load(A)]
        node.now_s += 2.0
        assert node.load(A.identity) == [e.StartHolder(A, "none")]
        node.now_s += 0.5
        assert node.hold(A.identity) == [e.Spawn(1, A.identity, "holder", "disk", "", 2.5)]
        assert node.spawn(1) == [e.Remember(A.name, A.identity, is_valid=True)]
        (entry,) = node.ledger.entries()
        assert (entry.state, entry.claims, entry.uses, entry.nbytes) == ("ready", 1, 1, A.nbytes)

    def test_a_holder_that_is_ready_forks_at_once(self) -> None:
        node = Node()
        holding(node, A)
        assert node.tell(fork(1, A)) == [e.Spawn(1, A.identity, "holder", "memory", "", 0.0)]

    def test_two_at_once_share_one_load_and_one_holder(self) -> None:
        node = Node()
        assert node.tell(fork(1, A)) == [e.Load(A)]
        assert node.tell(fork(2, A)) == []
        assert node.tell(e.GetAsked(3, A)) == []
        done = node.load(A.identity)
        assert only(done, e.GiveSegment) == e.GiveSegment(3, A.identity, "disk")
        assert only(done, e.StartHolder) == e.StartHolder(A, "none")
        assert node.tell(fork(4, A)) == []
        assert [i.request for i in node.hold(A.identity) if isinstance(i, e.Spawn)] == [1, 2, 4]

    @pytest.mark.parametrize("needs", [(), (A, B)])
    def test_no_stage_or_several_start_from_the_fork_server(self, needs: tuple[object, ...]) -> None:
        node = Node()
        assert node.tell(fork(1, *needs)) == [e.Spawn(1, None, "fork-server", "", "", 0.0)]
        assert node.spawn(1) == []
        assert node.tell(e.Released(1)) == []

    def test_the_fork_server_failing_is_the_end_of_a_request(self) -> None:
        node = Node()
        node.tell(fork(1))
        assert node.fail_spawn(1) == [e.Refuse(1, "fork server: fork: out of memory", 502)]

    def test_a_failed_load_falls_back_with_its_reason(self) -> None:
        node = Node()
        node.tell(fork(1, A))
        node.tell(e.GetAsked(2, A))
        node.now_s += 1.0
        assert node.fail_load(A.identity) == [
            e.Spawn(1, None, "fork-server", "", "load failed: disk: gone", 1.0),
            e.Refuse(2, "disk: gone", 502),
        ]
        (entry,) = node.ledger.entries()
        assert (entry.state, entry.reason) == ("failed", "disk: gone")

    def test_no_room_falls_back_and_names_sizes(self) -> None:
        node = Node(budget_bytes=50 * MIB)
        (spawn,) = node.tell(fork(1, A))
        assert isinstance(spawn, e.Spawn)
        assert spawn.identity is None
        assert spawn.note == (
            "no room for 100.0 MiB: 50.0 MiB free of a budget of 50.0 MiB, and nothing more can be evicted"
        )
        refused = only(node.tell(e.GetAsked(2, A)), e.Refuse)
        assert isinstance(refused, e.Refuse)
        assert refused.status == 507

    def test_a_holder_that_dies_is_tried_once_more_then_the_fork_server(self) -> None:
        node = Node()
        node.tell(fork(1, A))
        node.load(A.identity)
        assert node.end(A.identity) == [e.StartHolder(A, "none")]
        assert node.end(A.identity, "signal 9") == [
            e.Spawn(1, None, "fork-server", "", "holder ended: signal 9", 0.0)
        ]

    def test_a_child_that_cannot_be_forked_is_tried_once_more(self) -> None:
        node = Node()
        holding(node, A)
        node.tell(fork(1, A))
        again = only(node.fail_spawn(1), e.Spawn)
        assert isinstance(again, e.Spawn)
        assert (again.identity, again.note) == (A.identity, "fork: out of memory")
        assert node.fail_spawn(1) == [e.Spawn(1, None, "fork-server", "", "fork: out of memory", 0.0)]

    def test_a_fork_in_flight_when_the_holder_dies_waits_for_its_outcome(self) -> None:
        node = Node()
        holding(node, A)
        node.tell(fork(1, A))
        assert node.end(A.identity) == []
        assert node.fail_spawn(1) == [e.StartHolder(A, "none")]
        assert only(node.hold(A.identity), e.Spawn)

    def test_a_child_may_be_gone_before_its_fork_is_told(self) -> None:
        node = Node()
        holding(node, A)
        node.tell(fork(1, A))
        node.tell(e.Released(1))
        node.spawn(1)
        assert node.ledger.entries()[0].claims == 0

    def test_an_asker_that_has_gone_ends_a_load_nobody_else_wants(self) -> None:
        node = Node()
        node.tell(fork(1, A))
        node.tell(fork(2, A))
        assert node.tell(e.AskerGone(1)) == []
        assert node.tell(e.AskerGone(2)) == [e.CancelLoad(A.identity)]
        # Wanted again while it is being cancelled: begun anew, not counted as a failure.
        assert node.tell(fork(3, A)) == []
        assert node.fail_load(A.identity) == [e.Load(A)]

    def test_an_asker_that_has_gone_is_not_retried(self) -> None:
        node = Node()
        holding(node, A)
        node.tell(fork(1, A))
        node.tell(e.AskerGone(1))
        assert node.fail_spawn(1) == []
        assert node.ledger.entries()[0].claims == 0


class TestCpu:
    def test_the_packed_form_takes_the_place_of_the_raw_one(self) -> None:
        node = Node(CPU)
        node.tell(fork(1, A, prepare="cpu"))
        assert node.load(A.identity) == [e.StartHolder(A, "cpu")]
        done = node.hold(A.identity)
        assert done[0] == e.DropRaw(A.identity)
        assert only(done, e.Spawn)
        assert node.ledger.segment_bytes == A.nbytes

    def test_room_for_both_forms_is_reserved(self) -> None:
        node = Node(CPU, budget_bytes=199 * MIB)
        assert only(node.tell(fork(1, A, prepare="cpu")), e.Spawn)
        node = Node(CPU, budget_bytes=200 * MIB)
        assert node.tell(fork(1, A, prepare="cpu")) == [e.Load(A)]
        # Nothing else fits meanwhile, though neither form is written yet.
        assert only(node.tell(e.GetAsked(2, B)), e.Refuse)

    def test_a_get_loads_the_raw_form_again_and_it_goes_with_its_last_user(self) -> None:
        node = Node(CPU)
        node.tell(fork(1, A, prepare="cpu"))
        node.load(A.identity)
        node.hold(A.identity)
        node.spawn(1)
        assert node.tell(e.GetAsked(2, A)) == [e.Load(A)]
        assert only(node.load(A.identity), e.GiveSegment)
        assert only(node.tell(e.GetAsked(3, A)), e.GiveSegment)
        assert node.release(2) == []
        assert node.release(3) == [e.DropRaw(A.identity)]
        assert node.ledger.entries()[0].claims == 1

    def test_another_device_than_the_holder_is_prepared_for(self) -> None:
        node = Node(CPU)
        node.tell(fork(1, A, prepare="cpu"))
        node.load(A.identity)
        (spawn,) = node.tell(fork(2, A, prepare="none"))
        assert spawn == e.Spawn(2, None, "fork-server", "", "the holder is prepared for cpu, not none", 0.0)

    def test_a_private_copy_never_maps_the_packed_form(self) -> None:
        node = Node(CPU)
        (spawn,) = node.tell(fork(1, A, prepare="cpu", private=True))
        assert isinstance(spawn, e.Spawn)
        assert spawn.identity is None
        assert "private" in spawn.note

    def test_packed_room_is_waited_for_after_a_get_has_loaded(self) -> None:
        node = Node(CPU, budget_bytes=300 * MIB)
        holding(node, B)
        node.tell(e.GetAsked(1, A))
        node.load(A.identity)
        assert node.tell(fork(2, A, prepare="cpu")) == [e.StartHolder(A, "cpu")]
        assert node.taken_bytes() == 300 * MIB


class TestInvalidated:
    def test_holder_ends_mapped_replicas_run_on_nothing_new_starts(self) -> None:
        node = Node()
        holding(node, A)
        node.tell(fork(1, A))
        node.spawn(1)
        assert node.tell(e.Invalidated(A.identity)) == [
            e.Remember(A.name, A.identity, is_valid=False),
            e.EndHolder(A.identity),
        ]
        assert node.ledger.entries()[0].claims == 1
        refused = only(node.tell(fork(2, A)), e.Refuse)
        assert isinstance(refused, e.Refuse)
        assert (refused.status, A.identity[:12] in refused.reason) == (409, True)
        assert only(node.tell(fork(3, B, A)), e.Refuse)
        node.end(A.identity)
        assert node.ledger.entries()[0].state == "leaving"
        node.release(1)
        assert node.ledger.entries() == []

    def test_a_starting_child_is_waited_for(self) -> None:
        node = Node()
        holding(node, A)
        node.tell(fork(1, A))
        assert node.tell(e.Invalidated(A.identity)) == [e.Remember(A.name, A.identity, is_valid=False)]
        assert e.EndHolder(A.identity) in node.spawn(1)

    def test_a_load_is_cancelled_and_those_who_wait_are_refused(self) -> None:
        node = Node()
        node.tell(e.KeyStagesSet((A,)))
        node.tell(fork(1, A))
        node.tell(e.GetAsked(2, A))
        done = node.tell(e.Invalidated(A.identity))
        assert [(i.request, i.status) for i in done if isinstance(i, e.Refuse)] == [(1, 409), (2, 409)]
        assert e.CancelLoad(A.identity) in done
        # It may be done already when the cancellation arrives.
        assert node.load(A.identity) == [e.EndHolder(A.identity)]
        assert node.end(A.identity) == []
        assert node.ledger.entries() == []

    def test_a_starting_holder_is_ended_when_it_is_ready(self) -> None:
        node = Node(CPU)
        node.tell(fork(1, A, prepare="cpu"))
        node.load(A.identity)
        node.tell(e.Invalidated(A.identity))
        assert node.hold(A.identity) == [e.DropRaw(A.identity), e.EndHolder(A.identity)]

    def test_one_that_was_replaced_may_come_back(self) -> None:
        node = Node()
        holding(node, A)
        node.tell(fork(1, A))
        assert node.tell(e.Invalidated(A.identity, is_revoked=False)) == [
            e.Remember(A.name, A.identity, is_valid=False)
        ]
        assert node.tell(fork(2, A)) == []  # never from what was replaced
        assert e.EndHolder(A.identity) in node.spawn(1)
        assert node.end(A.identity) == [e.Load(A)]
        node.load(A.identity)
        assert only(node.hold(A.identity), e.Spawn)

    def test_revoked_identities_are_bounded(self) -> None:
        node = Node(LedgerSettings(prepare="none", revoked_limit=2))
        for stage in (A, B, C):
            node.tell(e.Invalidated(stage.identity))
        node.revoked.discard(A.identity)
        assert node.tell(fork(1, A)) == [e.Load(A)]
        assert only(node.tell(fork(2, B)), e.Refuse)


class TestEvict:
    def test_done_when_its_memory_is_back_and_a_key_stage_rests(self) -> None:
        node = Node()
        holding(node, A)
        node.tell(e.KeyStagesSet((A,)))
        assert node.tell(e.EvictAsked(1, A.identity)) == [e.EndHolder(A.identity)]
        assert node.tell(e.EvictAsked(2, A.identity)) == []
        assert node.end(A.identity) == [e.Done(1), e.Done(2)]
        assert node.tell(e.Ticked()) == []
        node.now_s += 60.0
        assert node.tell(e.Ticked()) == [e.Load(A)]

    def test_refused_while_used_and_for_the_unknown(self) -> None:
        node = Node()
        assert node.tell(e.EvictAsked(1, A.identity)) == [
            e.Refuse(1, f"no holder of {A.identity[:12]} here", 404)
        ]
        node.tell(fork(2, A))
        reasons = [only(node.tell(e.EvictAsked(3, A.identity)), e.Refuse)]
        node.load(A.identity)
        reasons.append(only(node.tell(e.EvictAsked(4, A.identity)), e.Refuse))
        node.hold(A.identity)
        node.spawn(2)
        reasons.append(only(node.tell(e.EvictAsked(5, A.identity)), e.Refuse))
        assert [(r.status, r.reason.split(": ")[1]) for r in reasons if isinstance(r, e.Refuse)] == [
            (409, "it is being loaded"),
            (409, "it is starting"),
            (409, "1 consumers map it or start from it"),
        ]


class TestStandbys:
    def ready(self, node: Node, shape: str = "s", count: int = 1) -> list[int]:
        numbers = [
            i.standby for i in node.tell(e.StandbysWanted(shape, count)) if isinstance(i, e.StartStandby)
        ]
        for number in numbers:
            node.standbys[number] = "idle"
            node.tell(e.StandbyReady(number, 3000 + number))
        return numbers

    def test_filled_from_the_raw_form_and_replaced_a_little_later(self) -> None:
        node = Node()
        holding(node, A)
        (number,) = self.ready(node)
        assert node.tell(fork(1, A, shape="s")) == [e.FillStandby(1, number, A.identity, "memory", 0.0)]
        assert [s.state for s in node.ledger.standbys()] == ["filling"]
        assert node.tell(fork(2, A, shape="s"))[0] == e.Spawn(2, A.identity, "holder", "memory", "", 0.0)
        node.spawn(1)
        assert node.tell(e.Ticked()) == []
        node.now_s += 1.0
        assert node.tell(e.Ticked()) == [e.StartStandby(number + 1, "s")]

    def test_a_load_for_a_standby_needs_no_holder(self) -> None:
        node = Node()
        self.ready(node)
        assert node.tell(fork(1, A, shape="s")) == [e.Load(A)]
        assert only(node.load(A.identity), e.FillStandby)

    def test_a_failed_fill_falls_to_the_holder(self) -> None:
        node = Node()
        holding(node, A)
        self.ready(node)
        node.tell(fork(1, A, shape="s"))
        assert only(node.fail_spawn(1), e.Spawn)

    def test_never_for_another_shape_nor_a_private_copy(self) -> None:
        node = Node()
        holding(node, A)
        self.ready(node)
        assert only(node.tell(fork(1, A, shape="t")), e.Spawn)
        assert only(node.tell(fork(2, A, shape="s", private=True)), e.Spawn)

    def test_surplus_ends_and_failures_rest(self) -> None:
        node = Node()
        numbers = self.ready(node, count=2)
        assert node.tell(e.StandbysWanted("s", 1)) == [e.EndStandby(numbers[1])]
        node.standbys.pop(numbers[1])
        assert node.tell(e.StandbyGone(numbers[1], "told")) == []
        (start,) = node.tell(e.StandbysWanted("s", 2))
        assert isinstance(start, e.StartStandby)
        node.standbys.pop(start.standby)
        assert node.tell(e.StandbyGone(start.standby, "no GPU")) == []
        node.now_s += 4.9
        assert node.tell(e.Ticked()) == []
        node.now_s += 0.2
        assert only(node.tell(e.Ticked()), e.StartStandby)

    def test_one_that_is_starting_is_ended_once_idle_and_its_shape_forgotten(self) -> None:
        node = Node()
        (start,) = node.tell(e.StandbysWanted("s", 1))
        assert isinstance(start, e.StartStandby)
        assert node.tell(e.StandbysWanted("s", 0)) == []
        node.standbys[start.standby] = "idle"
        assert node.tell(e.StandbyReady(start.standby, 1)) == [e.EndStandby(start.standby)]
        node.tell(e.StandbyGone(start.standby, "told"))
        assert node.ledger.state.shapes == {}

    def test_pressure_leaves_standbys_alone(self) -> None:
        node = Node()
        self.ready(node)
        node.others_bytes = 2000 * MIB
        assert node.look() == []


def test_lists_tell_unix_seconds() -> None:
    node = Node()
    holding(node, A, B)
    node.tell(e.KeyStagesSet((A,)))
    entries = node.ledger.entries(unix_offset_s=1000.0)
    assert [(x.stage, x.rank, x.used_at_s, x.loaded_at_s) for x in entries] == [
        (1, 0, 1101.0, 1101.0),
        (2, None, 1102.0, 1102.0),
    ]


def test_a_get_takes_the_packed_form_where_it_may_and_keeps_it_in_use() -> None:
    node = Node(CPU)
    node.tell(e.KeyStagesSet((A,)))
    node.load(A.identity)
    node.hold(A.identity)
    assert A.identity in node.packed
    assert only(node.tell(e.GetAsked(1, A, takes_packed=True)), e.GiveSegment).is_packed
    assert only(node.tell(e.EvictAsked(2, A.identity)), e.Refuse).status == 409
    assert node.tell(e.GetAsked(3, A)) == [e.Load(A)]  # raw bytes alone serve: they come again
    assert not only(node.load(A.identity), e.GiveSegment).is_packed
