"""`keystage compare`: reads two runs, refuses what cannot be compared, and shows the differences.

Before it: folders that `report` wrote, or files of requests alone (`requestlog`). `comparison` computes.
Runs are compared that were asked the same: with equal facts of their plans (`planfacts`), both valid. Where
there is no report, the scheduled times are compared. Whoever forces a comparison is told what differs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import msgspec

from keystage.loadgen import comparison, planfacts, report, requestlog
from keystage.loadgen.comparison import Comparison, Line, Side
from keystage.loadgen.measures import Slo
from keystage.loadgen.planfacts import PlanFacts
from keystage.loadgen.requestlog import RequestLogError
from keystage.loadgen.sender import Row
from keystage.loadgen.sheets import Sheet, bounds, duration, printable
from keystage.wire.unreadable import UNREADABLE


class CompareError(Exception):
    """Runs that cannot be read, or must not be compared (exit code 2)."""


class _Count(msgspec.Struct):
    count: int


class _Requests(msgspec.Struct):
    sent: int


class _Version(msgspec.Struct):
    version: int
    plan: msgspec.Raw = msgspec.Raw(b"null")


class _Saved(msgspec.Struct):
    """What is read of report.json."""

    valid: bool
    invalid_because: list[str]
    plan: PlanFacts
    slo: Slo
    ttft_s: _Count
    requests: _Requests


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """A run that was read.

    Attributes:
        path: as given.
        rows: in the order of the schedule.
        saved: of the report, None where there is none.
        notes: what was repaired.
    """

    path: Path
    rows: list[Row]
    saved: _Saved | None
    notes: list[str]

    @property
    def side(self) -> Side:
        """For `comparison`."""
        last_s = max(row.scheduled_s for row in self.rows)
        span_s = last_s if self.saved is None else max(self.saved.plan.duration_s, last_s)
        streams = (
            any(row.first_s is not None for row in self.rows)
            if self.saved is None
            else self.saved.ttft_s.count > 0
        )
        return Side(self.rows, span_s or 1.0, streams)


def load(path: Path) -> Run:
    """Reads a folder with report.json and requests.jsonl, or a file of requests.

    Raises:
        CompareError: what is missing or cannot be read.
    """
    file = path / requestlog.FILE if path.is_dir() else path
    saved = _saved(path / report.FILE) if path.is_dir() else None
    if path.is_dir() and saved is None and not file.exists():
        raise CompareError(f"{path}: holds neither {report.FILE} nor {requestlog.FILE}")
    try:
        rows, notes = requestlog.read(file)
    except RequestLogError as error:
        raise CompareError(str(error)) from error
    return Run(path, rows, saved, notes)


def _saved(file: Path) -> _Saved | None:
    try:
        text = file.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CompareError(f"{file}: {error.strerror}") from error
    try:
        found = msgspec.json.decode(text, type=_Version)
        if found.version != report.REPORT_VERSION or bytes(found.plan) == b"null":
            raise CompareError(
                f"{file}: is no report of `keystage load` of version {report.REPORT_VERSION} "
                f"(it says {found.version})"
            )
        return msgspec.json.decode(text, type=_Saved)
    except UNREADABLE as error:
        raise CompareError(f"{file}: {error}") from error


def objections(a: Run, b: Run) -> list[str]:
    """Why two runs should not be compared, in words; empty where they may be."""
    found = [f"plans differ: {told}" for told in plan_differences(a, b)]
    for name, run in (("A", a), ("B", b)):
        if run.saved is not None and not run.saved.valid:
            found.append(f"{name} is not valid: {'; '.join(run.saved.invalid_because)}")
        elif absent := _absent(run):
            found.append(f"{name} is not whole: {absent}")
    if a.saved is not None and b.saved is not None and _limits(a.saved.slo) != _limits(b.saved.slo):
        shown = [bounds(saved.slo) or "none" for saved in (a.saved, b.saved)]
        found.append(f"SLOs differ: {shown[0]}; {shown[1]}")
    return found


def _absent(run: Run) -> str:
    """Which requests a file lacks, in words: those that end last, the slow ones, are lost first."""
    if run.saved is not None and len(run.rows) != run.saved.requests.sent:
        return f"{requestlog.FILE} has {len(run.rows)} requests, {report.FILE} {run.saved.requests.sent}"
    lacking = run.rows[-1].index + 1 - len(run.rows)
    if not lacking:
        return ""
    places = (place for place, row in enumerate(run.rows) if row.index != place)
    return f"{lacking} requests up to {run.rows[-1].index} are not in the file, the first is {next(places)}"


def _limits(slo: Slo) -> tuple[float | None, float | None, float | None]:
    return slo.ttft_s, slo.tpot_s, slo.latency_s


def plan_differences(a: Run, b: Run) -> list[str]:
    """What differs in what was asked."""
    if a.saved is not None and b.saved is not None:
        return planfacts.differences(a.saved.plan, b.saved.plan)
    if len(a.rows) != len(b.rows):
        return [f"requests {len(a.rows)} and {len(b.rows)}"]
    if [(row.index, row.scheduled_s) for row in a.rows] != [(row.index, row.scheduled_s) for row in b.rows]:
        return ["the times themselves"]
    return []


def compare(
    a: Path,
    b: Path,
    *,
    metrics: Sequence[str] = (),
    slo: Slo | None = None,
    is_forced: bool = False,
    alpha: float = comparison.ALPHA,
    block_s: float | None = None,
    seed: int = 0,
) -> Comparison:
    """Compares two runs.

    Args:
        a: folder or file of the one.
        b: of the other.
        metrics: names or groups, all if empty.
        slo: what goodput means; that of A, if None or without bounds.
        is_forced: objections become notes.
        alpha: error of all intervals together.
        block_s: length of a block of the bootstrap, derived if None.
        seed: of the bootstrap.

    Raises:
        CompareError: what cannot be read, or must not be compared.
    """
    runs = [load(path) for path in (a, b)]
    found = objections(*runs)
    given = slo is not None and slo.is_set
    if given:
        found = [told for told in found if not told.startswith("SLOs differ")]
    if found and not is_forced:
        raise CompareError("\n  ".join([*found, "(--force compares all the same)"]))
    if not 0 < alpha < 1:
        raise CompareError(f"--confidence must be between 0 and 1, got {1 - alpha:g}")
    sides = [run.side for run in runs]
    if block_s is not None and not 0 < block_s <= sides[0].span_s:
        raise CompareError(f"--block must be above 0 and at most {sides[0].span_s:g} s, got {block_s:g}")
    try:
        asked = comparison.wanted(metrics)
    except ValueError as error:
        raise CompareError(str(error)) from error
    meant = slo if slo is not None and given else runs[0].saved.slo if runs[0].saved is not None else Slo()
    made = comparison.compared(
        *sides,
        names=(str(a), str(b)),
        slo=meant,
        is_paired=not plan_differences(*runs),
        metrics=asked,
        alpha=alpha,
        block_s=block_s,
        seed=seed,
    )
    missing = [metric for metric in asked if metric not in {line.metric for line in made.lines}]
    if not made.lines:
        raise CompareError(f"{', '.join(missing)}: not measured in both runs")
    notes = [note for run in runs for note in run.notes] + [f"forced: {told}" for told in found]
    if metrics and missing:
        notes.append(f"not measured in both runs: {', '.join(missing)}")
    if "goodput" in asked and not meant.is_set:
        notes.append("no goodput without an SLO: give --slo-ttft, --slo-tpot or --slo-latency")
    return dataclasses.replace(made, notes=notes)


def to_json(found: Comparison) -> bytes:
    """A comparison as JSON; bounds and values that do not exist are null."""
    return msgspec.json.format(msgspec.json.encode(found), indent=2)


def sheet(found: Comparison) -> Sheet:
    """A comparison as a table."""
    rows = [
        (
            line.metric,
            _value(line, line.a),
            _value(line, line.b),
            _value(line, line.difference, signed=True),
            "-" if line.relative is None else f"{100 * line.relative:+.1f} %",
            _range(line),
            line.verdict + (f": {line.because}" if line.because else ""),
        )
        for line in found.lines
    ]
    cut = found.blocks
    drawn = "of both runs together" if cut.is_paired else "of each run by itself"
    caption = (
        f"verdict: B beside A; intervals hold together with {100 * found.confidence:g} % "
        f"({found.intervals} intervals, Bonferroni). {found.replicates} replicates of {cut.count} blocks of "
        f"{cut.block_s:.3g} s, {drawn}; latencies stay correlated over {cut.correlated_s:.3g} s. "
        "'no difference': none was found; a smaller one than the interval's width may be there. "
        "Whatever else changed between the runs is in the difference too"
    )
    header = ("metric", "A", "B", "B - A", "relative", "interval of B - A", "verdict")
    title = f"A {found.a} ({found.requests[0]} requests), B {found.b} ({found.requests[1]})"
    return Sheet(printable(title), header, rows, caption)


def _range(line: Line) -> str:
    if line.verdict in ("too few data", "undefined"):
        return "-"
    low = "unbounded" if line.low is None else _value(line, line.low, signed=True)
    high = "unbounded" if line.high is None else _value(line, line.high, signed=True)
    return f"{low} to {high}"


def _value(line: Line, value: float | None, *, signed: bool = False) -> str:
    if value is None:
        return "failed" if line.verdict == "undefined" and not signed else "-"
    sign = ("-" if value < 0 else "+") if signed else ""
    if line.unit == "s":
        return sign + duration(abs(value))
    shown = abs(value) if signed else value
    return f"{sign}{shown:.3f}/s" if line.unit else f"{sign}{100 * shown:.2f} %"
