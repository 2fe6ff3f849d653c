"""CPU compensator: fits, intervals, cores given and taken back, hand-back to the corrector."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest

from keystage.bundle.api import CpuRow
from keystage.controller.domain.snapshot import CpuView, FunctionView, PipelineView, Slo, StageView
from keystage.controller.domain.state import EstimatorState, StageState
from keystage.controller.maths import cpu_fit
from keystage.controller.maths.estimator import Estimates
from keystage.controller.maths.regression import BadProfile, least_squares
from keystage.controller.policy.compensator import compensate
from keystage.controller.policy.plan import Plan
from keystage.controller.policy.settings import PolicySettings

KNOWN = Estimates(
    arrival_rps=20.0, arrival_slow_rps=20.0, arrival_scv=1.0,
    service_s=0.04, service_scv=1.0, capacity_rps=25.0,
)  # fmt: skip
HELPS = CpuView(cores=1.0, most=4.0, per_core_s=0.02, low_s=0.015, high_s=0.025)


def run(plan: Plan, cpu: CpuView | None, settings: PolicySettings | None = None) -> Plan:
    stage = StageView(stage=0, scale=plan.scale, cpu=cpu)
    view = PipelineView(pipeline="p", execution="single-pass", slo=Slo(), stages=(stage,))
    (result,) = compensate(settings or PolicySettings(), view, [plan])
    return result


def plan(
    wanted: int = 1, corrected: int = 1, share_s: float = 1.0, known: Estimates = KNOWN, most: int = 9
) -> Plan:
    return Plan(
        scale=FunctionView(function="p-stage-0", desired=1, ready=1, max_replicas=most), wanted=wanted,
        reason="r", is_stage=True, pipeline="p", corrected=corrected, share_s=share_s, known=known,
    )  # fmt: skip


def test_a_share_that_is_exceeded_is_met_with_the_fewest_cores() -> None:
    """M/M/1: at 1 core 1/(25-20) = 0.2 s; at 2 cores 30 ms of service: 1/(33.3-20) = 75 ms."""
    done = run(plan(share_s=0.08), HELPS)
    assert (done.cores, done.wanted) == (2.0, 1)
    assert done.reason == "r; 2 cores"
    assert run(plan(share_s=0.21), HELPS).cores is None


def test_a_reclaimed_replica_is_made_up_for() -> None:
    """One replica where the corrector wanted two, within its share: cores that are as good as the second."""
    done = run(plan(wanted=1, corrected=2, share_s=1.0), HELPS)
    assert (done.cores, done.wanted) == (4.0, 1)  # 47.6 ms with two, 66.7 with 3 cores: 4 come nearest


def test_a_label_that_holds_replicas_back_is_made_up_for() -> None:
    assert run(plan(wanted=1, corrected=2, share_s=1.0, most=1), HELPS).cores == 4.0


def test_beyond_cpu_max_one_replica_goes_back_to_the_corrector() -> None:
    taken = msgspec.structs.replace(plan(share_s=0.045), reclaimed=2)
    done = run(taken, HELPS)
    assert (done.cores, done.wanted, done.reclaimed) == (4.0, 2, 1)
    assert done.reason.endswith("one handed back: 4 cores would not do")
    assert run(plan(share_s=0.045), HELPS).wanted == 1  # nothing was taken
    bound = msgspec.structs.replace(plan(share_s=0.045, most=1), reclaimed=2)
    assert run(bound, HELPS).wanted == 1  # never above a bound


@pytest.mark.parametrize(
    ("cpu", "words"),
    [
        (CpuView(1.0, 4.0, 0.02, -0.001, 0.04), "more cores are not known to help: -0.001 to 0.04 s x cores"),
        (CpuView(1.0, 4.0), "more cores are not known to help: no profile"),
        (CpuView(1.0, 4.0, math.nan, 0.1, 0.2), "more cores are not known to help"),
    ],
)
def test_where_the_interval_holds_zero_nothing_is_done_and_it_says_so(cpu: CpuView, words: str) -> None:
    done = run(plan(share_s=0.08), cpu)
    assert done.cores is None
    assert words in done.reason


def test_cores_are_given_back_with_a_margin_and_never_below_those_found() -> None:
    first = run(plan(share_s=0.08), HELPS)
    assert first.memory.cores == 1.0
    now = CpuView(cores=3.0, most=4.0, per_core_s=0.02, low_s=0.015, high_s=0.025)
    faster = Estimates(
        arrival_rps=20.0, arrival_slow_rps=20.0, service_s=0.04 - 0.02 * 2 / 3, service_scv=1.0,
        capacity_rps=1 / (0.04 - 0.02 * 2 / 3),
    )  # fmt: skip
    base = msgspec.structs.replace(first.memory, per_core=1 / 3)

    def at(share_s: float) -> float | None:
        busy = plan(share_s=share_s, known=faster)
        return run(msgspec.structs.replace(busy, memory=base), now).cores

    assert at(0.08) is None  # two would do, without a margin
    assert at(0.10) == 2.0
    assert at(10.0) == 1.0


def test_service_times_that_lag_a_change_of_cores_ask_for_no_more() -> None:
    """Two cores since a moment ago, the 60 s window still tells what one core did: two will do."""
    memory = StageState(cores=1.0, per_core=1.0, cores_at_s=100.0, estimator=EstimatorState(at_s=100.25))
    now = CpuView(cores=2.0, most=4.0, per_core_s=0.02, low_s=0.015, high_s=0.025)
    done = run(msgspec.structs.replace(plan(share_s=0.08), memory=memory), now)
    assert done.cores is None
    assert done.memory.per_core == pytest.approx(1 - 0.5 * 0.25 / 60, rel=1e-4)


def test_nothing_is_done_when_off_or_not_known() -> None:
    tight = plan(share_s=0.08)
    assert run(tight, HELPS, PolicySettings(compensation=False)) is tight
    assert run(tight, None) is tight
    unknown = plan(share_s=0.08, known=Estimates())
    assert run(unknown, HELPS).cores is None
    overload = run(plan(known=Estimates(arrival_rps=90.0, service_s=0.04, capacity_rps=25.0)), HELPS)
    assert overload.cores == 4.0


def test_the_fit_finds_the_line_it_was_made_of() -> None:
    rng = np.random.default_rng(3)
    rows = [
        CpuRow(
            latency_s=0.002 + 0.003 * b + 0.02 / c + 4e-9 * b * size / c + 1.5 * comm + rng.normal(0, 1e-5),
            cores=c, batch=b, activation_bytes=size, parameters=7e6, communication_s=comm,
        )
        for c in (1, 2, 3, 4) for b in (1, 2, 4, 8) for size in (1e5, 1e6) for comm in (0.001, 0.004)
    ]  # fmt: skip
    fitted = cpu_fit.fit(rows)
    assert fitted.left_out == ("queue", "parameters")  # do not vary: explained by the constant
    told = dict(zip(fitted.names, fitted.values, strict=True))
    assert told["per_core"] == pytest.approx(0.02, rel=1e-2)
    assert told["moved_per_core"] == pytest.approx(4e-9, rel=1e-2)
    found = cpu_fit.per_core_s(rows)
    assert found is not None
    value, low, high = found
    assert low < 0.02 + 4e-9 * 5.5e5 < high
    assert high - low < 1e-4
    assert low < value < high


def test_noise_without_a_slope_has_an_interval_around_zero() -> None:
    """Over 200 profiles of pure noise the 95 % interval misses 0 in 10 +- 3 sigma of 3.1."""
    missed = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        rows = [
            CpuRow(latency_s=0.01 + rng.normal(0, 1e-3), cores=c, batch=b)
            for c in (1, 2, 4) for b in (1, 2, 4, 8) for _ in range(3)
        ]  # fmt: skip
        found = cpu_fit.per_core_s(rows)
        assert found is not None
        missed += not found[1] <= 0 <= found[2]
    assert 1 <= missed <= 19


def test_profiles_that_tell_nothing_are_refused_by_name() -> None:
    row = CpuRow(latency_s=0.01, cores=1.0)
    with pytest.raises(BadProfile, match="1 rows for 1 independent regressors: at least 2"):
        cpu_fit.fit([row])
    with pytest.raises(BadProfile, match="0 rows"):
        cpu_fit.fit([])
    with pytest.raises(BadProfile, match="row 1 of the profile holds a value that is not finite"):
        cpu_fit.fit([row, CpuRow(latency_s=math.nan, cores=1.0), row])
    with pytest.raises(BadProfile, match=r"cores must be above 0 and batch at least 1, not 0 and 1"):
        cpu_fit.fit([CpuRow(latency_s=0.1, cores=0.0)])
    assert cpu_fit.per_core_s([row] * 5) is None  # cores never varied


def test_collinear_columns_are_left_out() -> None:
    x = np.array([[1.0, i, 2.0 * i, 0.0] for i in range(6)])
    fitted = least_squares(("one", "a", "twice", "zero"), x, np.arange(6, dtype=np.float64) * 3 + 1)
    assert fitted.names == ("one", "a")
    assert fitted.left_out == ("twice", "zero")
    assert fitted.combine({"a": 1.0, "one": 1.0}) == pytest.approx((4.0, 4.0, 4.0))
    assert fitted.combine({"twice": 1.0}) is None
