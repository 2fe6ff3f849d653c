"""A report as one page: tables, charts, notes; no script, nothing from the network.

Comes after `report`; `sheets` gives the tables, `curves` and `charts` the plots. Light and dark follow
the reader's system; the page is made for 360 pixels and more. All text is escaped: addresses, names of
stages and above all error messages come from outside, and the page forbids everything but its own style.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path

from keystage.loadgen import curves, files, measures
from keystage.loadgen.charts import Chart, Line, svg
from keystage.loadgen.curves import Span
from keystage.loadgen.report import Report
from keystage.loadgen.series import StageSample
from keystage.loadgen.sheets import Sheet, duration, printable, sheets

FILE = "report.html"

_STYLE = """
:root{color-scheme:light dark;--back:#fff;--text:#1b1d21;--soft:#5a606b;--rule:#d8dce2;--grid:#e6e9ed;
--panel:#f6f7f9;--bad:#b3261e;--bar:#8fb8dc;
--s0:#0072b2;--s1:#c24e00;--s2:#00805e;--s3:#a8507f;--s4:#8a6100;--s5:#2f7fb5;--s6:#6b6b00;--s7:#333}
@media(prefers-color-scheme:dark){:root{--back:#16181c;--text:#e8eaee;--soft:#a9b0bc;--rule:#3a3f48;
--grid:#2b2f36;--panel:#1e2126;--bad:#ff8a80;--bar:#3f6f99;
--s0:#6cb8f0;--s1:#ff9a57;--s2:#3fcf9f;--s3:#e79cc4;--s4:#f0c04a;--s5:#9bd3ff;--s6:#d8d85a;--s7:#ddd}}
*{box-sizing:border-box}
body{margin:0;background:var(--back);color:var(--text);font:16px/1.5 system-ui,sans-serif}
main{max-width:1240px;margin:0 auto;padding:16px}
h1{font-size:1.45rem;line-height:1.25;margin:.4em 0;overflow-wrap:anywhere}
h2{font-size:1.15rem;margin:1.6em 0 .5em}
p{margin:.4em 0}.soft,caption,figcaption{color:var(--soft);font-size:.9rem}
.state{padding:.6em .8em;border-left:5px solid var(--s2);background:var(--panel)}
.state.bad{border-color:var(--bad)}.state.bad strong{color:var(--bad)}
.state ul{margin:.3em 0;padding-left:1.2em}
.scroll{overflow-x:auto;max-width:100%}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
caption{caption-side:bottom;text-align:left;padding:.4em 0}
caption span{display:block;max-width:calc(100vw - 32px)}td{white-space:nowrap}.words td{white-space:normal}
th,td{padding:.25em .7em .25em 0;border-bottom:1px solid var(--rule);text-align:right;vertical-align:top}
th:first-child,.words td,.words th{text-align:left}
th{font-weight:600}.words td{overflow-wrap:anywhere}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,370px),1fr));gap:20px}
figure{margin:0;min-width:0}figcaption{font-weight:600;color:var(--text);margin-bottom:.3em}
svg{display:block;width:100%;height:auto;font:15px system-ui,sans-serif}
svg text{fill:var(--text)}.mid{text-anchor:middle}.end{text-anchor:end}
.grid{stroke:var(--grid)}.axis{stroke:var(--soft)}.bar{fill:var(--bar)}
.line{fill:none;stroke-width:2.2;stroke-linejoin:round}.fail{fill:none;stroke:var(--bad);stroke-width:2}
""" + "".join(f".s{k}{{stroke:var(--s{k})}}" for k in range(8))

_RANKS = (0.0, 0.5, 0.9, 0.99, 0.999, 0.9999, 0.99999)
_WORDS = ("first of them",)


def write(report: Report, folder: Path) -> Path:
    """Writes `report.html` and returns its path.

    Raises:
        OSError: if the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE
    with files.whole(path) as part:
        part.write_text(page(report), encoding="utf-8")
    return path


def page(report: Report) -> str:
    """The whole page."""
    title = escape(printable(f"Replay of {report.url}"))
    drawn = "".join(_figure(chart, f"c{k}") for k, chart in enumerate(_charts(report)))
    notes = "".join(f"<li>{escape(printable(note))}</li>" for note in report.notes)
    first, *others = sheets(report)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'\">"
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style></head><body><main>"
        f'<h1>{title}</h1><p class="soft">{escape(report.started_at)}, target {escape(report.target)}, '
        f"seed {report.seed}</p>{_state(report)}"
        f"<h2>Overview</h2>{_table(first)}"
        + "".join(f"<h2>{escape(printable(sheet.title))}</h2>{_table(_fitting(sheet))}" for sheet in others)
        + (f'<h2>Plots</h2><div class="charts">{drawn}</div>' if drawn else "")
        + (f"<h2>Notes</h2><ul>{notes}</ul>" if notes else "")
        + "</main></body></html>\n"
    )


