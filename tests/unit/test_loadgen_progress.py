"""How a run looks while it goes: a time line of what is due and what ended."""

import io
import time

import pytest
from rich.console import Console

from keystage.loadgen import progress
from keystage.loadgen.progress import Tally, following, line
from keystage.loadgen.sender import Row


def row(index: int, at_s: float, latency_s: float, error: str = "") -> Row:
    return Row(index, at_s, at_s + 0.002, at_s, at_s + latency_s, 200, 1, 2, error)


def test_a_time_line() -> None:
    tally = Tally(100, [float(k) for k in range(100)])
    now = tally.snapshot(0.5)
    assert (now.sent, now.in_flight, now.served, now.p50_s, now.lag_p99_s) == (1, 1, 0, None, None)
    tally.ended(row(0, 0.0, 0.25))
    tally.ended(row(1, 1.0, 0.5))
    tally.ended(row(2, 2.0, 9.0, "http_503: no"))
    now = tally.snapshot(3.5)
    assert (now.sent, now.in_flight, now.served, now.failed) == (4, 1, 2, 1)
    assert now.p50_s == pytest.approx(0.5, rel=1e-3)
    assert now.p99_s is None
    assert now.lag_p99_s == pytest.approx(0.002, rel=1e-3)
    assert now.rate_rps == pytest.approx(4 / 3.5)


def test_a_target_that_stalls_fills_what_is_in_flight() -> None:
    tally = Tally(100, [k / 10 for k in range(100)])
    for index in range(10):
        tally.ended(row(index, index / 10, 0.05))
    assert [tally.snapshot(at_s).in_flight for at_s in (0.95, 2.95, 4.95)] == [0, 20, 40]


def test_the_rate_is_that_of_the_last_ten_seconds() -> None:
    tally = Tally(200, [0.1 * k for k in range(100)] + [20.0 + k for k in range(100)])
    rates = [tally.snapshot(at_s).rate_rps for at_s in (10.0, 20.0, 30.0, 40.0)]
    assert rates == pytest.approx([10.0, 0.1, 1.0, 1.0], abs=0.05)


def test_without_a_schedule_what_ended_was_sent() -> None:
    tally = Tally(0)
    tally.ended(row(0, 0.0, 0.1))
    now = tally.snapshot(1.0)
    assert (now.sent, now.in_flight) == (1, 0)
    assert "sent 1 (1.0/s)" in line("loop", now)


def test_the_line_says_all_of_it() -> None:
    tally = Tally(4, [0.0, 1.0, 2.0, 3.0])
    tally.ended(row(0, 0.0, 0.25))
    said = line("replay", tally.snapshot(2.0))
    assert said == (
        "replay: 2 s, sent 3 of 4 (1.5/s), in flight 2, served 1, failed 0, "
        "p50 250 ms, p99 250 ms, lag p99 2.0 ms"
    )
    tally.ended(row(1, 1.0, 0.25, "timeout: no"))
    assert "p99 failed" in line("replay", tally.snapshot(2.1))


@pytest.mark.parametrize("is_terminal", [True, False])
def test_it_tells_while_nothing_ends_and_at_the_end(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.02)
    monkeypatch.setattr(progress, "PANEL_EVERY_S", 0.02)
    out = io.StringIO()
    shown = Console(file=out, force_terminal=is_terminal, width=200, markup=False)
    with following(shown, 2, "replay", times_s=[0.0, 0.0]) as ended:
        until_s = time.monotonic() + 30
        while "in flight 2" not in out.getvalue() and time.monotonic() < until_s:
            time.sleep(0.01)
        ended(row(0, 0.0, 0.25))
        ended(row(1, 0.0, 0.25))
    assert "in flight 2" in out.getvalue()
    assert "served 2, failed 0" in out.getvalue()
