"""The report of a replay: everything measured, in one value that becomes JSON, table and plots.

Comes after `measures`, `validity` and `series`; `table`, `plots` and `html` show it. `report.json` holds
it whole but for the single requests, which go to `requests.jsonl` (`requestlog`), one line each, failed
ones included. What was asked is told by hashes, so that `compare` knows whether two runs had one plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from keystage.loadgen import arrivals, files, measures, planfacts, requestlog, validity
from keystage.loadgen.capacity import Capacity
from keystage.loadgen.histogram import Histogram, HistogramRecord
from keystage.loadgen.machine import Machine
from keystage.loadgen.measures import Attainment, Percentiles, Slo
from keystage.loadgen.plan import Plan
from keystage.loadgen.planfacts import PlanFacts
from keystage.loadgen.sender import Row
from keystage.loadgen.series import StageSample, StageSeries, StageSummary
from keystage.loadgen.starts import ReplicaStart, StartSummary, summaries

REPORT_VERSION = 2
"""2: `requests.jsonl` instead of `requests.csv`; `valid`, `plan`, `histograms`, `p999`, retries."""

FILE = "report.json"


@dataclasses.dataclass(frozen=True, slots=True)
class Histograms:
    """Whole distributions that can be merged with those of other machines (`histogram`)."""

    latency: HistogramRecord
    ttft: HistogramRecord
    tpot: HistogramRecord
    send_lag: HistogramRecord


@dataclasses.dataclass(frozen=True, slots=True)
class ArrivalReport:
    """Asked and achieved arrivals; achieved ones are from the times requests were really sent.

    Attributes:
        source: where arrivals and lengths come from.
        asked_rate_rps: None for a trace at its own speed.
        achieved_rate_rps: sent / max(duration, last send).
        asked_cv: None for a trace.
        achieved_cv: as read from the gaps between sends, None below two gaps.
        cv_low: 2.5 % quantile of what samples of that size read at the asked CV, None for a trace.
        cv_high: 97.5 % quantile.
        cv_claimed: whether the run is long enough to claim a CV (`arrivals.arrivals_for_cv`).
        cv_needs: how many arrivals a claim takes, None where no CV was read and none asked.
    """

    source: str
    asked_rate_rps: float | None
    achieved_rate_rps: float
    asked_cv: float | None
    achieved_cv: float | None
    cv_low: float | None
    cv_high: float | None
    cv_claimed: bool
    cv_needs: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class RequestReport:
    """Counts.

    Attributes:
        sent: requests sent: all of the schedule.
        served: complete answers.
        failed: the rest.
        by_status: by HTTP status, `none` without an answer.
        by_error: failed ones by class.
        examples: first message of each class.
        prompt_tokens: as counted by the server, over served requests.
        output_tokens: as counted by the server, over served requests.
        clipped: requests whose lengths were cut to fit the context.
        retried: requests that were sent more than once.
    """

    sent: int
    served: int
    failed: int
    by_status: dict[str, int]
    by_error: dict[str, int]
    examples: dict[str, str]
    prompt_tokens: int
    output_tokens: int
    clipped: int
    retried: int


@dataclasses.dataclass(frozen=True, slots=True)
class Unloaded:
    """Latencies of requests sent one at a time to the idle system; only streams have a TTFT."""

    latency_s: Percentiles
    ttft_s: Percentiles
    tpot_s: Percentiles


@dataclasses.dataclass(frozen=True, slots=True)
class Watching:
    """How the watching of router and gateway went."""

    polls: int = 0
    missed: int = 0
    last_error: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One replay.

    Attributes:
        version: of this format.
        valid: whether the run measured the target; see `validity`.
        invalid_because: why not, in words.
        started_at: ISO 8601, UTC.
        url: what was called.
        target: how.
        plan: what was asked; see `PlanFacts`.
        seed: seed of the schedule.
        duration_s: length of the schedule.
        makespan_s: from the start to the last answer.
        arrivals: see `ArrivalReport`.
        requests: see `RequestReport`.
        served_rps: served / makespan.
        output_tokens_per_s: tokens of served requests / makespan.
        send_lag_s: actual send minus scheduled time.
        send_lag_bound_s: p99 of the lag up to which the run is valid.
        latency_s: scheduled time to last token.
        ttft_s: scheduled time to first token; count 0 where answers are not streamed.
        tpot_s: time per token after the first; likewise.
        slo: bounds at scale 1.
        attainment: at each scale.
        unloaded: None if it was not measured.
        capacity: None if it was not measured.
        stages: one line per stage; empty if the router's counters were not readable.
        samples: the stages over time.
        starts: replicas started while capacity was measured and in the replay; empty where nobody told.
        start_times: the same by kind of start.
        watching: see `Watching`.
        machine: see `Machine`.
        notes: what the reader must know, in words.
        histograms: see `Histograms`.
        rows: every request; not in the JSON.
    """

    version: int = REPORT_VERSION
    valid: bool
    invalid_because: list[str]
    started_at: str
    url: str
    target: str
    plan: PlanFacts
    seed: int
    duration_s: float
    makespan_s: float
    arrivals: ArrivalReport
    requests: RequestReport
    served_rps: float
    output_tokens_per_s: float
    send_lag_s: Percentiles
    send_lag_bound_s: float
    latency_s: Percentiles
    ttft_s: Percentiles
    tpot_s: Percentiles
    slo: Slo
    attainment: list[Attainment]
    unloaded: Unloaded | None
    capacity: Capacity | None
    stages: list[StageSummary]
    samples: list[StageSample]
    starts: list[ReplicaStart]
    start_times: list[StartSummary]
    watching: Watching
    machine: Machine
    notes: list[str]
    histograms: Histograms
    rows: list[Row]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a run yields beside its rows, for `assemble`."""

    started_at: str
    url: str
    target: str
    streaming: bool
    seed: int
    slo: Slo
    series: StageSeries
    watching: Watching
    machine: Machine
    starts: Sequence[ReplicaStart] = ()
    unloaded: Sequence[Row] = ()
    capacity: Capacity | None = None
    notes: Sequence[str] = ()


def assemble(plan: Plan, rows: list[Row], measured: Measured) -> Report:
    """Summarises a run."""
    served = [row for row in rows if row.is_served]
    makespan_s = measures.makespan_s(rows, plan.duration_s)
    tokens = sum(row.output_tokens for row in served)
    none = measures.percentiles(())
    bound_s = validity.lag_bound_s(rows, streaming=measured.streaming)
    faults = validity.faults(rows, len(plan.times_s), bound_s)
    stalled = validity.stall_note(rows)
    return Report(
        valid=not faults,
        invalid_because=faults,
        started_at=measured.started_at,
        url=measured.url,
        target=measured.target,
        plan=planfacts.facts(plan, seed=measured.seed, target=measured.target),
        seed=measured.seed,
        duration_s=plan.duration_s,
        makespan_s=makespan_s,
        arrivals=_arrivals(plan, rows),
        requests=_requests(plan, rows),
        served_rps=len(served) / makespan_s,
        output_tokens_per_s=tokens / makespan_s,
        send_lag_s=measures.lags(rows),
        send_lag_bound_s=bound_s,
        latency_s=measures.latencies(rows),
        ttft_s=measures.ttfts(rows) if measured.streaming else none,
        tpot_s=measures.tpots(rows) if measured.streaming else none,
        slo=measured.slo,
        attainment=measures.attainments(rows, measured.slo, plan.duration_s),
        unloaded=_unloaded(measured),
        capacity=measured.capacity,
        stages=measured.series.summaries(),
        samples=measured.series.samples,
        starts=list(measured.starts),
        start_times=summaries(measured.starts),
        watching=measured.watching,
        machine=measured.machine,
        notes=[*measured.notes, *([stalled] if stalled else [])],
        histograms=_histograms(rows, streaming=measured.streaming),
        rows=rows,
    )


def _histograms(rows: Sequence[Row], *, streaming: bool) -> Histograms:
    served = [row for row in rows if row.is_served]
    failed = len(rows) - len(served)
    firsts = [value for row in served if (value := measures.ttft_s(row)) is not None] if streaming else []
    tokens = [value for row in served if (value := measures.tpot_s(row)) is not None] if streaming else []
    lost = failed if streaming else 0
    return Histograms(
        latency=Histogram.of((measures.latency_s(row) for row in served), failed).record_of(),
        ttft=Histogram.of(firsts, lost).record_of(),
        tpot=Histogram.of(tokens, lost).record_of(),
        send_lag=Histogram.of(row.sent_s - row.scheduled_s for row in rows).record_of(),
    )


def _arrivals(plan: Plan, rows: Sequence[Row]) -> ArrivalReport:
    achieved = arrivals.spacing(np.array([row.sent_s for row in rows]), plan.duration_s)
    low, high = (None, None)
    if plan.asked_cv is not None:
        low, high = arrivals.cv_interval(plan.asked_cv, len(rows) - 1)
    return ArrivalReport(
        source=plan.source,
        asked_rate_rps=plan.asked_rate_rps,
        achieved_rate_rps=achieved.rate_rps,
        asked_cv=plan.asked_cv,
        achieved_cv=achieved.cv,
        cv_low=low,
        cv_high=high,
        cv_claimed=achieved.is_claimed(plan.asked_cv),
        cv_needs=achieved.arrivals_needed(plan.asked_cv),
    )


def _requests(plan: Plan, rows: Sequence[Row]) -> RequestReport:
    served = [row for row in rows if row.is_served]
    examples: dict[str, str] = {}
    for row in rows:
        if row.error:
            examples.setdefault(row.error_class, row.error)
    return RequestReport(
        sent=len(rows),
        served=len(served),
        failed=len(rows) - len(served),
        by_status=measures.statuses(rows),
        by_error=measures.errors(rows),
        examples=examples,
        prompt_tokens=sum(row.prompt_tokens or 0 for row in served),
        output_tokens=sum(row.output_tokens for row in served),
        clipped=sum(length.clipped for length in plan.lengths),
        retried=sum(row.attempts > 1 for row in rows),
    )


def _unloaded(measured: Measured) -> Unloaded | None:
    rows = measured.unloaded
    if not rows:
        return None
    if not measured.streaming:
        none = measures.percentiles(())
        return Unloaded(measures.latencies(rows), none, none)
    return Unloaded(measures.latencies(rows), measures.ttfts(rows), measures.tpots(rows))


def to_json(report: Report) -> bytes:
    """The report as JSON, without single requests; values that do not exist are null."""
    fields: dict[str, Any] = msgspec.to_builtins(report)
    del fields["rows"]
    return msgspec.json.format(msgspec.json.encode(fields), indent=2)


def write(report: Report, folder: Path, *, has_requests: bool = False) -> list[Path]:
    """Writes report.json and requests.jsonl, and returns their paths.

    Args:
        report: what is written.
        folder: made where it is missing.
        has_requests: requests.jsonl was written while the run went.

    Raises:
        OSError: if the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / FILE, folder / requestlog.FILE]
    if not has_requests:
        requestlog.write(report.rows, paths[1])
    with files.whole(paths[0]) as part:
        part.write_bytes(to_json(report) + b"\n")
    return paths
