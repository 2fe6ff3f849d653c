"""What `keystage bench soak` calls a drift or a leak, and how it accounts for requests."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from keystage.bench import soak, soak_figures, soak_trend
from keystage.bench.frame import BenchError
from keystage.bench.paper_models import BERT
from keystage.bench.soak_trend import BLOCKS, by_role, trend
from keystage.bench.whole_client import RouterCount, Sent
from keystage.bench.whole_faults import accounted, faults_of
from keystage.bench.whole_models import parts
from keystage.bench.whole_watch import COLUMNS, ROLES
from keystage.bench.whole_world import Outcome, Plan, Served

DURATION_S = 400.0
AT_S = np.arange(0.0, DURATION_S, 2.0)


def noise(seed: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.random.default_rng(seed).normal(0, 1, len(AT_S))


def test_a_slope_is_found_with_an_interval_that_holds_it() -> None:
    found = trend(AT_S, 100 + 0.2 * AT_S + noise(1), DURATION_S)
    assert found.low < 0.2 < found.high
    assert found.is_growing
    assert found.verdict == "GROWS"
    assert found.span_s == pytest.approx(300 * (BLOCKS - 1) / BLOCKS)


def test_intervals_hold_a_flat_line_as_often_as_they_say() -> None:
    held = 0
    for seed in range(200):
        found = trend(AT_S, 100 + noise(seed), DURATION_S)
        held += found.low < 0 < found.high
    assert 180 <= held <= 198  # 95 % of 200; outside with a probability below 1 %


def test_what_is_a_part_is_judged_by_the_whole() -> None:
    """A send lag of 0.2 ms that doubles is no drift beside latencies of 80 ms; one that grows by 8 ms is."""
    for growth_ms, is_growing in ((0.2, False), (8.0, True)):
        values = 0.2 + growth_ms * AT_S / DURATION_S + 0.001 * noise(4)
        assert trend(AT_S, values, DURATION_S, part_of=80.0).is_growing is is_growing
        assert trend(AT_S, values, DURATION_S).is_growing


def test_growth_at_the_begin_is_no_trend() -> None:
    filling = np.minimum(AT_S, 90.0)
    found = trend(AT_S, 100 + filling + noise(2), DURATION_S)
    assert not found.is_growing


def test_a_real_slope_that_means_nothing_is_told_as_such() -> None:
    found = trend(AT_S, 1000 + 0.05 * AT_S + 0.01 * noise(3), DURATION_S)
    assert found.low > 0
    assert not found.is_growing
    assert found.verdict.startswith("rises by 1.")


def test_short_or_empty_runs_tell_nothing() -> None:
    assert trend(AT_S[:20], AT_S[:20], 40.0).verdict == "too short to tell"
    assert trend(np.array([]), np.array([]), DURATION_S).verdict == "too short to tell"
    assert trend(AT_S, np.full(len(AT_S), np.inf), DURATION_S).verdict == "too short to tell"


def test_what_follows_the_load_is_no_trend_and_a_leak_beside_it_is() -> None:
    """Connections to replicas whose number rises with the trace; then one more every 20 s."""
    replicas = np.round(20 + AT_S / 50 + 2 * np.sin(AT_S / 30))
    follows = 100 + 3 * replicas + 0.1 * noise(5)
    assert trend(AT_S, follows, DURATION_S).rises_among(40)
    found = trend(AT_S, follows, DURATION_S, loads=[replicas])
    assert found.low < 0 < found.high
    leaks = trend(AT_S, follows + AT_S / 20, DURATION_S, loads=[replicas])
    assert leaks.low < 1 / 20 < leaks.high
    assert leaks.rises_among(40)
    same = np.full(len(AT_S), 26.0)
    assert trend(AT_S, follows, DURATION_S, loads=[same]) == trend(AT_S, follows, DURATION_S)
    assert trend(AT_S, follows, DURATION_S, loads=[AT_S]).verdict == "too short to tell"


def test_what_follows_the_greatest_load_so_far_is_no_trend_and_a_leak_beside_it_is() -> None:
    """Memory of which a part stays after each burst that was greater than all before it."""
    replicas = 20 + 3.0 * ((AT_S // 25) % 3) + AT_S // 100  # bursts, later ones are greater
    so_far = np.maximum.accumulate(replicas)
    stays = 100 + replicas + 2 * so_far + 0.1 * noise(6)
    assert trend(AT_S, stays, DURATION_S, loads=[replicas]).rises_among(40)
    found = trend(AT_S, stays, DURATION_S, loads=[replicas, so_far])
    assert found.low < 0 < found.high
    leaks = trend(AT_S, stays + AT_S / 20, DURATION_S, loads=[replicas, so_far])
    assert leaks.low < 1 / 20 < leaks.high
    assert leaks.rises_among(40)
    twice = trend(AT_S, stays, DURATION_S, loads=[replicas, 2 * replicas + 1])
    assert twice == trend(AT_S, stays, DURATION_S, loads=[replicas])


def test_processes_are_counted_now_and_at_most_so_far() -> None:
    samples = np.array(
        [[t, pid, 0, 0, 0, 0, 0] for t, n in ((0, 2), (1, 5), (2, 3)) for pid in range(n)], float
    )
    now, so_far = soak_trend.processes(samples, np.array([1.0, 2.0]))
    assert (now.tolist(), so_far.tolist()) == ([5, 3], [5, 5])


def processes() -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """A gateway that leaks files, a worker that stays, workers that come and go."""
    rows = []
    for at_s in AT_S:
        rows.append([at_s, 10, ROLES.index("gateway"), 50e6, 20 + at_s / 10, 2, 1e6])
        rows.append([at_s, 20, ROLES.index("worker"), 80e6, 30, 5, 2e6 + 1e3 * at_s])
        rows.append([at_s, 1000 + at_s, ROLES.index("worker"), 80e6, 30, 5, 2e6])
    return np.array(rows)


def test_only_processes_that_stay_are_summed() -> None:
    found = by_role(processes(), "files", DURATION_S)
    times_s, sums, number = found["worker"]
    assert number == 1
    assert set(sums) == {30.0}
    assert times_s[0] >= DURATION_S / 4
    assert trend(*found["gateway"][:2], DURATION_S).is_growing
    assert set(found) == {"gateway", "worker"}


def an_outcome() -> Outcome:
    scheduled_s = np.linspace(0, DURATION_S, 4000)
    served = Served("bert", parts(BERT), scheduled_s, 0.7, (1, 1, 1, 1))
    sent = Sent(
        scheduled_s, scheduled_s + 0.001, scheduled_s + 0.15, np.ones(4000, dtype=np.bool_), {}, {},
        (0.1,) * 4, RouterCount(4000, 4000),
    )  # fmt: skip
    plan = Plan((served,), DURATION_S, None, 24)
    return Outcome(plan, (sent,), ((1.0,) * 4,), 0, (), 4, 0.2, 0, processes())


def test_a_leak_is_named_and_a_steady_latency_is_not() -> None:
    trends = soak.live_trends(an_outcome())
    assert [name for name, one in trends.items() if one.is_growing] == [
        "shared memory worker (MiB)",
        "files gateway",
    ]
    assert [name for name, one in trends.items() if one.rises_among(len(trends))] == [
        name for name, one in trends.items() if one.is_growing
    ]
    rows = soak.account_rows(an_outcome()) + soak.trend_rows("live", trends, 3600.0)
    assert len({tuple(row) for row in rows}) == 1
    assert (rows[0]["sent"], rows[0]["served"], rows[0]["unaccounted"]) == (4000, 4000, 0)


def test_what_must_not_be_is_told() -> None:
    good = an_outcome()
    assert faults_of(good) == []
    (sent,) = good.sent
    is_served = sent.is_served.copy()
    is_served[:3] = False
    lost = dataclasses.replace(sent, is_served=is_served)
    (found,) = faults_of(dataclasses.replace(good, sent=(lost,)))
    assert found == "bert: 3 requests are not accounted for"
    doubtful = dataclasses.replace(sent, router=RouterCount(10, 10))
    assert faults_of(dataclasses.replace(good, sent=(doubtful,))) == [
        "bert: 4000 served, its router knows 10"
    ]
    assert faults_of(dataclasses.replace(good, restarts=1)) == ["gateway or controller crashed 1 times"]
    assert "left over" in faults_of(dataclasses.replace(good, left_over=("1 sleeping x",)))[0]


def test_requests_are_counted_on_both_sides() -> None:
    good = an_outcome()
    (sent,) = good.sent
    twice = dataclasses.replace(sent, router=RouterCount(4001, 4000))
    found = faults_of(dataclasses.replace(good, sent=(twice,)))
    assert found[0] == "bert: 4000 sent, its router took 4001: something sent them twice"
    is_served = sent.is_served.copy()
    is_served[:3] = False
    one = dataclasses.replace(
        sent, is_served=is_served, refused={"504 late": 2}, failed={"timeout": 1},
        router=RouterCount(4000, 3997, {"late": 2}),
    )  # fmt: skip
    told = dataclasses.replace(good, sent=(one,))
    assert faults_of(told) == []
    assert "4000 sent = 3997 answered + 2 refused + 1 failed or timed out + 0 un" in accounted([told])
    silent = dataclasses.replace(one, router=RouterCount(4000, 3997))
    (text,) = faults_of(dataclasses.replace(good, sent=(silent,)))
    assert text.startswith("bert: its router took 4000 and completed 3997, with only 1 refused")


def test_pictures_are_drawn(tmp_path: Path) -> None:
    outcome = an_outcome()
    path = soak_figures.draw_live(tmp_path / "live.png", outcome, soak.live_trends(outcome))
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("seconds", "speed"), [(1.0, 1.0), (3600.0, 10.0)])
def test_a_length_that_the_trace_does_not_have_is_refused(seconds: float, speed: float) -> None:
    with pytest.raises(BenchError, match="minutes of a trace that has 1 to 480"):
        soak.run(quick=True, seconds=seconds, speed=speed)


def test_columns_of_samples_are_those_named() -> None:
    assert COLUMNS[3:] == ("private_bytes", "files", "threads", "shared_bytes")
