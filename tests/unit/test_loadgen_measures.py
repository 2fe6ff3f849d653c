"""Percentiles, SLOs and counts of rows, with failures in their place."""

import pytest

from keystage.loadgen import measures
from keystage.loadgen.capacity import TargetError, _throughput
from keystage.loadgen.measures import Slo
from keystage.loadgen.sender import Row
from keystage.loadgen.target import Target


def served(index: int, ttft_s: float, tpot_s: float, tokens: int = 5, late_s: float = 0.0) -> Row:
    first_s = index + ttft_s
    return Row(index, float(index), index + late_s, first_s, first_s + tpot_s * (tokens - 1), 200, 10, tokens)


def failed(index: int, status: int, error: str) -> Row:
    return Row(index, float(index), float(index), None, index + 9.0, status, error=error)


def test_nearest_rank_percentiles() -> None:
    got = measures.percentiles(float(value) for value in range(1, 101))
    assert (got.p50, got.p90, got.p95, got.p99, got.mean, got.max) == (50, 90, 95, 99, 50.5, 100)


def test_failures_stay_in_the_count_as_infinitely_late() -> None:
    rows = [served(index, 0.1, 0.01) for index in range(9)] + [failed(9, 500, "http_500: no")]
    got = measures.latencies(rows)
    assert (got.count, got.failed) == (10, 1)
    assert got.p90 == pytest.approx(0.14)
    assert got.p95 is None
    assert got.max == pytest.approx(0.14)


def test_nothing_has_no_percentiles() -> None:
    got = measures.percentiles(())
    assert (got.count, got.p50, got.mean, got.max) == (0, None, None, None)


def test_a_generator_that_lags_makes_latency_longer_not_shorter() -> None:
    row = Row(0, scheduled_s=1.0, sent_s=3.0, first_s=3.5, last_s=4.0, status=200, output_tokens=2)
    assert (measures.ttft_s(row), measures.latency_s(row), measures.tpot_s(row)) == (2.5, 3.0, 0.5)
    assert measures.lags([row]).max == 2.0


def test_one_token_has_no_tpot_and_meets_any() -> None:
    row = served(0, 0.1, 0.0, tokens=1)
    assert measures.tpot_s(row) is None
    assert measures.tpots([row]).count == 0
    assert measures.meets(row, Slo(tpot_s=0.001))


def test_attainment_by_hand() -> None:
    rows = [
        served(0, 0.9, 0.05),
        served(1, 1.4, 0.05),
        served(2, 0.5, 0.14),
        served(3, 2.9, 0.05),
        failed(4, 429, "http_429: queue full"),
    ]
    lines = measures.attainments(rows, Slo(ttft_s=1.0, tpot_s=0.1), duration_s=10.0)
    assert [(line.scale, line.met) for line in lines] == [(1.0, 1), (1.5, 3), (2.0, 3), (3.0, 4)]
    assert lines[0].attainment_ratio == 1 / 5
    # The failed request ended at 13 s, after the schedule's 10 s.
    assert lines[3].goodput_rps == 4 / 13


def test_without_bounds_there_is_no_attainment() -> None:
    assert measures.attainments([served(0, 1, 1)], Slo(), 1.0) == []


def test_derived_slo_is_the_unloaded_90th_percentile() -> None:
    rows = [served(index, 0.1 * (index + 1), 0.02) for index in range(10)]
    slo = measures.derived_slo(rows, streaming=True)
    assert slo.ttft_s == pytest.approx(0.9)
    assert slo.tpot_s == pytest.approx(0.02)
    assert slo.latency_s is None
    assert "10 requests" in slo.source
    assert measures.derived_slo(rows, streaming=False).latency_s == pytest.approx(0.98)


def test_counts_by_status_and_class() -> None:
    rows = [
        served(0, 1, 1),
        failed(1, 0, "connect: refused: port 1"),
        failed(2, 0, "timeout: no answer"),
        failed(3, 429, "http_429: a"),
        failed(4, 429, "http_429: b"),
    ]
    assert measures.statuses(rows) == {"200": 1, "429": 2, "none": 2}
    assert measures.errors(rows) == {"http_429": 2, "connect": 1, "timeout": 1}


def test_throughput_counts_only_what_ended_in_the_window() -> None:
    rows = [
        Row(i, 0.0, 0.0, last_s, last_s, 200, 1, 10) for i, last_s in enumerate((0.9, 1.0, 2.0, 3.9, 4.0))
    ]
    rows.append(Row(5, 0.0, 0.0, None, 2.0, 500, error="http_500: no"))
    got = _throughput(rows, Target("openai", "http://h"), 2, 1.0, 4.0)
    assert (got.completed, got.failed, got.requests_per_s, got.output_tokens_per_s) == (3, 1, 1.0, 10.0)


def test_no_throughput_is_an_error_with_the_reason() -> None:
    rows = [Row(0, 0.0, 0.0, None, 2.0, 503, error="http_503: no worker")]
    with pytest.raises(TargetError, match="http_503: no worker"):
        _throughput(rows, Target("openai", "http://h"), 2, 1.0, 4.0)
