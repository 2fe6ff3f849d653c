"""Runs of the load generator that were never sent: rows by formula, reports and folders of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keystage.loadgen import html, report
from keystage.loadgen.comparison import Side
from keystage.loadgen.lengths import Length
from keystage.loadgen.machine import Machine
from keystage.loadgen.measures import Slo
from keystage.loadgen.plan import Plan
from keystage.loadgen.report import Report
from keystage.loadgen.sender import Row
from keystage.loadgen.series import StageSeries

SPAN_S = 60.0


def times(count: int, seed: int, span_s: float = SPAN_S) -> list[float]:
    """Poisson arrivals."""
    return sorted(np.random.RandomState(seed).uniform(0, span_s, count).tolist())


def rows(
    seed: int,
    count: int = 1000,
    *,
    at_s: Sequence[float] | None = None,
    scale: float = 1.0,
    failed_ratio: float = 0.0,
    error: str = "http_503: no worker",
    lag_s: float = 0.0,
) -> list[Row]:
    """Independent log-normal latencies of median 0.37 s times `scale`; a third until the first token."""
    drawn = np.random.RandomState(seed)
    at_s = times(count, seed + 1) if at_s is None else at_s
    latency_s = np.exp(drawn.normal(-1.0, 0.5, count)) * scale
    lost = drawn.uniform(size=count) < failed_ratio
    made = []
    for index, (at, late, is_lost) in enumerate(zip(at_s, latency_s.tolist(), lost.tolist(), strict=True)):
        row = Row(index, at, at + lag_s, at + late / 3, at + late, 200, 10, 5)
        if is_lost:
            row.status, row.first_s, row.output_tokens, row.error = 503, None, 0, error
        made.append(row)
    return made


def queued(seed: int, at_s: Sequence[float], *, service_s: float, scale: float = 1.0) -> list[Row]:
    """One server with exponential service: requests that wait together are late together."""
    drawn = np.random.RandomState(seed).exponential(service_s, len(at_s)) * scale
    made, free_s = [], 0.0
    for index, (at, work_s) in enumerate(zip(at_s, drawn.tolist(), strict=True)):
        begin_s = max(at, free_s)
        free_s = begin_s + work_s
        made.append(Row(index, at, at, begin_s + work_s / 5, free_s, 200, 10, 5))
    return made


def side(of: list[Row], span_s: float = SPAN_S) -> Side:
    """For `comparison`."""
    return Side(of, span_s, streams=True)


def assembled(of: list[Row], *, url: str = "http://h:1/function/p", seed: int = 1, **changes: Any) -> Report:
    """A report of these rows."""
    given: dict[str, Any] = {
        "started_at": "2026-01-02T03:04:05+00:00",
        "url": url,
        "target": "openai",
        "streaming": True,
        "seed": seed,
        "slo": Slo(ttft_s=0.2),
        "series": StageSeries(),
        "watching": report.Watching(),
        "machine": Machine("a CPU", 2, 1 << 30, "Linux", "3.11", "not installed", ""),
    }
    count = len(of)
    at_s = np.array([row.scheduled_s for row in of])
    sizes, bodies = [Length(10, 5)] * count, [b"{}"] * count
    plan = Plan(at_s, sizes, bodies, SPAN_S, count / SPAN_S, 1.0, "Poisson arrivals")
    return report.assemble(plan, of, report.Measured(**(given | changes)))


def saved(of: list[Row], folder: Path, **changes: Any) -> Path:
    """The folder of a run."""
    made = assembled(of, **changes)
    report.write(made, folder)
    html.write(made, folder)
    return folder