def _state(report: Report) -> str:
    if report.valid:
        return (
            '<p class="state"><strong>Valid.</strong> The generator kept its schedule: send lag p99 '
            f"{duration(report.send_lag_s.p99)}, at most {duration(report.send_lag_bound_s)}.</p>"
        )
    reasons = "".join(f"<li>{escape(printable(reason))}</li>" for reason in report.invalid_because)
    return (
        '<div class="state bad"><strong>Not valid.</strong> These figures do not measure the target alone:'
        f"<ul>{reasons}</ul></div>"
    )


def _fitting(sheet: Sheet) -> Sheet:
    """Percentiles go down the page: three columns fit a narrow screen, nine do not."""
    return sheet.transposed() if sheet.title == "Latency" and sheet.rows else sheet


def _table(sheet: Sheet) -> str:
    has_words = not sheet.header or any(name in _WORDS for name in sheet.header)
    kind = ' class="words"' if has_words else ""
    caption = f"<caption><span>{escape(printable(sheet.caption))}</span></caption>" if sheet.caption else ""
    head = ""
    if sheet.header:
        cells = "".join(
            f'<th scope="col">{escape(name)}</th>' if name else "<td></td>" for name in sheet.header
        )
        head = f"<thead><tr>{cells}</tr></thead>"
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in sheet.rows
    )
    name = escape(printable(sheet.title), quote=True)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{name}">'
        f"<table{kind}>{caption}{head}<tbody>{body}</tbody></table></div>"
    )


def _figure(chart: Chart, name: str) -> str:
    return f"<figure><figcaption>{escape(chart.title)}</figcaption>{svg(chart, name)}</figure>"


def _charts(report: Report) -> Iterable[Chart]:
    if not report.rows:
        return
    over_time = curves.spans(report.rows, report.makespan_s)
    if report.requests.served:
        yield _by_rank(report)
        if report.tpot_s.count > report.tpot_s.failed:
            yield _tpot(report)
    yield _sent(report, over_time)
    yield _met(over_time)
    yield _lag(report, over_time)
    if report.attainment:
        yield _slo(report)
    if report.samples:
        yield from _stages(report.samples)


def _ranked(name: str, values: Sequence[float], failed: int, factor: float = 1.0) -> Line:
    found = curves.cdf(values, failed)
    points = [
        (-math.log10(1 - share), value * factor)
        for value, share in zip(found.values, found.share, strict=True)
        if share < 1
    ]
    if failed == 0 and found.values:  # the largest, at the rank it stands for
        points.append((math.log10(len(values)) if len(values) > 1 else 0.3, found.values[-1] * factor))
    return Line(name, sorted(points))


def _rank_ticks(count: int) -> list[tuple[float, str]]:
    most = math.log10(max(count, 10))
    kept = [rank for rank in _RANKS if -math.log10(1 - rank) <= most + 1e-9]
    marks = [(-math.log10(1 - rank), f"{100 * rank:g}") for rank in kept]
    return marks if marks[-1][0] > most - 0.02 else [*marks, (most, "")]


def _by_rank(report: Report) -> Chart:
    served = [row for row in report.rows if row.is_served]
    failed = report.requests.failed
    lines = [_ranked("whole answer", [measures.latency_s(row) for row in served], failed)]
    bounds = [] if report.slo.latency_s is None else [(report.slo.latency_s, "SLO 1x, whole answer")]
    if report.ttft_s.count:
        ttfts = [value for row in served if (value := measures.ttft_s(row)) is not None]
        lines.append(_ranked("first token", ttfts, failed))
        if report.slo.ttft_s is not None:
            bounds.append((report.slo.ttft_s, "SLO 1x, first token"))
    shown = report.latency_s
    return Chart(
        "Time from schedule, by percentile",
        f"Whole answer: median {_or_failed(shown.p50)}, 99th percentile {_or_failed(shown.p99)}, "
        f"largest {duration(shown.max)}; {failed} of {report.requests.sent} requests failed.",
        "percentile of all requests (%)",
        "seconds",
        lines,
        bounds=bounds,
        x_ticks=_rank_ticks(report.requests.sent),
    )


