"""Which runs are no measurement of the target."""

import pytest
from support.load_reports import assembled, rows

from keystage.loadgen import validity
from keystage.loadgen.sender import Row
from keystage.loadgen.sheets import overview


def late(lag_s: float, latency_s: float, index: int = 0) -> Row:
    return Row(index, 1.0, 1.0 + lag_s, 1.0 + latency_s / 2, 1.0 + latency_s, 200, 1, 2)


@pytest.mark.parametrize(
    ("ttft_s", "bound_s"), [(0.0002, 0.005), (0.04, 0.005), (0.2, 0.02), (3.0, 0.3), (60.0, 1.0)]
)
def test_the_bound_is_a_tenth_of_the_median_between_5_ms_and_1_s(ttft_s: float, bound_s: float) -> None:
    of = [late(0.0, 2 * ttft_s) for _ in range(5)]
    assert validity.lag_bound_s(of, streaming=True) == pytest.approx(bound_s)
    assert validity.lag_bound_s(of, streaming=False) == pytest.approx(
        min(max(2 * bound_s, 0.005), 1.0), abs=0.006
    )


def test_a_run_that_serves_nothing_has_the_least_bound() -> None:
    assert validity.lag_bound_s([Row(0, 0.0, error="connect: refused")], streaming=True) == 0.005


def test_a_late_generator_is_named_with_bound_and_value() -> None:
    of = [late(0.0, 0.4) for _ in range(97)] + [late(0.3, 0.7) for _ in range(3)]
    (told,) = validity.faults(of, 100, 0.02)
    assert "send lag p99 is 300.0 ms, above 20.0 ms" in told
    assert validity.faults(of[:97], 97, 0.02) == []


def test_one_late_request_in_two_hundred_is_told_and_no_fault() -> None:
    of = [late(0.0, 0.4) for _ in range(199)] + [late(3.0, 3.4)]
    assert validity.faults(of, 200, 0.02) == []
    assert "sent 3.0 s late" in validity.stall_note(of)
    assert validity.stall_note(of[:199]) == ""
    assert assembled(of).notes == [validity.stall_note(of)]


def test_requests_that_were_not_sent() -> None:
    assert validity.faults([late(0.0, 1.0)], 3, 1.0) == ["1 of the schedule's 3 requests were sent"]


@pytest.mark.parametrize(
    "error",
    [
        "connect: h:1: Cannot assign requested address",
        "client_OSError: [Errno 24] Too many open files",
    ],
)
def test_failures_of_the_generators_own_machine(error: str) -> None:
    of = [late(0.0, 1.0), Row(1, 0.0, last_s=0.1, error=error)]
    (told,) = validity.faults(of, 2, 1.0)
    assert "1 requests failed at the generator itself" in told
    said = Row(1, 0.0, last_s=0.1, status=500, error="http_500: Too many open files")
    assert validity.faults([of[0], said], 2, 1.0) == [], "the server speaks of itself"


def test_the_report_tells_it() -> None:
    good, bad = assembled(rows(1)), assembled(rows(1, lag_s=0.1))
    assert (good.valid, good.invalid_because) == (True, [])
    assert not bad.valid
    assert bad.send_lag_bound_s == pytest.approx(0.1 * (bad.ttft_s.p50 or 0))


def test_requests_lost_with_a_process_are_named_with_what_was_lost() -> None:
    of = [late(0.0, 1.0), Row(1, 0.0, last_s=0.0, error="generator: process 2 ended with -9")]
    (told,) = validity.faults(of, 2, 1.0)
    assert told == "of 1 requests it is not known what became of them: generator: process 2 ended with -9"


def test_requests_sent_again_are_counted() -> None:
    of = rows(1, 10)
    of[3].attempts = 3
    assert assembled(of).requests.retried == 1
    assert ("retries", "1 requests were sent more than once") in overview(assembled(of)).rows
    assert "retries" not in [name for name, *_ in overview(assembled(rows(1, 10))).rows]
