"""`keystage bench sender`: how well the load generator keeps a schedule, and what a request costs it.

A trivial server in a process of its own; to it, in turn within every round: our sender with equal spacing
and with Poisson arrivals, and wrk, hey and locust where they are installed. Two lags are told:

- send lag, ours alone: when a request was sent minus when it was scheduled;
- arrival lag, of everyone who can be asked for a rate: the k-th request that came to the server, minus
  b + k / rate, with b the latest base that leaves none early. It is the same measure for all and is taken
  outside of all; who falls behind the asked rate falls behind here.

wrk has no schedule: it sends when an answer came. Its line is processor time a request and nothing else.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Sequence

import numpy as np

from keystage.bench import sender_rivals, sender_target
from keystage.bench.frame import BenchError, BenchResult, Figure
from keystage.bench.results_page import write_page
from keystage.bench.sender_rivals import Rival
from keystage.loadgen.arrivals import synthetic
from keystage.loadgen.lengths import Length
from keystage.loadgen.plan import Plan
from keystage.loadgen.sending.row import Row
from keystage.loadgen.sending.run import prepared
from keystage.loadgen.target import Target

RATES_RPS = (1_000, 5_000, 20_000)
ROUNDS = 5
ROUND_S = 4.0
QUICK_S = 2.0
WARM_S = 0.5
"""Of our own run, not counted: first connections, as for the others."""

EVEN, POISSON = "keystage", "keystage, Poisson"
TARGET_MS = 5.0
MAX_SPREAD_RATIO = 1.0
"""Of a lag's p99: it is a tail of milliseconds, and whoever else gets a core moves it twofold."""


@dataclasses.dataclass(slots=True)
class _Line:
    """One tool at one rate; a value a round.

    Attributes:
        came_rps: requests that came to the server a second, within the window.
        arrival_ms: arrival lag p50, p99, max; nan where there is no even schedule.
        send_ms: send lag p50, p99, max; nan where nobody knows.
        cpu_us: processor time of the tool a request.
        processes: that sent; 0 where not ours.
    """

    came_rps: list[float] = dataclasses.field(default_factory=list)
    arrival_ms: list[tuple[float, float, float]] = dataclasses.field(default_factory=list)
    send_ms: list[tuple[float, float, float]] = dataclasses.field(default_factory=list)
    cpu_us: list[float] = dataclasses.field(default_factory=list)
    processes: int = 0


_Lines = dict[tuple[str, int], _Line]
_NONE = (float("nan"),) * 3


def run(*, quick: bool = False) -> BenchResult:
    """Measures lag and processor time.

    Args:
        quick: one short round; writes no page.

    Raises:
        BenchError: requests failed, or a tool ended early.
    """
    others, absent = sender_rivals.rivals()
    lines: _Lines = {}
    with sender_target.running() as address:
        _ours(address, 500, 0.0, 1.0, {}, -1)  # the server's first requests are no measurement
        for number in range(1 if quick else ROUNDS):
            for rate_rps in RATES_RPS:
                _round(address, rate_rps, QUICK_S if quick else ROUND_S, lines, others, number)
    result = _result(lines, others, absent)
    if not quick:
        write_page("sender", "Schedule accuracy of the load generator", result)
    return result


def _round(
    address: str, rate_rps: int, window_s: float, lines: _Lines, others: Sequence[Rival], number: int
) -> None:
    """All at one rate; who begins changes from round to round."""
    turns: list[Rival | float] = [0.0, 1.0, *others]
    first = number % len(turns)
    for turn in turns[first:] + turns[:first]:
        if isinstance(turn, Rival):
            if turn.is_paced or rate_rps == RATES_RPS[-1]:
                _theirs(address, turn, rate_rps, window_s, lines)
        else:
            _ours(address, rate_rps, turn, window_s, lines, number)
        time.sleep(0.3)


def _ours(address: str, rate_rps: int, cv: float, window_s: float, lines: _Lines, seed: int) -> None:
    times_s = synthetic(float(rate_rps), cv, WARM_S + window_s, seed + 1)
    count = len(times_s)
    body = b"x"
    plan = Plan(times_s, [Length(1, 1)] * count, [body] * count, WARM_S + window_s, rate_rps, cv, "bench")
    sender_target.came(address)
    rows, cpu_s, processes, start_s = asyncio.run(_sent(plan, address))
    failed = [row.error for row in rows if row.error]
    if failed:
        raise BenchError(f"{len(failed)} of {count} requests failed: {failed[0]}")
    came_s = sender_target.came(address)
    came_s = came_s[(came_s >= start_s + WARM_S) & (came_s < start_s + WARM_S + window_s)]
    lag_ms = np.array([1e3 * (row.sent_s - row.scheduled_s) for row in rows if row.scheduled_s >= WARM_S])
    line = lines.setdefault((EVEN if cv == 0 else POISSON, rate_rps), _Line())
    line.came_rps.append(len(came_s) / window_s)
    line.arrival_ms.append(_arrival_lag_ms(came_s, rate_rps) if cv == 0 else _NONE)
    line.send_ms.append(_spread(lag_ms))
    line.cpu_us.append(1e6 * cpu_s / count)
    line.processes = processes


