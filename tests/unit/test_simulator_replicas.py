"""Time lines of replicas: starts by source, pending, victims, draining, cores, failures."""

from __future__ import annotations

import pytest
from support.simulated_worlds import BY_SOURCE, GB, Script, gpu_stage, line, server, world

from keystage.controller.domain.decision import KeyStage, PublishKeyStages, SetCpu, SetReplicas, Site
from keystage.controller.domain.snapshot import Placed, Snapshot, StageView
from keystage.simulator.api import FailureSpec, LoadSpec, NodeSpec, StageSpec, World
from keystage.simulator.errors import WorldError
from keystage.simulator.measures import check
from keystage.simulator.platform import SimulatedPlatform
from keystage.simulator.run import simulate


def stage(platform: SimulatedPlatform, k: int = 0) -> StageView:
    return platform.observe().pipelines[0].stages[k]


def placed(platform: SimulatedPlatform) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(p.replica, p.node, p.gpus) for p in stage(platform).scale.placed]


def idle(*stages: StageSpec, **fields: object) -> SimulatedPlatform:
    """A world without traffic."""
    return SimulatedPlatform(world(line(*stages), **fields), 1)


def test_a_replica_takes_its_parameters_from_the_nearest_source() -> None:
    platform = idle(gpu_stage(), nodes=(server(2),), load=BY_SOURCE.__class__(**_load(holders="key-stages")))
    platform.apply([SetReplicas("p-stage-0", 2, sites=(Site("node-1", (0,)),))])  # nothing there: disk
    (starting,) = stage(platform).scale.starting
    assert starting.expected_ready_s == pytest.approx(5.5)
    platform.advance(5.5)
    assert stage(platform).scale.ready == 2
    platform.apply([SetReplicas("p-stage-0", 3, sites=(Site("node-1", (2,)),))])  # its GPU 0 has them
    assert stage(platform).scale.starting[0].expected_ready_s == pytest.approx(6.1)
    platform.advance(7)
    platform.apply([PublishKeyStages("p", (KeyStage(0, 1.0),)), SetReplicas("p-stage-0", 0)])
    assert all("p-stage-0" in node.in_memory for node in platform.observe().nodes)
    platform.apply([SetReplicas("p-stage-0", 1)])
    assert stage(platform).scale.starting[0].expected_ready_s == pytest.approx(8.0)
    platform.advance(9)
    (outcome,) = platform.outcome().pipelines[0].stages
    assert outcome.starts_by_source == {"gpu": 1, "memory": 1, "disk": 1, "remote": 0}


def _load(**fields: object) -> dict[str, object]:
    return {name: getattr(BY_SOURCE, name) for name in BY_SOURCE.__struct_fields__} | fields


def test_without_disk_parameters_come_from_afar() -> None:
    platform = idle(gpu_stage(replicas=0), nodes=(server(1, disk=False),), load=BY_SOURCE)
    platform.apply([SetReplicas("p-stage-0", 1)])
    assert stage(platform).scale.starting[0].expected_ready_s == pytest.approx(50.5)


def test_start_times_are_told_by_source() -> None:
    starts = stage(idle(gpu_stage(), nodes=(server(),), load=BY_SOURCE)).starts
    assert starts is not None
    assert (starts.gpu_s, starts.memory_s, starts.disk_s, starts.remote_s) == (0.6, None, 5.5, 50.5)
    starts = stage(idle(gpu_stage(), nodes=(server(),), load=LoadSpec(fixed_s=2, disk_bps=GB))).starts
    assert starts is not None
    assert (starts.gpu_s, starts.memory_s, starts.disk_s, starts.remote_s) == (None, None, 7.0, None)


