"""Rows, figures and pictures of live runs beside simulated ones; used by `e2e` and `mixed`.

Before it: scores by cell and policy. After it: the frame, and PNG files. Ratios are ours / theirs over cells:
geometric means for each seed, so that a figure's samples are seeds; simulated / live ratios have a
sample for every (cell, policy). Spread between cells is the load's and not the machine's, so those are not
bounded.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from keystage.bench.frame import Figure
from keystage.bench.paper_figures import canvas, line
from keystage.bench.whole_score import PERCENTILES, Score

DPI = 130
AIM = "0.9 to 1.1"


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """A cell under a policy in both worlds.

    Attributes:
        cell: label of the load.
        x: where it stands on the axis of the plots.
        seed: of the arrivals.
        policy: who steered.
        live: on the real platform.
        simulated: its twin, None where there is none.
    """

    cell: str
    x: str
    seed: int
    policy: str
    live: Score
    simulated: Score | None


MEASURES: Mapping[str, Callable[[Score], float]] = {
    "mean_ms": lambda s: 1e3 * s.mean_s,
    "slowdown": lambda s: s.slowdown,
    "p99_ms": lambda s: 1e3 * s.p99_s,
    "goodput_rps": lambda s: s.goodput_rps,
    "gpu_s": lambda s: s.gpu_s,
    "queue": lambda s: s.queue,
}


def rows(pairs: Sequence[Pair], world: str = "live") -> list[dict[str, object]]:
    """Rows of each cell and policy, means over seeds: live, its twin, and the ratio of the two.

    Args:
        pairs: scores.
        world: where those under `live` were made.
    """
    found: list[dict[str, object]] = []
    for cell, policy in dict.fromkeys((p.cell, p.policy) for p in pairs):
        own = [p for p in pairs if (p.cell, p.policy) == (cell, policy)]
        live = _row(cell, policy, world, [p.live for p in own])
        found.append(live)
        twins = [p.simulated for p in own if p.simulated is not None]
        if len(twins) == len(own):
            twin = _row(cell, policy, "simulated", twins)
            found += [twin, _ratio_row(cell, policy, own)]
    return found


def _row(cell: str, policy: str, world: str, scores: Sequence[Score]) -> dict[str, object]:
    values = {name: float(np.mean([value(s) for s in scores])) for name, value in MEASURES.items()}
    return {
        "cell": cell,
        "policy": policy,
        "world": world,
        **values,
        "within_slo": float(np.mean([s.met_ratio for s in scores])),
        "starts": float(np.mean([s.starts for s in scores])),
        "unserved": float(np.sum([s.unserved for s in scores])),
    }


def _ratio_row(cell: str, policy: str, pairs: Sequence[Pair]) -> dict[str, object]:
    both = [(p.live, p.simulated) for p in pairs if p.simulated is not None]
    values = {
        name: _geometric(_over(value(b), value(a)) for a, b in both) for name, value in MEASURES.items()
    }
    return {
        "cell": cell,
        "policy": policy,
        "world": "sim / live",
        **values,
        "within_slo": _geometric(_over(b.met_ratio, a.met_ratio) for a, b in both),
        "starts": math.nan,  # the simulator's hold those of its warm-up
        "unserved": math.nan,
    }


def sim_figures(pairs: Sequence[Pair]) -> dict[str, Figure]:
    """Simulated over live, a sample for every cell, seed and policy."""
    both = [(p.live, p.simulated) for p in pairs if p.simulated is not None]
    if not both:
        return {}
    words = {
        "mean_ms": ("latency", "mean latency"),
        "p99_ms": ("p99", "99th percentile of latency"),
        "goodput_rps": ("goodput", "goodput"),
        "gpu_s": ("gpu_seconds", "GPU-seconds"),
    }
    return {
        f"{name}_sim_vs_live": Figure(
            [_over(MEASURES[key](b), MEASURES[key](a)) for a, b in both],
            f"{meaning}, simulated / live",
            AIM,
            math.inf,
        )
        for key, (name, meaning) in words.items()
    }


def policy_figures(pairs: Sequence[Pair], ours: str, suffix: str = "") -> dict[str, Figure]:
    """Ours over each other policy: latency, goodput and GPU-seconds on the same arrivals, a sample a seed."""
    found: dict[str, Figure] = {}
    wanted = (
        ("latency", "mean_ms", "mean latency", "below 1"),
        ("slowdown", "slowdown", "mean latency in execution times", "below 1"),
        ("p99", "p99_ms", "99th percentile of latency", "below 1"),
        ("goodput", "goodput_rps", "goodput", "above 1"),
        ("gpu_seconds", "gpu_s", "GPU-seconds", ""),
    )
    seeds = sorted({p.seed for p in pairs})
    for other in dict.fromkeys(p.policy for p in pairs):
        if other == ours:
            continue
        for name, key, meaning, target in wanted:
            by_seed = [
                _ratio([p for p in pairs if p.seed == seed], ours, other, MEASURES[key]) for seed in seeds
            ]
            found[f"{name}_vs_{other}{suffix}"] = Figure(
                by_seed, f"{meaning} over all cells, {ours} / {other}", target, math.inf
            )
    return found


def _ratio(pairs: Sequence[Pair], ours: str, other: str, value: Callable[[Score], float]) -> float:
    mine = {p.cell: value(p.live) for p in pairs if p.policy == ours}
    theirs = {p.cell: value(p.live) for p in pairs if p.policy == other}
    return _geometric(_over(mine[cell], theirs[cell]) for cell in mine if cell in theirs)


def draw(path: Path, pairs: Sequence[Pair], x_label: str, title: str) -> Path:
    """Writes one PNG: latency, goodput, GPU-seconds, queue and percentiles of all policies.

    Live is drawn through, simulated dashed.

    Raises:
        OSError: the folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    figure, panels = canvas(2, 3, 14.0, 7.6)
    figure.suptitle(title, fontsize=10)
    xs = list(dict.fromkeys(p.x for p in pairs))
    labels = {
        "slowdown": ("mean latency (execution times)", "log"),
        "p99_ms": ("99th percentile (ms)", "log"),
        "goodput_rps": ("goodput (requests/s)", "linear"),
        "gpu_s": ("GPU-seconds", "linear"),
        "queue": ("waiting requests a stage", "log"),
    }
    policies = list(dict.fromkeys(p.policy for p in pairs))
    for axes, (key, (label, scale)) in zip(panels, labels.items(), strict=False):
        for policy in policies:
            own = [p for p in pairs if p.policy == policy]
            line(axes, policy, range(len(xs)), _by_x(xs, own, key, is_simulated=False))
            if all(p.simulated is not None for p in own):
                y = _by_x(xs, own, key, is_simulated=True)
                axes.plot(
                    range(len(xs)),
                    y,
                    linestyle="--",
                    linewidth=0.9,
                    marker="_",
                    color=axes.lines[-1].get_color(),
                )
        axes.set_xticks(range(len(xs)), xs, fontsize=8)
        axes.set(xlabel=x_label, ylabel=label, yscale=scale)
    for policy in policies:
        logs = np.log([p.live.percentiles_s for p in pairs if p.policy == policy])
        line(panels[5], policy, list(PERCENTILES), (1e3 * np.exp(logs.mean(axis=0))).tolist())
    panels[5].set(xlabel="percentile", ylabel="latency, all cells (ms)", yscale="log")
    panels[5].legend(fontsize=8)
    figure.savefig(path, dpi=DPI)
    return path


def _by_x(xs: Sequence[str], pairs: Sequence[Pair], key: str, *, is_simulated: bool) -> list[float]:
    value = MEASURES[key]
    means = []
    for x in xs:
        scores = [p.simulated if is_simulated else p.live for p in pairs if p.x == x]
        values = [max(1e-3, value(s)) for s in scores if s is not None]
        means.append(_geometric(values) if values else math.nan)
    return means


def _over(a: float, b: float) -> float:
    """A ratio; of nothing and nothing 1, of something and nothing infinite."""
    if b > 0:
        return a / b
    return 1.0 if a == b else math.inf


def _geometric(values: Iterable[float]) -> float:
    known = list(values)
    if not known:
        return math.nan
    if any(v <= 0 or not math.isfinite(v) for v in known):
        return float(np.mean(known))
    return float(np.exp(np.mean(np.log(known))))
