"""The local world's snapshot by example: batches, cores that are shared out, cores as deployed."""

from __future__ import annotations

import msgspec
import pytest

from keystage.bundle.api import StageProfile, emulated
from keystage.controller.domain.snapshot import Answered, BatchProfile, PipelineView
from keystage.controller.platforms.local_cap import Machine
from keystage.controller.platforms.local_cpu import Work
from keystage.controller.platforms.local_device import MAX_BATCH
from keystage.controller.platforms.local_expiry import Expiries
from keystage.controller.platforms.local_view import Seen, snapshot_of
from keystage.local.api import Deployment, FunctionRecord, Override, ReplicaRecord
from keystage.router.api import RouterStats, StageCounters
from keystage.worker.config import WorkerConfig

HELPS: Work = (0.02, 0.01, 0.03)
URL = "file:///b"
PROFILE = StageProfile(device="cpu", alpha_s=0.002, beta_s=0.01)


def function(name: str, cores: float | None = None, **env: str) -> FunctionRecord:
    deployment = Deployment(service=name, envVars={"KEYSTAGE_PIPELINE": "p"} | env)
    return FunctionRecord(deployment=deployment, created_at_s=0.0, cores=cores)


def stage(k: int, cores: float | None = None, **env: str) -> FunctionRecord:
    own = {"KEYSTAGE_ROLE": "stage", "KEYSTAGE_STAGES": str(k), "KEYSTAGE_BUNDLE": URL}
    return function(f"p-stage-{k}", cores, **(own | env))


def seen(
    *stages: FunctionRecord,
    execution: str = "single-pass",
    cores: int = 8,
    work: list[Work | None] | None = None,
    queues: tuple[int, ...] = (),
    profile: StageProfile | None = None,
    running: int = 1,
) -> PipelineView:
    """The pipeline as it is seen, with so many ready replicas of every stage."""
    bundle = emulated("p", max(1, len(stages)), execution="single-pass")
    profiled = [msgspec.structs.replace(s, profile=profile) for s in bundle.stages]
    stats = RouterStats(
        pipeline="p", incarnation="i", at_s=1.0, wall_s=1.0, execution=execution, requests=0, completed=0,
        refused={}, replayed_tokens=0, moves=0, replicas=[],
        stages=[StageCounters(k, 0, 0.0, 0.0, queue, *(0,) * 7) for k, queue in enumerate(queues)],
        due=9, in_time=7,
    )  # fmt: skip
    replicas = [
        ReplicaRecord(
            replica=f"{s.deployment.service}-{n}", function=s.deployment.service, generation=1, state="ready",
            pid=1, address="", started_at_s=0.0, ready_at_s=1.0,
        )
        for s in stages
        for n in range(running)
    ]  # fmt: skip
    snapshot = snapshot_of(
        Seen(
            at_s=10.0, functions=[function("p", KEYSTAGE_ROLE="router"), *stages], replicas=replicas,
            stats={"p": [stats]}, unread={}, machine=Machine(cores, 1 << 40), cpu_work={URL: work or []},
            bundles={URL: msgspec.structs.replace(bundle, stages=profiled)},
        )
    )  # fmt: skip
    (view,) = snapshot.pipelines
    return view


def test_batches_of_real_stages_are_told() -> None:
    view = seen(stage(0), stage(1, KEYSTAGE_MAX_BATCH="8"), stage(2, KEYSTAGE_SLOTS="3"), profile=PROFILE)
    assert [s.batch for s in view.stages] == [BatchProfile(0.002, 0.01, most) for most in (MAX_BATCH, 8, 3)]
    assert [s.profile_s for s in view.stages] == [pytest.approx(0.012)] * 3
    assert WorkerConfig.model_fields["max_batch"].default == MAX_BATCH
    assert seen(stage(0)).stages[0].batch is None  # nobody profiled it


def test_batches_of_emulated_stages_are_told_by_their_device() -> None:
    devices = ("emulated:alpha=0.001,beta=0.004,load=9", "emulated:beta=2e-3", "emulated", "emulated:alpha=x")
    view = seen(*(stage(k, KEYSTAGE_DEVICE=d) for k, d in enumerate(devices)))
    expected = [BatchProfile(0.001, 0.004, 64), BatchProfile(0.0, 0.002, 64), None, None]
    assert [s.batch for s in view.stages] == expected
    assert [s.profile_s for s in view.stages] == [pytest.approx(0.005), pytest.approx(0.002), None, None]


def test_waves_of_sessions_are_no_batches() -> None:
    view = seen(stage(0), execution="looping", profile=PROFILE)
    assert (view.execution, view.stages[0].batch) == ("looping", None)
    assert view.stages[0].profile_s == pytest.approx(0.012)


