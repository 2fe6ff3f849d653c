"""A report as sheets of text: what `table` prints in a terminal and `html` puts into a page.

Comes after `report`; computes nothing that the report lacks. Texts that come from servers pass
`printable`: whoever answers the requests must not steer the reader's terminal or browser.
"""

from __future__ import annotations

import dataclasses
import unicodedata
from collections.abc import Sequence

from keystage.loadgen.measures import Percentiles, Slo
from keystage.loadgen.report import Report

RANKS = ("p50", "p90", "p95", "p99", "p999")
_RANK_NAMES = ("p50", "p90", "p95", "p99", "p99.9")


@dataclasses.dataclass(frozen=True, slots=True)
class Sheet:
    """A table of text.

    Attributes:
        title: what it shows.
        header: names of the columns; empty for pairs of name and value.
        rows: texts; the first of a row names it.
        caption: how to read it, may be empty.
    """

    title: str
    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    caption: str = ""

    def transposed(self) -> Sheet:
        """Rows as columns, for narrow pages."""
        columns = list(zip(self.header, *self.rows, strict=True))
        return Sheet(self.title, columns[0], columns[1:], self.caption)


def printable(text: str, most: int = 500) -> str:
    """Text without control, format and private characters, which are shown as U+FFFD; cut where long."""
    cut = text if len(text) <= most else text[: most - 1] + "\N{HORIZONTAL ELLIPSIS}"
    return "".join(
        " " if c in "\n\t" else "\N{REPLACEMENT CHARACTER}" if unicodedata.category(c)[0] == "C" else c
        for c in cut
    )


def duration(seconds: float | None) -> str:
    """A time with the unit that fits, `-` for None."""
    if seconds is None:
        return "-"
    if seconds >= 10:
        return f"{seconds:.1f} s"
    return f"{1000 * seconds:.0f} ms" if seconds >= 0.1 else f"{1000 * seconds:.1f} ms"


def sheets(report: Report) -> list[Sheet]:
    """All there is to show, the overview first."""
    made = [overview(report), latencies(report)]
    if report.attainment:
        made.append(_attainment(report))
    if report.stages:
        made.append(_stages(report))
    if report.start_times:
        made.append(_starts(report))
    if report.requests.examples:
        made.append(_failures(report))
    return made


def overview(report: Report) -> Sheet:
    """What was asked, what was sent, on what machine."""
    asked, counts, lag = report.arrivals, report.requests, report.send_lag_s
    statuses = ", ".join(f"{status}: {count}" for status, count in counts.by_status.items())
    throughput = f"{report.served_rps:.2f} requests/s{_tokens(report.output_tokens_per_s)}"
    lagged = f"p50 {duration(lag.p50)}, p99 {duration(lag.p99)}, max {duration(lag.max)}"
    rows = [
        ("valid", "yes" if report.valid else "NO: " + "; ".join(report.invalid_because)),
        ("arrivals", asked.source),
        ("requests", f"sent {counts.sent}, served {counts.served}, failed {counts.failed} ({statuses})"),
        ("rate", f"{asked.achieved_rate_rps:.2f}/s achieved{_asked(asked.asked_rate_rps, '/s')}"),
        ("CV of arrivals", _cv(report)),
        ("send lag", f"{lagged}; p99 at most {duration(report.send_lag_bound_s)} is valid"),
        ("throughput", f"{throughput} over {report.makespan_s:.1f} s"),
    ]
    if counts.retried:
        rows.append(("retries", f"{counts.retried} requests were sent more than once"))
    if counts.prompt_tokens or counts.output_tokens:
        told = f"{counts.prompt_tokens} in, {counts.output_tokens} out; lengths clipped: {counts.clipped}"
        rows.append(("tokens", told))
    if report.capacity is not None:
        able = report.capacity
        most = f"{able.requests_per_s:.2f} requests/s (+-{100 * able.relative_error:.0f} %)"
        most += f"{_tokens(able.output_tokens_per_s)} with {able.concurrency} clients, closed loop"
        rows.append(("capacity", most))
    machine = report.machine
    torch = f"torch {machine.torch} {machine.torch_device}".strip()
    rows.append(("machine", f"{machine.cpu_model}, {machine.cores} cores, Python {machine.python}, {torch}"))
    return Sheet(f"Replay of {report.url}", (), [(name, printable(text)) for name, text in rows])