async def _sent(plan: Plan, address: str) -> tuple[list[Row], float, int, float]:
    """Rows, processor time of all processes (seconds), how many sent, `time.monotonic()` of the start."""
    async with prepared(plan, Target("raw", address), timeout_s=30.0) as sender:
        own_s = time.process_time()
        start_s = time.monotonic() + 0.1
        made = await sender.send(start_s)
        own_s = time.process_time() - own_s
    if made.told.faults:
        raise BenchError("; ".join(made.told.faults))
    return made.rows, made.told.cpu_s + own_s, made.processes, start_s


def _theirs(address: str, rival: Rival, rate_rps: int, window_s: float, lines: _Lines) -> None:
    sender_target.came(address)
    window = sender_rivals.run(rival, address + "/", rate_rps, window_s)
    came_s = sender_target.came(address)
    came_s = came_s[(came_s >= window.begin_s) & (came_s < window.end_s)]
    if not len(came_s):
        raise BenchError(f"{rival.name} sent nothing in {window_s:g} s")
    line = lines.setdefault((rival.name, rate_rps), _Line())
    line.came_rps.append(len(came_s) / (window.end_s - window.begin_s))
    line.arrival_ms.append(_arrival_lag_ms(came_s, rate_rps) if rival.is_paced else _NONE)
    line.send_ms.append(_NONE)
    line.cpu_us.append(1e6 * window.cpu_s / len(came_s))


def _arrival_lag_ms(came_s: np.ndarray, rate_rps: float) -> tuple[float, float, float]:
    """Of the k-th arrival behind an even schedule of that rate whose base leaves none early."""
    behind_s = came_s - np.arange(len(came_s)) / rate_rps
    return _spread(1e3 * (behind_s - behind_s.min()))


def _spread(values: np.ndarray) -> tuple[float, float, float]:
    p50, p99 = np.percentile(values, [50, 99])
    return float(p50), float(p99), float(values.max())


def _result(lines: _Lines, others: Sequence[Rival], absent: Sequence[str]) -> BenchResult:
    rows = []
    for (name, rate_rps), line in sorted(lines.items(), key=lambda item: item[0][1]):
        send, arrival = np.median(line.send_ms, axis=0), np.median(line.arrival_ms, axis=0)
        asked = "as fast as answers come" if name == "wrk" else f"{rate_rps:,}/s"
        rows.append(
            {
                "tool": name,
                "asked": asked,
                "came/s": float(np.median(line.came_rps)),
                **_columns("send lag", send),
                **_columns("arrival lag", arrival),
                "CPU us/request": float(np.median(line.cpu_us)),
                "processes": line.processes or "",
            }
        )
    rows += [{**dict.fromkeys(rows[0], ""), "tool": name, "asked": "absent"} for name in absent]
    figures = {
        f"lag_p99_ms_{rate_rps}": Figure(
            [p99 for _, p99, _ in lines[EVEN, rate_rps].send_ms],
            f"send lag p99 at {rate_rps:,} requests a second, ms",
            f"at most {TARGET_MS:g}" if rate_rps == 5_000 else "",
            MAX_SPREAD_RATIO,
        )
        for rate_rps in RATES_RPS
    }
    figures["poisson_lag_p99_ms_5000"] = Figure(
        [p99 for _, p99, _ in lines[POISSON, 5_000].send_ms],
        "send lag p99 at 5,000 Poisson arrivals a second, ms",
        max_spread_ratio=MAX_SPREAD_RATIO,
    )
    for rival in others:
        at_rps = 5_000 if rival.is_paced else RATES_RPS[-1]
        pairs = zip(lines[rival.name, at_rps].cpu_us, lines[EVEN, at_rps].cpu_us, strict=True)
        figures[f"cpu_ratio_{rival.name}_{at_rps}"] = Figure(
            [their_us / our_us for their_us, our_us in pairs],
            f"{rival.name}'s CPU time a request / ours, ours at {at_rps:,} a second",
        )
    return BenchResult(rows, figures, _notes(absent))


def _columns(name: str, values: np.ndarray) -> dict[str, float | str]:
    keys = [f"{name} {which} ms" for which in ("p50", "p99", "max")]
    return {key: "" if np.isnan(value) else float(value) for key, value in zip(keys, values, strict=True)}


_LAGS = (
    "Send lag is our own clock at the moment of handing over; arrival lag is the server's, the same for "
    "everyone: the k-th arrival behind b + k / rate. The server shares the cores and adds its own delay."
)
_LOOPS = (
    "hey and locust are closed loops with a pace: each of their workers or users waits for its answer before "
    "its next turn, so a slow server slows them; the latencies they print leave that wait out and are not "
    "compared. wrk sends whenever an answer came, on 64 connections: it has no schedule, and its CPU time a "
    "request is what a closed loop in C takes. Ours counts from the schedule."
)
_CPU = (
    "CPU time is that of the tool's processes alone, user and system, within the window; for ours with the "
    "rows' way back to the process that reports. locust runs as one process, as it does by default."
)


def _notes(absent: Sequence[str]) -> list[str]:
    return [_LAGS, _LOOPS, _CPU, *([f"Absent here: {', '.join(absent)}."] if absent else [])]