def test_host_memory_evicts_the_least_recently_used() -> None:
    load = LoadSpec(memory_bps=GB, disk_bps=GB, holders="key-stages", key_stages=9)
    stages = [gpu_stage() for _ in range(3)]
    platform = idle(*stages, nodes=(server(1, gpus=8, memory_bytes=11 * GB),), load=load)
    ranking = [KeyStage(k, 1.0) for k in range(3)]
    platform.apply([PublishKeyStages("p", tuple(ranking[:2]))])
    platform.apply([SetReplicas("p-stage-0", 2)])  # started from memory: used last
    platform.apply([PublishKeyStages("p", tuple(ranking))])
    (node,) = platform.observe().nodes
    assert node.in_memory == {"p-stage-0", "p-stage-2"}
    assert node.memory_free_bytes == GB


def in_memory(platform: SimulatedPlatform) -> list[set[str]]:
    return [set(node.in_memory) for node in platform.observe().nodes]


def test_a_stage_that_is_scaled_up_is_a_key_stage_from_then_on() -> None:
    load = LoadSpec(memory_bps=10 * GB, disk_bps=GB, holders="key-stages", key_stages=0)
    platform = idle(gpu_stage(), gpu_stage(), nodes=(server(2),), load=load)
    assert in_memory(platform) == [set(), set()]
    platform.apply([SetReplicas("p-stage-0", 2)])  # its first replica's node has the parameters now
    assert in_memory(platform) == [{"p-stage-0"}, set()]
    platform.apply([SetReplicas("p-stage-0", 1)])
    platform.advance(10)
    assert in_memory(platform) == [{"p-stage-0"}, set()]


def test_every_node_fetches_a_new_key_stage_in_turn_when_the_world_prewarms() -> None:
    load = LoadSpec(memory_bps=10 * GB, disk_bps=GB, holders="key-stages", key_stages=0, prewarm=True)
    platform = idle(gpu_stage(), gpu_stage(), nodes=(server(2),), load=load)
    platform.apply([SetReplicas("p-stage-0", 2, sites=(Site("node-0", (1,)),)), SetReplicas("p-stage-1", 2)])
    platform.advance(4.9)
    assert in_memory(platform)[1] == {"p-stage-1"}  # it ran there
    platform.advance(5.1)
    assert in_memory(platform)[1] == {"p-stage-0", "p-stage-1"}
    site = (Site("node-1", (3,)),)
    platform.apply([SetReplicas("p-stage-0", 3, sites=site)])
    (late,) = [s for s in stage(platform).scale.starting if s.expected_ready_s > 5.5]
    assert late.expected_ready_s == pytest.approx(5.1 + 0.5)


PREWARM = LoadSpec(memory_bps=10 * GB, disk_bps=GB, holders="key-stages", key_stages=9, prewarm=True)


def test_fetches_without_a_disk_rate_come_from_afar_and_take_their_time() -> None:
    load = LoadSpec(memory_bps=10 * GB, remote_bps=0.5 * GB, holders="key-stages", prewarm=True)
    platform = idle(gpu_stage(), nodes=(server(2),), load=load)
    platform.apply([PublishKeyStages("p", (KeyStage(0, 1.0),))])
    platform.advance(9.9)
    assert in_memory(platform) == [{"p-stage-0"}, set()]
    platform.advance(10.1)
    assert in_memory(platform) == [{"p-stage-0"}, {"p-stage-0"}]


def test_what_a_node_was_fetching_is_lost_when_it_fails_and_fetched_anew_when_it_is_back() -> None:
    failures = (FailureSpec(at_s=2.0, node="node-1", for_s=1.0),)
    platform = idle(gpu_stage(), nodes=(server(2),), load=PREWARM, failures=failures)
    platform.apply([PublishKeyStages("p", (KeyStage(0, 1.0),))])
    platform.advance(5.5)  # begun at 0, it would have ended at 5
    assert in_memory(platform)[1] == set()
    platform.advance(7.9)
    assert in_memory(platform)[1] == set()
    platform.advance(8.1)  # back at 3, 5 seconds
    assert in_memory(platform)[1] == {"p-stage-0"}