def _tokens(per_s: float) -> str:
    """Empty where answers have no tokens."""
    return f", {per_s:.1f} output tokens/s" if per_s else ""


def _asked(value: float | None, unit: str) -> str:
    return "" if value is None else f", {value:.2f}{unit} asked"


def _cv(report: Report) -> str:
    asked = report.arrivals
    text = "too few arrivals" if asked.achieved_cv is None else f"{asked.achieved_cv:.2f} achieved"
    if asked.achieved_cv is not None and not asked.cv_claimed:
        text = f"not claimed, which takes {asked.cv_needs} arrivals: {asked.achieved_cv:.2f} read"
    text += _asked(asked.asked_cv, "")
    if asked.cv_low is not None and asked.cv_high is not None:
        text += f" (95 % of samples this size read {asked.cv_low:.2f} to {asked.cv_high:.2f})"
    return text


def latencies(report: Report) -> Sheet:
    """Percentiles of every measure that was taken."""
    failed = report.requests.failed
    caption = "from the scheduled time; mean and max over served requests"
    if failed:
        caption += f"; {failed} failed requests count as infinitely late"
    lines = [("TTFT", report.ttft_s), ("TPOT", report.tpot_s), ("latency", report.latency_s)]
    if report.unloaded is not None:
        alone = report.unloaded
        lines += [
            ("unloaded TTFT", alone.ttft_s),
            ("unloaded TPOT", alone.tpot_s),
            ("unloaded latency", alone.latency_s),
        ]
    rows = [(name, str(values.count), *_cells(values)) for name, values in lines if values.count]
    return Sheet("Latency", ("", "count", *_RANK_NAMES, "mean", "max"), rows, caption)


def _cells(values: Percentiles) -> list[str]:
    ranks = [getattr(values, rank) for rank in RANKS]
    return [
        *("failed" if rank is None else duration(rank) for rank in ranks),
        duration(values.mean),
        duration(values.max),
    ]


def _attainment(report: Report) -> Sheet:
    rows = [
        (
            f"{line.scale:g}x",
            str(line.met),
            f"{100 * line.attainment_ratio:.1f} %",
            f"{line.goodput_rps:.2f}/s",
        )
        for line in report.attainment
    ]
    caption = f"1x is {report.slo.source}; failed requests meet none"
    return Sheet(f"SLO ({bounds(report.slo)})", ("scale", "met", "attainment", "goodput"), rows, caption)


def bounds(slo: Slo) -> str:
    """The bounds of an SLO in words."""
    named = (("TTFT", slo.ttft_s), ("TPOT", slo.tpot_s), ("latency", slo.latency_s))
    return ", ".join(f"{name} {duration(bound)}" for name, bound in named if bound is not None)


def _stages(report: Report) -> Sheet:
    seen = report.watching
    names = ("stage", "queue mean", "max", "in flight", "ready mean", "max", "busy", "arrivals", "CV")
    rows = [
        (
            str(line.stage),
            f"{line.queue_mean:.1f}",
            str(line.queue_max),
            f"{line.in_flight_mean:.1f}",
            f"{line.ready_mean:.2f}",
            str(line.ready_max),
            "-" if line.busy_mean_ratio is None else f"{100 * line.busy_mean_ratio:.0f} %",
            str(line.arrivals),
            "-" if line.cv is None else f"{line.cv:.2f}",
        )
        for line in report.stages
    ]
    caption = f"{seen.polls} readings, {seen.missed} missed; arrivals of a looping pipeline count at stage 0"
    return Sheet("Stages", names, rows, caption)


def _starts(report: Report) -> Sheet:
    rows = [
        (
            line.via,
            str(line.count),
            duration(line.ready_median_s),
            duration(line.ready_max_s),
            str(line.answered),
            duration(line.first_item_median_s),
            duration(line.first_item_max_s),
        )
        for line in report.start_times
    ]
    names = ("by", "starts", "ready median", "max", "did work", "first item median", "max")
    caption = "seconds from the controller's decision; first item: the first work a replica computed"
    return Sheet("Replicas started", names, rows, caption)


def _failures(report: Report) -> Sheet:
    counts = report.requests
    rows = [
        (printable(name), str(counts.by_error[name]), printable(example))
        for name, example in counts.examples.items()
    ]
    return Sheet("Failures", ("class", "count", "first of them"), rows)
