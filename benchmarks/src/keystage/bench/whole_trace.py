"""The Azure Functions trace dealt to pipelines, for `mixed` and `soak`; a stand-in where there are no files.

Before it: trace files, where they are present. After it: arrival times by pipeline. The samples of the 2019
trace (100 and 500 functions, invocations a minute, 08:00 to 16:00) are replayed with exactly the counts of
the file; within its minute an invocation's time is uniform, as a Poisson process with that count has it
(`keystage.loadgen.traces`). Function i in the file's order goes to pipeline i mod n, as AlpaServe and
Shepherd deal functions to models; nothing is left out. A speed of 10 plays ten minutes in one: arrivals are
closer, service times stay.

Without files a stand-in of the same shape is drawn by a fixed seed: one function has the share of all
invocations that the sample's first has, with a lag-1 autoregression from minute to minute; the others' totals
are the quantiles of a log-normal law, their minutes Poisson. `STAND_IN` holds what was measured on the
samples.
"""

from __future__ import annotations

import csv
import dataclasses
import math
from pathlib import Path
from statistics import NormalDist
from typing import Literal

import numpy as np

from keystage.bench.paper_arrivals import MINUTE_S, MINUTES, Floats, PaperTraceError, read_counts
from keystage.loadgen import arrivals
from keystage.loadgen.traces import Selection, TraceError, open_trace

Sample = Literal[100, 500]


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """What a sample looks like.

    Attributes:
        total: invocations.
        top_ratio: part of them that are the first function's.
        log_mean: mean of the logarithm of a function's total.
        log_sd: its standard deviation.
        minute_cv: CV of all invocations a minute, which is nearly that of the first function.
        lag1: their autocorrelation from minute to minute.
    """

    total: int
    top_ratio: float
    log_mean: float
    log_sd: float
    minute_cv: float
    lag1: float


STAND_IN: dict[Sample, Shape] = {
    100: Shape(339_657, 0.805, 3.82, 2.56, 0.112, 0.56),
    500: Shape(3_037_902, 0.631, 3.81, 2.61, 0.100, 0.79),
}
"""Measured on the two samples."""
_STAND_IN_SEED = 2019


@dataclasses.dataclass(frozen=True, slots=True)
class CountTrace:
    """Invocations a minute of some functions.

    Attributes:
        names: functions in the file's order, as "app/func".
        counts: invocations [functions, minutes].
        path: the file, None for the stand-in.
        source: where it comes from, in words.
    """

    names: tuple[str, ...]
    counts: Floats
    path: Path | None
    source: str

    def dealt(self, pipelines: int, from_minute: int, minutes: int) -> Floats:
        """Invocations [pipelines, minutes] of a window."""
        window = self.counts[:, from_minute : from_minute + minutes]
        return np.stack([window[k::pipelines].sum(axis=0) for k in range(pipelines)])

    def times_s(
        self, pipelines: int, from_minute: int, minutes: int, speed: float, seed: int
    ) -> list[Floats]:
        """Arrivals of each pipeline in a window, in seconds from its begin, `speed` times as fast.

        Args:
            pipelines: how many the functions are dealt to.
            from_minute: first minute of the window.
            minutes: length of the window.
            speed: at least 1.
            seed: of the times within minutes.

        Raises:
            PaperTraceError: the file cannot be read, or other counts than it holds came of it.
        """
        if self.path is None:
            found = self._placed(pipelines, from_minute, minutes, seed)
        else:
            found = self._replayed(self.path, pipelines, from_minute, minutes, seed)
        wanted = self.dealt(pipelines, from_minute, minutes)
        edges_s = np.arange(minutes + 1) * MINUTE_S
        for k, times_s in enumerate(found):
            if not np.array_equal(np.histogram(times_s, edges_s)[0], wanted[k]):
                raise PaperTraceError(
                    f"{self.source}: the minutes of pipeline {k} do not hold the file's counts"
                )
        return [times_s / speed for times_s in found]

    def _replayed(self, path: Path, pipelines: int, first: int, minutes: int, seed: int) -> list[Floats]:
        pipeline = {name: i % pipelines for i, name in enumerate(self.names)}
        found: list[list[float]] = [[] for _ in range(pipelines)]
        window = Selection(from_s=first * MINUTE_S, to_s=(first + minutes) * MINUTE_S)
        try:
            for one in open_trace(path).invocations(window, within="poisson", seed=seed):
                found[pipeline[one.function]].append(one.at_s)
        except TraceError as error:
            raise PaperTraceError(str(error)) from error
        return [np.array(times_s) for times_s in found]

    def _placed(self, pipelines: int, first: int, minutes: int, seed: int) -> list[Floats]:
        found = []
        for k, counts in enumerate(self.dealt(pipelines, first, minutes)):
            random = arrivals.stream(seed, 1000 + k)
            minute = np.repeat(np.arange(minutes), counts.astype(int))
            found.append(np.sort((minute + random.random_sample(len(minute))) * MINUTE_S))
        return found


def load(sample: Sample, given: Path | None) -> CountTrace:
    """A sample of the 2019 trace, or its stand-in.

    Args:
        sample: how many functions.
        given: folder of traces; None looks for `../shared/traces` beside the checkout.

    Raises:
        PaperTraceError: a folder was named that lacks the file, or the file is garbled.
    """
    name = Path(f"azure-functions-2019/sample{sample}_8h_invocations.csv")
    path = _found(name, given)
    if path is None:
        counts = _stand_in(sample)
        names = tuple(f"stand-in/{i}" for i in range(sample))
        return CountTrace(
            names, counts, None, f"stand-in of the Azure Functions 2019 sample of {sample} functions"
        )
    counts = read_counts(path)
    with path.open(encoding="utf-8", newline="") as file:
        names = tuple(f"{row[1]}/{row[2]}" for row in list(csv.reader(file))[1:])
    return CountTrace(names, counts, path, f"Azure Functions 2019, sample of {len(names)} functions")


def _found(name: Path, given: Path | None) -> Path | None:
    if given is not None:
        if not (given / name).is_file():
            raise PaperTraceError(f"traces folder {given} lacks {name}")
        return given / name
    for above in Path(__file__).resolve().parents:
        path = above.parent / "shared" / "traces" / name
        if path.is_file():
            return path
    return None


def _stand_in(sample: Sample) -> Floats:
    shape = STAND_IN[sample]
    random = arrivals.stream(_STAND_IN_SEED, sample)
    others = sample - 1
    law = NormalDist(shape.log_mean, shape.log_sd)
    totals = np.exp([law.inv_cdf((i + 0.5) / others) for i in range(others)])
    totals *= shape.total * (1 - shape.top_ratio) / totals.sum()
    counts = random.poisson(random.permutation(totals)[:, None] / MINUTES, (others, MINUTES))
    level = np.empty(MINUTES)
    noise = random.standard_normal(MINUTES)
    level[0] = noise[0]
    for k in range(1, MINUTES):
        level[k] = shape.lag1 * level[k - 1] + math.sqrt(1 - shape.lag1**2) * noise[k]
    top = shape.total * shape.top_ratio / MINUTES * (1 + shape.minute_cv * level)
    return np.vstack([np.maximum(0, np.round(top)), counts]).astype(float)
