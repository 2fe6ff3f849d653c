"""Shows the report of a simulated run as tables. Comes last; computes nothing that the report lacks."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table

from keystage.simulator.report import PipelineReport, Report


def render(report: Report) -> RenderableType:
    """The report as something rich can print."""
    parts: list[RenderableType] = [_overview(report)]
    for pipeline in report.pipelines:
        parts.append(_latency_table(pipeline))
        if pipeline.attainment:
            parts.append(_attainment_table(pipeline))
        parts.append(_stage_table(pipeline))
    return Group(*parts)


def _overview(report: Report) -> Table:
    table = Table(title=f"Simulated {report.world}", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column()
    table.add_row("policy", f"{report.policy}, seed {report.seed}")
    speed = report.events / report.wall_s if report.wall_s else 0.0
    table.add_row(
        "run",
        f"{report.ended_s:.1f} s simulated in {report.wall_s:.2f} s, {report.events:,} events "
        f"({speed:,.0f}/s)",
    )
    table.add_row("cost", f"{report.gpu_s:.0f} GPU-seconds, {report.cpu_core_s:.0f} core-seconds")
    if report.log_sha256:
        table.add_row("event log", f"sha256 {report.log_sha256}")
    return table


def _latency_table(pipeline: PipelineReport) -> Table:
    cv = "-" if pipeline.cv is None else f"{pipeline.cv:.2f}"
    title = f"{pipeline.pipeline}: {pipeline.arrived} requests at {pipeline.rate_rps:.2f}/s, CV {cv}"
    caption = f"{pipeline.unanswered} unanswered at the end" if pipeline.unanswered else ""
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    names = ["mean", "p50", "p75", "p90", "p95", "p99", "max"]
    values = pipeline.latency_s
    for name in names:
        table.add_column(name, justify="right")
    table.add_row(*(_ms(getattr(values, name)) for name in names))
    return table


def _attainment_table(pipeline: PipelineReport) -> Table:
    table = Table(title="Deadline", title_justify="left")
    for name in ("scale", "within", "tokens/s"):
        table.add_column(name, justify="right")
    for line in pipeline.attainment:
        table.add_row(f"{line.scale:g}x", f"{100 * line.met_ratio:.1f} %", f"{line.goodput_tps:.4g}")
    return table


def _stage_table(pipeline: PipelineReport) -> Table:
    table = Table(title="Stages", title_justify="left")
    table.add_column("function")
    for name in ("queue", "wait", "busy", "replicas", "most", "CV", "starts"):
        table.add_column(name, justify="right")
    for stage in pipeline.stages:
        starts = ", ".join(f"{source} {number}" for source, number in stage.starts.items() if number)
        table.add_row(
            stage.function,
            f"{stage.queue_mean:.2f}",
            _ms(stage.wait_mean_s),
            f"{100 * stage.busy_ratio:.0f} %",
            f"{stage.replicas_mean:.2f}",
            str(stage.replicas_most),
            f"{stage.gap_cv:.2f}",
            starts or "-",
        )
    return table


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "never"
    if seconds >= 10:
        return f"{seconds:.1f} s"
    return f"{1000 * seconds:.0f} ms" if seconds >= 0.1 else f"{1000 * seconds:.1f} ms"