def test_what_requests_got_is_told_by_router() -> None:
    assert seen(stage(0), execution="looping").answered == (Answered("i", 9, 7),)


def most(view: PipelineView) -> list[float]:
    return [s.cpu.most for s in view.stages if s.cpu is not None]


def test_free_cores_are_given_out_once() -> None:
    """Four of eight cores are free: whatever three stages take of them, they stay within the machine."""
    view = seen(stage(0, cores=2.0), stage(1), stage(2), work=[HELPS] * 3, queues=(0, 5, 1))
    assert most(view) == [3.0, 3.0, 2.0]
    assert sum(most(view)) == 8


def test_cores_go_to_those_who_gain_by_them_and_in_whole_rounds() -> None:
    perhaps: Work = (0.02, -0.01, 0.03)
    assert most(seen(stage(0), stage(1), stage(2), work=[perhaps, HELPS, None])) == [1.0, 6.0, 1.0]
    rounds = seen(stage(0), stage(1), work=[HELPS] * 2, cores=11, running=2)  # a core each costs two of 7
    assert most(rounds) == [3.0, 2.0]
    assert most(seen(stage(0), stage(1), work=[HELPS] * 2, cores=1)) == [1.0, 1.0]  # they take turns


def test_cores_as_deployed_are_told_beside_those_of_now() -> None:
    cpu = seen(stage(0, cores=4.0, KEYSTAGE_THREADS="2"), work=[HELPS]).stages[0].cpu
    assert cpu is not None
    assert (cpu.cores, cpu.base) == (4.0, 2.0)


# ---------------------------------------------------------------- contradictions and clocks


def told(incarnation: str, execution: str = "single-pass", stages: int = 2) -> RouterStats:
    return RouterStats(
        pipeline="p", incarnation=incarnation, at_s=1.0, wall_s=1.0, execution=execution, requests=0,
        completed=0, refused={}, replayed_tokens=0, moves=0, replicas=[],
        stages=[StageCounters(k, 0, 0.0, 0.0, 0, *(0,) * 7) for k in range(stages)],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("stats", "missing"),
    [
        ([told("a"), told("b")], ""),
        (
            [told("a"), told("b", "looping")],
            "replicas of router p contradict each other: looping and single-pass",
        ),
        ([told("a"), told("a")], "two replicas of router p call themselves a"),
        (
            [told("a"), told("b", stages=3)],
            "replicas of router p contradict each other: they count 2 and 3 stages",
        ),
    ],
)
def test_routers_that_contradict_each_other_hold_their_pipeline(
    stats: list[RouterStats], missing: str
) -> None:
    snapshot = snapshot_of(
        Seen(
            at_s=10.0, functions=[function("p", KEYSTAGE_ROLE="router"), stage(0), stage(1)], replicas=[],
            stats={"p": stats}, unread={}, machine=Machine(8, 1 << 40), bundles={},
        )
    )  # fmt: skip
    (view,) = snapshot.pipelines
    assert view.missing == missing


def asked(replicas: int, expires_at_s: float) -> FunctionRecord:
    return msgspec.structs.replace(stage(0), override=Override(replicas, expires_at_s))


def ends_s(found: list[FunctionRecord]) -> float:
    assert found[0].override is not None
    return found[0].override.expires_at_s


@pytest.mark.parametrize("jump_s", [-3 * 3600.0, 3 * 3600.0])
def test_a_wall_clock_that_is_set_neither_ends_nor_prolongs_a_wish(jump_s: float) -> None:
    known = Expiries()
    assert ends_s(known.steadied([asked(3, 1600.0)], 1000.0, 1000.0)) == 1600.0
    # the clock is set while the wish holds
    assert ends_s(known.steadied([asked(3, 1600.0)], 1001.0, 1001.0 + jump_s)) == 1600.0
    # a wish that was written after that, for ten minutes again
    now_s = 1010.0 + jump_s
    assert ends_s(known.steadied([asked(2, now_s + 600.0)], 1010.0, now_s)) == 1610.0
    # one that was taken back is forgotten, and the same words later are a new one
    assert known.steadied([stage(0)], 1020.0, 1020.0 + jump_s)[0].override is None
    assert ends_s(known.steadied([asked(2, now_s + 600.0)], 1030.0, now_s + 20)) == 1610.0


def test_functions_without_a_wish_are_left_alone() -> None:
    records = [stage(0), stage(1)]
    assert Expiries().steadied(records, 1.0, 2.0) == records
