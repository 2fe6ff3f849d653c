"""Saturation search: the highest rate at which the target meets its SLO.

Beside `capacity`, which finds a throughput without a bound on latency. `Search` is the pure rule:
doubling from a start until a rate is not met (halving, if the start is not), then bisection until the
best rate met and the worst not met are within the precision. `run` asks for one open-loop window after
the other; at each rate windows are repeated, each with a seed of its own, until a majority has decided.

A window counts only if it is valid: a generator that was late has not offered the rate. A rate of which
most windows are invalid counts as not met, and the generator is named as the bound, not the target.
No two windows of a search share a seed: a target that keeps prompts would answer the second one sooner.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from keystage.loadgen import files
from keystage.loadgen.options import (
    DEFAULT_SEARCH_ATTAINMENT,
    DEFAULT_SEARCH_PRECISION,
    DEFAULT_SEARCH_RATE_RPS,
    DEFAULT_SEARCH_REPEATS,
    DEFAULT_SEARCH_WINDOW_S,
    LoadOptions,
    TooFewArrivalsError,
)
from keystage.loadgen.report import Report

FILE = "search.json"

LEAST_REQUESTS = 10
"""In a window: below, the search gives up going down."""

Verdict = Literal["met", "missed", "invalid"]
Bound = Literal["target", "generator", "max-rate", "trace", "no rate met"]


@dataclasses.dataclass(frozen=True, slots=True)
class Window:
    """One open-loop run at a rate.

    Attributes:
        seed: of the run.
        verdict: whether the SLO was met; `invalid` if the run is no measurement.
        requests: sent.
        failed: of them.
        attainment_ratio: share that met the SLO.
        latency_p99_s: from the scheduled time, None where it falls on a failure.
        send_lag_p99_s: of the generator.
        invalid_because: why the run is no measurement.
    """

    seed: int
    verdict: Verdict
    requests: int
    failed: int
    attainment_ratio: float
    latency_p99_s: float | None
    send_lag_p99_s: float | None
    invalid_because: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """All windows of one rate."""

    rate_rps: float
    verdict: Verdict
    windows: tuple[Window, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What a search found.

    Attributes:
        best_rps: the highest rate met, None if none was.
        not_met_rps: the lowest rate not met, None if none was tried.
        bound_by: what is the limit above `best_rps`.
        attainment_ratio: share of requests that had to meet the SLO.
        window_s: length of a window.
        steps: in order.
    """

    best_rps: float | None
    not_met_rps: float | None
    bound_by: Bound
    attainment_ratio: float
    window_s: float
    steps: tuple[Step, ...]


class Search:
    """The rule: which rate is next, given what was seen. Pure.

    Args:
        start_rps: first rate.
        least_rps: no lower one is tried.
        most_rps: no higher one is tried.
        precision: the search ends when not_met <= best * (1 + precision).
    """

    def __init__(self, start_rps: float, least_rps: float, most_rps: float, precision: float) -> None:
        self._next: float | None = min(max(start_rps, least_rps), most_rps)
        self._least, self._most, self._precision = least_rps, most_rps, precision
        self._above: Bound = "target"
        self._highest: Bound = "max-rate"
        self.best_rps: float | None = None
        self.not_met_rps: float | None = None

    @property
    def next_rps(self) -> float | None:
        """The rate to try; None when the search is over."""
        return self._next

    @property
    def bound_by(self) -> Bound:
        """What is the limit above the best rate."""
        if self.best_rps is None:
            return "no rate met"
        return self._highest if self.not_met_rps is None else self._above

    def limit(self, most_rps: float) -> None:
        """`next_rps` is beyond what the trace has for a window: `most_rps` is the highest that is not."""
        self._most, self._highest = most_rps, "trace"
        best_rps = self.best_rps or 0.0
        self._next = most_rps if most_rps >= self._least and most_rps > best_rps else None

    def tell(self, verdict: Verdict) -> None:
        """Takes the verdict on `next_rps`."""
        rate = self._next
        assert rate is not None, "the search is over"
        if verdict == "met":
            self.best_rps = rate
        else:
            self.not_met_rps = rate
            self._above = "generator" if verdict == "invalid" else "target"
        self._next = self._after(rate)

    def _after(self, rate: float) -> float | None:
        if self.not_met_rps is None:
            return min(2 * rate, self._most) if rate < self._most else None
        if self.best_rps is None:
            return max(rate / 2, self._least) if rate > self._least else None
        if self.not_met_rps <= self.best_rps * (1 + self._precision):
            return None
        return (self.best_rps + self.not_met_rps) / 2