def test_a_node_that_fails_again_while_it_is_away_stays_away_for_the_longer() -> None:
    failures = (
        FailureSpec(at_s=1.0, node="node-1", for_s=10.0),
        FailureSpec(at_s=2.0, node="node-1", for_s=3.0),
        FailureSpec(at_s=20.0, node="node-1", for_s=2.0),
        FailureSpec(at_s=21.0, node="node-1", for_s=4.0),
    )
    platform = idle(gpu_stage(), nodes=(server(2),), failures=failures)
    seen = []
    for at_s in (5.5, 10.9, 11.1, 22.5, 24.9, 25.1):
        platform.advance(at_s)
        seen.append(len(platform.observe().nodes))
    assert seen == [1, 1, 2, 1, 1, 2]


def test_starts_have_the_disk_before_fetches() -> None:
    """Stage 1 starts on node 1 from its disk until 5 s; the fetch of stage 0 there begins then."""
    platform = idle(gpu_stage(), gpu_stage(), nodes=(server(2),), load=PREWARM)
    platform.apply([PublishKeyStages("p", (KeyStage(0, 1.0),))])
    site = (Site("node-0", (2,)),)
    platform.apply([SetReplicas("p-stage-1", 2, sites=site)])  # from the disk of node 0, ready at 5
    assert stage(platform, 1).scale.starting[0].expected_ready_s == pytest.approx(5.0)
    platform.advance(5.1)
    # Node 1 fetched stage 0, its disk being free; node 0 does not fetch what a start there loads.
    assert in_memory(platform) == [{"p-stage-0", "p-stage-1"}, {"p-stage-0", "p-stage-1"}]
    other = idle(gpu_stage(), gpu_stage(), gpu_stage(replicas=0), nodes=(server(2),), load=PREWARM)
    other.apply([SetReplicas("p-stage-2", 1, sites=(Site("node-1", (3,)),))])  # from disk until 5
    other.advance(1.0)
    other.apply([PublishKeyStages("p", (KeyStage(0, 1.0),))])
    other.advance(9.9)
    assert "p-stage-0" not in in_memory(other)[1]
    other.advance(10.1)
    assert "p-stage-0" in in_memory(other)[1]


def test_a_fetch_stands_still_while_a_start_reads_the_disk() -> None:
    platform = idle(gpu_stage(), gpu_stage(), gpu_stage(replicas=0), nodes=(server(2),), load=PREWARM)
    platform.apply([PublishKeyStages("p", (KeyStage(0, 1.0),))])
    platform.advance(2.0)
    platform.apply([SetReplicas("p-stage-2", 1, sites=(Site("node-1", (3,)),))])  # from disk, 2 to 7
    platform.advance(9.9)
    assert "p-stage-0" not in in_memory(platform)[1]
    platform.advance(10.1)
    assert "p-stage-0" in in_memory(platform)[1]


def test_parameters_stay_where_they_ran_from_the_start_if_the_world_says_so() -> None:
    load = LoadSpec(memory_bps=10 * GB, disk_bps=GB, holders="ran")
    platform = idle(gpu_stage(), gpu_stage(), nodes=(server(2),), load=load)
    assert in_memory(platform) == [{"p-stage-0"}, {"p-stage-1"}]


def test_a_replica_without_room_holds_nothing_and_starts_when_room_appears() -> None:
    platform = idle(gpu_stage(), gpu_stage(), nodes=(server(1, gpus=3),), load=LoadSpec(fixed_s=1))
    platform.apply([SetReplicas("p-stage-0", 3)])
    scale = stage(platform).scale
    assert (scale.desired, scale.ready, len(scale.starting)) == (3, 1, 1)
    platform.advance(5)
    assert stage(platform).scale.ready == 2
    platform.apply([SetReplicas("p-stage-1", 0)])
    assert len(stage(platform).scale.starting) == 1
    platform.advance(6)
    assert stage(platform).scale.ready == 3
    outcome = platform.outcome()
    assert outcome.gpu_s == pytest.approx(6 + 6 + 5 + 1)  # first, second, the other stage's, third


