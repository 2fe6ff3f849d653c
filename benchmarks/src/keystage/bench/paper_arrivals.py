"""Arrivals of the paper experiment: the Azure Functions trace, and gamma gaps of a given CV.

Before it: trace files where they are present. After it: `paper_world`. Only this module reads files.

Figure 6. The 2019 sample (500 functions, invocations a minute, 08:00 to 16:00) is dealt to the five
models in file order, function i to model i mod 5, as AlpaServe and Shepherd deal functions to models;
nothing is left out. A model's minute counts are scaled to the wanted mean rate; a seed takes a window of
the 480 minutes of its own. The 2019 trace says nothing within a minute: there, arrivals are a gamma
renewal process in operational time (unit rate, then warped so that each minute holds its share), with
the CV of gaps within a minute that the 2021 trace shows (each gap over its minute's mean gap, minutes
of at least four arrivals).

Where the files are absent a stand-in is used: per model, log-normal minute rates with the mean, spread
and lag-1 autocorrelation of the real ones, whose figures are `STAND_IN`.
"""

from __future__ import annotations

import csv
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from keystage.bench.frame import BenchError
from keystage.loadgen import arrivals

Floats = npt.NDArray[np.float64]

MINUTE_S = 60.0
MINUTES = 480
LEAST_IN_MINUTE = 4
COUNTS = Path("azure-functions-2019/sample500_8h_invocations.csv")
TIMES = Path("azure-functions-2021/Azure2021_200.csv")


@dataclasses.dataclass(frozen=True, slots=True)
class MinuteShape:
    """Spread of one model's invocations a minute.

    Attributes:
        mean: invocations a minute.
        cv: standard deviation over mean of the minutes.
        lag1: autocorrelation from minute to minute.
    """

    mean: float
    cv: float
    lag1: float


STAND_IN = (
    MinuteShape(521.2, 0.187, 0.307),
    MinuteShape(145.7, 0.421, 0.517),
    MinuteShape(4511.3, 0.136, 0.814),
    MinuteShape(821.5, 0.101, 0.472),
    MinuteShape(329.3, 0.170, 0.265),
)
"""Measured on the 2019 sample dealt in file order."""
STAND_IN_GAP_CV = 2.62
"""Measured on the 2021 rows."""


class PaperTraceError(BenchError):
    """A trace file that is there but cannot be used."""


@dataclasses.dataclass(frozen=True, slots=True)
class Trace:
    """What Figure 6 replays.

    Attributes:
        minutes: invocations of each model in each minute, [models, minutes].
        gap_cv: CV of gaps within a minute.
        source: where it comes from, in words.
    """

    minutes: Floats
    gap_cv: float
    source: str


def traces_folder(given: Path | None = None) -> Path | None:
    """The folder of traces: as given, else `../shared/traces` beside the checkout, else none."""
    if given is not None:
        if not ((given / COUNTS).is_file() and (given / TIMES).is_file()):
            raise PaperTraceError(f"traces folder {given} lacks {COUNTS} or {TIMES}")
        return given
    for above in Path(__file__).resolve().parents:
        folder = above.parent / "shared" / "traces"
        if (folder / COUNTS).is_file() and (folder / TIMES).is_file():
            return folder
    return None


def load_trace(models: int, given: Path | None = None) -> Trace:
    """The trace dealt to `models` models, or the stand-in.

    Raises:
        PaperTraceError: a folder was named that lacks the files, or a file is garbled.
    """
    folder = traces_folder(given)
    if folder is None:
        minutes = np.stack([_stand_in(STAND_IN[m % len(STAND_IN)], m) for m in range(models)])
        return Trace(minutes, STAND_IN_GAP_CV, "stand-in fitted to the Azure Functions traces")
    functions = read_counts(folder / COUNTS)
    dealt = np.stack([functions[m::models].sum(axis=0) for m in range(models)])
    return Trace(
        dealt,
        within_minute_cv(read_starts(folder / TIMES)),
        f"Azure Functions 2019 ({len(functions)} functions, {functions.shape[1]} minutes), gaps of 2021",
    )


def read_counts(path: Path) -> Floats:
    """Invocations [functions, minutes] of a 2019 file, in file order."""
    rows = _rows(path, 5)
    try:
        return np.array([[float(cell) for cell in row[4:]] for row in rows])
    except ValueError as error:
        raise PaperTraceError(
            f"{path}: a count is not a number, or rows differ in length: {error}"
        ) from error


