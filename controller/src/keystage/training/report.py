"""Predicted against counted CV: the error table that decides which predictor is the default.

Before it: held-out examples. After it: `keystage train-cv` prints it, a test checks it. Error of a stage
is |log(predicted / counted)| of the CV with both at least 0.1 (nothing is sized by less), averaged over
the stages behind the entry, then over chains; 0.1 is about 10 %. All predictors are told the same: the
CV counted at the entry, and what the stages are. "same as upstream" says that CV for every stage.
`one step` tells each stage the CV counted in front of it instead; it shows a formula's own error.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from keystage.controller.maths import qna
from keystage.controller.maths.attention import Attention
from keystage.controller.maths.qna import Floats
from keystage.training.dataset import TEST_CVS, Example, Table, table

LEAST_CV = 0.1
"""Smaller CVs count as this: the least the experiments use."""


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One predictor's errors.

    Attributes:
        name: predictor.
        by_cv: mean error by the entry's CV.
        all: mean error over all chains.
        low: lower end of its 95 % interval (over chains).
        high: upper end.
    """

    name: str
    by_cv: dict[float, float]
    all: float
    low: float
    high: float


def errors(predicted: Floats, counted: Floats) -> Floats:
    """Mean absolute error of log CV by chain [n], over stages behind the entry ([n, k] each)."""
    ratio = np.log(np.maximum(predicted, LEAST_CV) / np.maximum(counted, LEAST_CV))
    means: Floats = np.abs(ratio[:, 1:]).mean(axis=1)
    return means


def same_as_upstream(data: Table) -> Floats:
    """The guess: every stage sees what the entry sees."""
    return np.repeat(data.cv[:, :1], data.cv.shape[1], axis=1)


def by_whitt(data: Table) -> Floats:
    """Whitt's formula as printed, stage after stage."""
    return _chained(data, lambda scv, station, passed: (qna.whitt(scv, station), passed))


def by_qna(data: Table) -> Floats:
    """The `qna` predictor."""
    return np.sqrt(qna.flow(data.entry_scv, data.chains).scv)


def one_step_guess(data: Table) -> Floats:
    """Every stage sees what was counted at the stage in front of it."""
    return np.concatenate((data.cv[:, :1], data.cv[:, :-1]), axis=1)


def one_step_qna(data: Table) -> Floats:
    """`qna` from what was counted at the stage in front."""
    return _chained(data, qna.depart, counted=True)


def _chained(
    data: Table, step: Callable[[float, qna.Station, float], tuple[float, float]], *, counted: bool = False
) -> Floats:
    n, k = data.cv.shape
    c = data.chains
    found = np.empty((n, k))
    for i in range(n):
        scv, passed = float(data.entry_scv[i]), 0.0
        for j in range(k):
            if counted:
                scv = float(data.cv[i, j]) ** 2
            found[i, j] = math.sqrt(scv) if not counted or j == 0 else found[i, j]
            station = qna.Station(
                *(float(a[i, j]) for a in (c.utilisation, c.servers, c.service_scv, c.most, c.fixed_ratio))
            )
            scv, passed = step(scv, station, passed)
            if counted and j + 1 < k:
                found[i, j + 1] = math.sqrt(scv)
    return found


def compare(examples: Sequence[Example], attention: Attention | None = None) -> list[Row]:
    """Errors of every predictor on the same examples."""
    data = table(examples)
    predictions: dict[str, Floats] = {
        "same as upstream": same_as_upstream(data),
        "whitt as printed": by_whitt(data),
        "qna": by_qna(data),
    }
    if attention is not None:
        predictions["attention"] = np.sqrt(attention.scv(data.entry_scv, data.chains))
    predictions["one step: same as upstream"] = one_step_guess(data)
    predictions["one step: qna"] = one_step_qna(data)
    return _rows(data, predictions)


def _rows(data: Table, predictions: Mapping[str, Floats]) -> list[Row]:
    rows = []
    for name, predicted in predictions.items():
        error = errors(predicted, data.cv)
        half = 1.96 * float(error.std(ddof=1)) / math.sqrt(len(error)) if len(error) > 1 else 0.0
        mean = float(error.mean())
        by_cv = {cv: float(error[data.entry_cv == cv].mean()) for cv in TEST_CVS if cv in data.entry_cv}
        rows.append(Row(name, by_cv, mean, mean - half, mean + half))
    return rows


def text(rows: Sequence[Row]) -> str:
    """The table for people."""
    columns = sorted({cv for row in rows for cv in row.by_cv})
    width = max(len(row.name) for row in rows)
    head = " ".join(f"{'CV ' + format(cv, 'g'):>7}" for cv in columns)
    lines = [f"{'mean |log error| of CV':<{width}} {head}     all (95 % interval)"]
    for row in rows:
        cells = " ".join(f"{row.by_cv.get(cv, math.nan):7.3f}" for cv in columns)
        lines.append(f"{row.name:<{width}} {cells} {row.all:7.3f} ({row.low:.3f}..{row.high:.3f})")
    return "\n".join(lines)


def example_text(example: Example, attention: Attention | None) -> str:
    """One chain, stage by stage: counted and predicted."""
    data = table([example])
    rows = [("counted", data.cv), ("qna", by_qna(data))]
    if attention is not None:
        rows.append(("attention", np.sqrt(attention.scv(data.entry_scv, data.chains))))
    lines = [f"entry CV {example.entry_cv:g}, CV of the arrivals at every stage:"]
    lines += [f"  {name:<10}" + " ".join(f"{v:6.2f}" for v in values[0]) for name, values in rows]
    return "\n".join(lines)