def _or_failed(value: float | None) -> str:
    return "on a failed request" if value is None else duration(value)


def _tpot(report: Report) -> Chart:
    values = [v for row in report.rows if row.is_served and (v := measures.tpot_s(row)) is not None]
    bound = report.slo.tpot_s
    shown = report.tpot_s
    return Chart(
        "Time per output token, by percentile",
        f"Median {_or_failed(shown.p50)}, 99th percentile {_or_failed(shown.p99)}.",
        "percentile of all requests (%)",
        "milliseconds",
        [_ranked("time per token", values, shown.failed, 1000)],
        bounds=[] if bound is None else [(1000 * bound, "SLO 1x")],
        x_ticks=_rank_ticks(shown.count),
    )


def _sent(report: Report, over_time: Sequence[Span]) -> Chart:
    width_s = over_time[0].to_s
    most = max(span.sent for span in over_time)
    return Chart(
        "Requests sent",
        f"{report.arrivals.achieved_rate_rps:.2f} a second on average, at most {most} in {width_s:g} s.",
        "time (s)",
        f"requests per {width_s:g} s",
        bars=[(span.from_s, span.to_s, span.sent) for span in over_time],
    )


def _met(over_time: Sequence[Span]) -> Chart:
    def line(name: str, of: Callable[[Span], float | None]) -> Line:
        return Line(name, [((span.from_s + span.to_s) / 2, of(span)) for span in over_time])

    failed = sum(span.failed for span in over_time)
    has_p99 = any(span.p99_s != span.max_s for span in over_time)  # below 100 requests they are one
    worst = max(over_time, key=lambda span: span.max_s or 0.0)
    said = "none was served" if worst.max_s is None else f"largest {duration(worst.max_s)}"
    return Chart(
        "Latency over time",
        f"Latency by scheduled time: {said}, "
        f"of requests scheduled from {worst.from_s:g} to {worst.to_s:g} s; {failed} failed.",
        "scheduled time (s)",
        "seconds",
        [
            line("median", lambda span: span.median_s),
            *([line("99th percentile", lambda span: span.p99_s)] if has_p99 else []),
            line("largest", lambda span: span.max_s),
        ],
        marks=[(span.from_s + span.to_s) / 2 for span in over_time if span.failed],
        mark_name="requests failed",
    )


def _lag(report: Report, over_time: Sequence[Span]) -> Chart:
    lag = report.send_lag_s
    return Chart(
        "Send lag of the generator",
        f"Largest lag over time; 99th percentile {duration(lag.p99)}, largest {duration(lag.max)}; "
        f"a 99th percentile up to {duration(report.send_lag_bound_s)} is valid.",
        "scheduled time (s)",
        "milliseconds",
        [Line("largest lag", [(span.from_s, 1000 * span.lag_max_s) for span in over_time], steps=True)],
        bounds=[(1000 * report.send_lag_bound_s, "bound on the 99th percentile")],
    )


def _slo(report: Report) -> Chart:
    lines = report.attainment
    said = "; ".join(f"{line.scale:g} times: {100 * line.attainment_ratio:.1f} %" for line in lines)
    return Chart(
        "Requests within the SLO",
        said,
        "SLO scale",
        "requests (%)",
        bars=[(k + 0.2, k + 0.8, 100 * line.attainment_ratio) for k, line in enumerate(lines)],
        x_ticks=[
            (0.0, ""),
            *((k + 0.5, f"{line.scale:g}x") for k, line in enumerate(lines)),
            (float(len(lines)), ""),
        ],
        y_least=100.0,
    )


def _stages(samples: Sequence[StageSample]) -> Iterable[Chart]:
    wanted: list[tuple[str, str, Callable[[StageSample], float | None]]] = [
        ("Waiting at the stages", "items", lambda s: s.queue),
        ("In flight at the stages", "items", lambda s: s.in_flight),
        ("Ready replicas", "replicas", lambda s: s.ready),
        ("Busy replicas", "%", lambda s: None if s.busy_ratio is None else 100 * s.busy_ratio),
    ]
    indices = sorted({sample.stage for sample in samples})
    for title, unit, of in wanted:
        if all(of(sample) is None for sample in samples):
            continue
        lines = [
            Line(f"stage {k}", [(s.at_s, of(s)) for s in samples if s.stage == k], steps=True)
            for k in indices
        ]
        most = max((v, s.stage) for s in samples if (v := of(s)) is not None)
        said = f"At most {most[0]:.4g} {unit}, at stage {most[1]}."
        yield Chart(title, said, "time (s)", unit, lines, y_least=1.0)