def read_starts(path: Path) -> Floats:
    """Start times in seconds of a 2021 file (end minus duration), sorted."""
    rows = _rows(path, 4)
    try:
        return np.sort(np.array([float(row[2]) - float(row[3]) for row in rows]))
    except ValueError as error:
        raise PaperTraceError(f"{path}: a time is not a number: {error}") from error


def within_minute_cv(starts_s: Floats) -> float:
    """CV of gaps over their minute's mean gap; minutes of fewer than four arrivals are left out."""
    relative: list[float] = []
    minute = np.floor(starts_s / MINUTE_S)
    for number in np.unique(minute):
        inside = starts_s[minute == number]
        if len(inside) >= LEAST_IN_MINUTE:
            gaps = np.diff(inside)
            relative += (gaps / gaps.mean()).tolist()
    if not relative:
        raise PaperTraceError(f"no minute holds {LEAST_IN_MINUTE} arrivals: gaps within a minute are unknown")
    return float(np.std(relative))


def replayed(trace: Trace, model: int, rate_rps: float, duration_s: float, seed: int) -> Floats:
    """Arrival times of one model in the seed's window, at the wanted mean rate of the whole trace.

    Windows of consecutive seeds do not overlap while they fit; the window's own rate may differ from
    the mean, as the trace's does.
    """
    row = trace.minutes[model]
    rates = row / row.mean() * rate_rps
    length = math.ceil(duration_s / MINUTE_S)
    first = (seed * length) % max(1, len(rates) - length + 1)
    window = rates[first : first + length]
    edges_s = np.arange(len(window) + 1) * MINUTE_S
    passed = np.concatenate([[0.0], np.cumsum(window * MINUTE_S)])  # expected arrivals until each edge
    drawn = round(passed[-1] + 10 * trace.gap_cv * math.sqrt(passed[-1] + 1)) + 100
    operational = np.cumsum(arrivals.gaps(drawn, trace.gap_cv, _seed(seed, model)))
    times: Floats = np.interp(operational[operational < passed[-1]], passed, edges_s)
    return times[times < duration_s]


def bursty(rate_rps: float, cv: float, count: int, model: int, seed: int) -> Floats:
    """`count` arrivals with gamma gaps, whose mean rate is exactly the wanted one."""
    return arrivals.synthetic(rate_rps, cv, count / rate_rps, _seed(seed, model))


def _seed(seed: int, model: int) -> int:
    """Models of one seed have arrivals of their own; policies of one (seed, model) share them."""
    return seed * 1009 + model


def _rows(path: Path, least: int) -> list[list[str]]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.reader(file))[1:]
    except UnicodeDecodeError as error:
        raise PaperTraceError(f"{path} is no UTF-8 text: {error.reason} at byte {error.start}") from error
    except csv.Error as error:
        raise PaperTraceError(f"{path} is no CSV: {error}") from error
    except OSError as error:
        raise PaperTraceError(f"{path} cannot be read: {error.strerror}") from error
    short = next((n for n, row in enumerate(rows, start=2) if len(row) < least), None)
    if not rows or short is not None:
        raise PaperTraceError(f"{path}, line {short or 2}: expected at least {least} fields")
    return rows


def _stand_in(shape: MinuteShape, model: int) -> Floats:
    """Log-normal minute rates with a lag-1 autoregression in the logarithm."""
    spread = math.sqrt(math.log1p(shape.cv**2))
    noise = arrivals.stream(2019, model).standard_normal(MINUTES)
    level = np.empty(MINUTES)
    level[0] = noise[0]
    for k in range(1, MINUTES):
        level[k] = shape.lag1 * level[k - 1] + math.sqrt(1 - shape.lag1**2) * noise[k]
    minutes: Floats = shape.mean * np.exp(spread * level - spread**2 / 2)
    return minutes


def achieved_cv(times_s: Sequence[float] | Floats) -> float:
    """CV of the gaps between arrivals."""
    gaps = np.diff(np.asarray(times_s))
    return float(gaps.std() / gaps.mean()) if len(gaps) > 1 and gaps.mean() > 0 else 0.0