def test_the_world_chooses_the_node_with_most_free_gpus_and_follows_a_site_with_room() -> None:
    platform = idle(gpu_stage(replicas=0), nodes=(server(1, gpus=2), server(1, gpus=4)))
    platform.apply([SetReplicas("p-stage-0", 1)])
    assert placed(platform) == [("p-stage-0-1", "node-1", (0,))]
    sites = (Site("node-1", (0,)), Site("node-0", (1,)), Site("nowhere", (0,)))
    platform.apply([SetReplicas("p-stage-0", 4, sites=sites)])
    assert placed(platform)[1:] == [
        ("p-stage-0-2", "node-1", (1,)),  # its site is taken
        ("p-stage-0-3", "node-0", (1,)),
        ("p-stage-0-4", "node-1", (2,)),
    ]


def test_starting_replicas_go_first_then_named_ones_then_the_youngest() -> None:
    platform = idle(gpu_stage(replicas=3), nodes=(server(2),), load=LoadSpec(fixed_s=9))
    platform.apply([SetReplicas("p-stage-0", 4)])
    platform.apply([SetReplicas("p-stage-0", 2, victims=("p-stage-0-1",))])
    assert [p[0] for p in placed(platform)] == ["p-stage-0-2", "p-stage-0-3"]
    platform.apply([SetReplicas("p-stage-0", 1)])
    assert [p[0] for p in placed(platform)] == ["p-stage-0-2"]


def test_an_idle_replica_goes_before_a_busy_one_which_drains_and_holds_its_gpu_until_then() -> None:
    spec = line(gpu_stage(alpha_s=10.0, replicas=2), times_s=(1.0, 2.0, 30.0))
    platform = SimulatedPlatform(world(spec, nodes=(server(),)), 1)
    platform.advance(1.5)
    platform.apply([SetReplicas("p-stage-0", 1)])
    assert [p[0] for p in placed(platform)] == ["p-stage-0-1"]  # number 2 was idle
    platform.advance(2.5)
    platform.apply([SetReplicas("p-stage-0", 0)])
    assert stage(platform).scale.ready == 0
    assert platform.observe().nodes[0].gpus[0].replicas == 1
    platform.advance(11.0)
    assert platform.observe().nodes[0].gpus[0].replicas == 0
    seen = stage(platform)
    assert (seen.routers[0].counters.services, seen.routers[0].counters.queue) == (1, 1)
    assert seen.scale.wake  # the second request waits for a function at zero


def test_a_replica_given_up_while_it_starts_never_serves() -> None:
    platform = idle(gpu_stage(replicas=0), nodes=(server(),), load=LoadSpec(fixed_s=1))
    platform.apply([SetReplicas("p-stage-0", 1)])
    platform.apply([SetReplicas("p-stage-0", 0)])
    platform.advance(3)
    assert stage(platform).scale.ready == 0
    assert platform.outcome().gpu_s == 0


def test_cores_change_the_service_time_at_once_and_stay_within_bounds() -> None:
    spec = StageSpec(alpha_s=0.1, cpu_core_s=0.4, cores=1, most_cores=8, replicas=2)
    platform = SimulatedPlatform(world(line(spec), nodes=(NodeSpec(cores=10),)), 1)
    assert stage(platform).batch is not None
    assert stage(platform).profile_s == pytest.approx(0.5)
    platform.apply([SetCpu("p-stage-0", 4)])
    seen = stage(platform)
    assert seen.cpu is not None
    assert (seen.cpu.cores, seen.cpu.most, seen.cpu.per_core_s) == (4, 8, 0.4)
    assert seen.profile_s == pytest.approx(0.2)
    platform.apply([SetCpu("p-stage-0", 99)])  # two replicas share ten cores
    assert stage(platform).cpu.cores == 5  # type: ignore[union-attr]
    assert platform.observe().nodes[0].cores_free == 0
    platform.advance(2)
    assert platform.outcome().cpu_core_s == pytest.approx(20)