def verdict_of(windows: tuple[Window, ...], repeats: int) -> Verdict | None:
    """The majority's verdict on a rate, None while more windows can change it.

    A rate is met only if more than half of `repeats` windows met it.
    """
    majority = repeats // 2 + 1
    counts = {
        name: sum(window.verdict == name for window in windows) for name in ("met", "missed", "invalid")
    }
    if counts["met"] >= majority:
        return "met"
    if counts["missed"] + counts["invalid"] < majority:
        return None
    return "invalid" if counts["invalid"] > counts["missed"] else "missed"


def run(
    options: LoadOptions, measure: Callable[[LoadOptions], Report], told: Callable[[str], None]
) -> tuple[Outcome, Report]:
    """Searches.

    Args:
        options: checked, with an SLO; `rate_rps` is where it starts.
        measure: runs one window of options with a rate, and reports on it.
        told: is told each step in words.

    Returns:
        What was found, and the report of the last window at the best rate (of the last of all, if no
        rate was met), its notes extended by the steps.

    Raises:
        OptionError: a window that gives no schedule, or a trace too short for one; whatever `measure`
            raises.
    """
    window_s = options.duration_s or DEFAULT_SEARCH_WINDOW_S
    repeats = options.search_repeats or DEFAULT_SEARCH_REPEATS
    wanted = options.search_attainment or DEFAULT_SEARCH_ATTAINMENT
    search = Search(
        options.rate_rps or DEFAULT_SEARCH_RATE_RPS,
        LEAST_REQUESTS / window_s,
        options.max_rate_rps,
        options.search_precision or DEFAULT_SEARCH_PRECISION,
    )
    steps: list[Step] = []
    shown: Report | None = None
    tried = 0
    while (rate_rps := search.next_rps) is not None:
        windows: tuple[Window, ...] = ()
        try:
            while (verdict := verdict_of(windows, repeats)) is None:
                seed = (options.seed + tried) % 2**64
                tried += 1
                made = measure(
                    dataclasses.replace(options, rate_rps=rate_rps, duration_s=window_s, seed=seed)
                )
                windows = (*windows, window_of(made, seed, wanted))
                if windows[-1].verdict == "met" or search.best_rps is None:
                    shown = made
        except TooFewArrivalsError as error:
            search.limit(error.count / window_s)
            if search.next_rps is None and shown is None:
                raise
            continue
        search.tell(verdict)
        steps.append(Step(rate_rps, verdict, windows))
        told(_said(steps[-1]))
    assert shown is not None, "at least one window was run"
    found = Outcome(search.best_rps, search.not_met_rps, search.bound_by, wanted, window_s, tuple(steps))
    notes = [*shown.notes, conclusion(found), *(_said(step) for step in steps)]
    return found, dataclasses.replace(shown, notes=notes)


def window_of(made: Report, seed: int, wanted: float) -> Window:
    """What a run says of its rate."""
    attained = made.attainment[0].attainment_ratio if made.attainment else 0.0
    verdict: Verdict = "met" if attained >= wanted else "missed"
    return Window(
        seed,
        verdict if made.valid else "invalid",
        made.requests.sent,
        made.requests.failed,
        attained,
        made.latency_s.p99,
        made.send_lag_s.p99,
        tuple(made.invalid_because),
    )


def conclusion(found: Outcome) -> str:
    """The outcome in words."""
    share = f"{100 * found.attainment_ratio:g} % of requests within the SLO"
    if found.best_rps is None:
        least = min(step.rate_rps for step in found.steps)
        return f"search: no rate down to {least:.4g}/s had {share} in most windows of {found.window_s:g} s"
    said = f"search: {found.best_rps:.4g}/s is the highest rate found with {share}"
    match found.bound_by:
        case "max-rate":
            return f"{said}; it is --max-rate, the target may do more"
        case "trace":
            return f"{said}; the trace has no more for a window of {found.window_s:g} s"
        case "generator":
            return f"{said}; at {found.not_met_rps:.4g}/s the generator was late, the target may do more"
        case "target" | "no rate met":
            return f"{said}; {found.not_met_rps:.4g}/s had not"


def write(found: Outcome, folder: Path) -> Path:
    """Writes search.json.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE
    with files.whole(path) as part:
        part.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")
    return path


def _said(step: Step) -> str:
    shares = ", ".join(
        "invalid" if window.verdict == "invalid" else f"{100 * window.attainment_ratio:.1f} %"
        for window in step.windows
    )
    return f"search: {step.rate_rps:.4g}/s {step.verdict} ({shares} of requests within the SLO)"
