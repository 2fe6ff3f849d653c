"""Shows a report as tables in the terminal. Comes last; computes nothing that the report lacks."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from keystage.loadgen.measures import Percentiles, Slo
from keystage.loadgen.report import Report


def show(report: Report, console: Console) -> None:
    """Prints the report."""
    console.print(render(report))


def render(report: Report) -> RenderableType:
    """The report as something rich can print."""
    parts: list[RenderableType] = [_overview(report), _latencies(report)]
    if report.attainment:
        parts.append(_attainment(report))
    if report.stages:
        parts.append(_stages(report))
    if report.start_times:
        parts.append(_starts(report))
    if report.requests.examples:
        parts.append(_failures(report))
    parts.extend(Text(f"note: {note}", style="yellow") for note in report.notes)
    return Group(*parts)


def _overview(report: Report) -> Table:
    table = Table(title=f"Replay of {report.url}", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column()
    asked, counts = report.arrivals, report.requests
    statuses = ", ".join(f"{status}: {count}" for status, count in counts.by_status.items())
    table.add_row("arrivals", asked.source)
    table.add_row(
        "requests", f"sent {counts.sent}, served {counts.served}, failed {counts.failed} ({statuses})"
    )
    table.add_row("rate", f"{asked.achieved_rate_rps:.2f}/s achieved{_asked(asked.asked_rate_rps, '/s')}")
    table.add_row("CV of arrivals", _cv(report))
    lag = report.send_lag_s
    table.add_row("send lag", f"p50 {_ms(lag.p50)}, p99 {_ms(lag.p99)}, max {_ms(lag.max)}")
    throughput = f"{report.served_rps:.2f} requests/s{_tokens(report.output_tokens_per_s)}"
    table.add_row("throughput", f"{throughput} over {report.makespan_s:.1f} s")
    if counts.prompt_tokens or counts.output_tokens:
        told = f"{counts.prompt_tokens} in, {counts.output_tokens} out; lengths clipped: {counts.clipped}"
        table.add_row("tokens", told)
    if report.capacity is not None:
        able = report.capacity
        table.add_row(
            "capacity",
            f"{able.requests_per_s:.2f} requests/s (+-{100 * able.relative_error:.0f} %)"
            f"{_tokens(able.output_tokens_per_s)} with {able.concurrency} clients, closed loop",
        )
    machine = report.machine
    torch = f"torch {machine.torch} {machine.torch_device}".strip()
    table.add_row("machine", f"{machine.cpu_model}, {machine.cores} cores, Python {machine.python}, {torch}")
    return table


def _tokens(per_s: float) -> str:
    """Empty where answers have no tokens."""
    return f", {per_s:.1f} output tokens/s" if per_s else ""


def _asked(value: float | None, unit: str) -> str:
    return "" if value is None else f", {value:.2f}{unit} asked"


def _cv(report: Report) -> str:
    asked = report.arrivals
    text = "too few arrivals" if asked.achieved_cv is None else f"{asked.achieved_cv:.2f} achieved"
    text += _asked(asked.asked_cv, "")
    if asked.cv_low is not None and asked.cv_high is not None:
        text += f" (95 % of samples this size read {asked.cv_low:.2f} to {asked.cv_high:.2f})"
    return text


def _latencies(report: Report) -> Table:
    failed = report.requests.failed
    caption = "from the scheduled time; mean and max over served requests"
    if failed:
        caption += f"; {failed} failed requests count as infinitely late"
    table = Table(title="Latency", title_justify="left", caption=caption, caption_justify="left")
    table.add_column("")
    for name in ("count", "p50", "p90", "p95", "p99", "mean", "max"):
        table.add_column(name, justify="right")
    lines = [("TTFT", report.ttft_s), ("TPOT", report.tpot_s), ("latency", report.latency_s)]
    if report.unloaded is not None:
        alone = report.unloaded
        lines += [
            ("unloaded TTFT", alone.ttft_s),
            ("unloaded TPOT", alone.tpot_s),
            ("unloaded latency", alone.latency_s),
        ]
    for name, values in lines:
        if values.count:
            table.add_row(name, str(values.count), *_cells(values))
    return table


def _cells(values: Percentiles) -> list[str]:
    ranks = (values.p50, values.p90, values.p95, values.p99)
    return [*("failed" if rank is None else _ms(rank) for rank in ranks), _ms(values.mean), _ms(values.max)]


def _attainment(report: Report) -> Table:
    table = Table(
        title=f"SLO ({_bounds(report.slo)})",
        title_justify="left",
        caption=f"1x is {report.slo.source}; failed requests meet none",
        caption_justify="left",
    )
    for name in ("scale", "met", "attainment", "goodput"):
        table.add_column(name, justify="right")
    for line in report.attainment:
        share = f"{100 * line.attainment_ratio:.1f} %"
        table.add_row(f"{line.scale:g}x", str(line.met), share, f"{line.goodput_rps:.2f}/s")
    return table


def _bounds(slo: Slo) -> str:
    named = (("TTFT", slo.ttft_s), ("TPOT", slo.tpot_s), ("latency", slo.latency_s))
    return ", ".join(f"{name} {_ms(bound)}" for name, bound in named if bound is not None)


def _stages(report: Report) -> Table:
    seen = report.watching
    caption = f"{seen.polls} readings, {seen.missed} missed; arrivals of a looping pipeline count at stage 0"
    table = Table(title="Stages", title_justify="left", caption=caption, caption_justify="left")
    names = ("stage", "queue mean", "max", "in flight", "ready mean", "max", "busy", "arrivals", "CV")
    for name in names:
        table.add_column(name, justify="right")
    for line in report.stages:
        table.add_row(
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
    return table


def _starts(report: Report) -> Table:
    table = Table(
        title="Replicas started",
        title_justify="left",
        caption="seconds from the controller's decision; first item: the first work a replica computed",
        caption_justify="left",
    )
    names = ("by", "starts", "ready median", "max", "did work", "first item median", "max")
    for name in names:
        table.add_column(name, justify="right")
    for line in report.start_times:
        table.add_row(
            line.via,
            str(line.count),
            _ms(line.ready_median_s),
            _ms(line.ready_max_s),
            str(line.answered),
            _ms(line.first_item_median_s),
            _ms(line.first_item_max_s),
        )
    return table


def _failures(report: Report) -> Table:
    table = Table(title="Failures", title_justify="left")
    table.add_column("class")
    table.add_column("count", justify="right")
    table.add_column("first of them", overflow="fold")
    for name, example in report.requests.examples.items():
        table.add_row(name, str(report.requests.by_error[name]), Text(example))
    return table


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds >= 10:
        return f"{seconds:.1f} s"
    return f"{1000 * seconds:.0f} ms" if seconds >= 0.1 else f"{1000 * seconds:.1f} ms"