def test_replicas_that_share_a_gpu_take_turns_and_count_it_once() -> None:
    shared = StageSpec(alpha_s=1.0, gpus=1, parameter_bytes=5 * GB, shared=True)
    spec = line(
        shared, StageSpec(alpha_s=1.0, gpus=1, parameter_bytes=5 * GB, shared=True), times_s=(0.0, 0.5)
    )
    outcome = simulate(world(spec, nodes=(server(1, gpus=1),)), None, 1)
    check(outcome)
    (pipeline,) = outcome.pipelines
    # At 1 s nobody waits but the second item, at stage 0; at 2 s stage 1 waits with the first item and comes
    # before the replica that gives the GPU up; then the second item.
    assert list(pipeline.finished_s) == [3.0, 4.0]
    assert outcome.ended_s == 4.0  # four services of a second, one after the other
    assert outcome.gpu_s == 4.0


def test_a_dead_replica_loses_nothing_and_is_replaced() -> None:
    spec = line(gpu_stage(alpha_s=1.0, most=4), times_s=(0.0, 0.1, 0.2))
    failures = (FailureSpec(at_s=0.5, function="p-stage-0"), FailureSpec(at_s=2.0, node="node-0", for_s=3.0))
    seen: list[tuple[float, int, int]] = []

    def watch(snapshot: Snapshot) -> None:
        scale = snapshot.pipelines[0].stages[0].scale
        seen.append((snapshot.at_s, scale.ready, len(snapshot.nodes)))

    w = world(spec, nodes=(server(),), load=LoadSpec(fixed_s=1), failures=failures, tick_s=0.5)
    outcome = simulate(w, Script([], watch), 1)
    check(outcome)
    # Dead at 0.5 and 2.0, back at 5.0, ready at 6.0: one batch of all three.
    assert list(outcome.pipelines[0].finished_s) == [9.0, 9.0, 9.0]
    assert (1.0, 0, 1) in seen
    assert (3.0, 0, 0) in seen
    assert outcome.pipelines[0].stages[0].starts == 2
    assert outcome.gpu_s == pytest.approx(0.5 + 1.5 + 4.0)


def test_series_tell_desired_and_ready() -> None:
    script = Script([(1.0, SetReplicas("p-stage-0", 2)), (4.0, SetReplicas("p-stage-0", 1))])
    w = world(line(gpu_stage()), nodes=(server(),), load=LoadSpec(fixed_s=2), duration_s=6, tick_s=0.5)
    series = simulate(w, script, 1).pipelines[0].stages[0].series
    assert series.tolist() == [[0, 1, 1], [1, 2, 1], [3, 2, 2], [4, 1, 1]]


def test_without_nodes_replicas_need_no_place() -> None:
    platform = idle(gpu_stage(replicas=50))
    snapshot = platform.observe()
    assert snapshot.nodes == ()
    assert snapshot.pipelines[0].stages[0].scale.placed == ()
    platform.advance(2)
    assert platform.outcome().gpu_s == 100


def test_more_at_the_start_than_the_cluster_holds_is_refused() -> None:
    with pytest.raises(WorldError, match="p-stage-0: no room for 5 replicas at the start, only for 4"):
        idle(gpu_stage(replicas=5), nodes=(server(),))


def test_placed_replicas_carry_their_gpus() -> None:
    two = StageSpec(alpha_s=0.1, gpus=2, parameter_bytes=50 * GB)
    platform = idle(two, nodes=(server(),))
    assert stage(platform).scale.placed == (Placed("p-stage-0-1", "node-0", (0, 1), True),)
    assert stage(platform).gpu_bytes == 40 * GB
    gpus = platform.observe().nodes[0].gpus
    assert [g.free_bytes for g in gpus] == [0, 0, 40 * GB, 40 * GB]


def test_start_times_spread_by_replica_alone() -> None:
    def ready_s(seed: int) -> list[float]:
        w: World = world(line(StageSpec(alpha_s=1.0, replicas=0)), load=LoadSpec(fixed_s=10, spread_s=0.5))
        platform = SimulatedPlatform(w, seed)
        platform.apply([SetReplicas("p-stage-0", 9)])
        platform.advance(100)
        return [row[0] for row in platform.outcome().pipelines[0].stages[0].series.tolist()[1:]]

    assert ready_s(1) == ready_s(1)
    assert ready_s(1) != ready_s(2)
    assert len(set(ready_s(1))) == 9
