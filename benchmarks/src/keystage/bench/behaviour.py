"""`keystage bench behaviour`: the plots of docs/control.md: step and burst response, CV propagation.

Before it: nothing. After it: the frame's table, and in OUT/behaviour three PNG figures and the same series
as Mermaid charts (charts.md), to be pasted into docs/control.md. Everything runs in the simulator with fixed
seeds, so the same code gives the same numbers on any machine.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keystage.bench.frame import BenchResult, Figure
from keystage.controller.domain.decision import Action
from keystage.controller.domain.snapshot import Slo, Snapshot
from keystage.controller.maths import attention, qna
from keystage.controller.maths.qna import Floats
from keystage.controller.policy.settings import PolicySettings
from keystage.controller.policy.steering import Keystage
from keystage.simulator.api import ArrivalSpec, LoadSpec, PipelineSpec, StageSpec, World
from keystage.simulator.run import simulate
from keystage.training.dataset import TEST_CVS, held_out_example

SERVICES_S = (0.004, 0.006, 0.010, 0.005, 0.004, 0.006, 0.005, 0.004)
"""Eight unequal stages; the third is the key stage."""
KEY = 2
DEADLINE_S = 0.5
START_S = 1.0
SEED = 5


@dataclasses.dataclass(frozen=True, slots=True)
class Traffic:
    """Poisson arrivals whose rate changes: (from second, arrivals a second), the last pair ends it."""

    name: str
    pieces: tuple[tuple[float, float], ...]

    def times_s(self, seed: int) -> tuple[float, ...]:
        """Arrival times."""
        random = np.random.default_rng(seed)
        drawn: list[float] = []
        for (begin_s, rate), (end_s, _) in itertools.pairwise(self.pieces):
            count = random.poisson(rate * (end_s - begin_s))
            drawn += np.sort(random.uniform(begin_s, end_s, count)).tolist()
        return tuple(drawn)


STEP = Traffic("step", ((0.0, 80.0), (60.0, 320.0), (150.0, 160.0), (240.0, 0.0)))
BURST = Traffic("burst", ((0.0, 60.0), (30.0, 600.0), (32.0, 60.0), (80.0, 0.0)))


@dataclasses.dataclass(frozen=True, slots=True)
class Course:
    """What a run showed second by second.

    Attributes:
        at_s: seconds [n].
        desired: replicas wanted of the key stage at the end of each second [n].
        ready: replicas ready of it [n].
        queue: items waiting at it when the policy looked first in that second [n].
        latency_s: mean latency of the requests that arrived in that second, NaN where none did [n].
        changes: (time, desired) of the key stage, in order.
    """

    at_s: Floats
    desired: Floats
    ready: Floats
    queue: Floats
    latency_s: Floats
    changes: tuple[tuple[float, int], ...]


class _Watched:
    """Keystage's policy, with the key stage's queue noted at every look."""

    def __init__(self, settings: PolicySettings) -> None:
        self._policy = Keystage(settings)
        self.queues: list[float] = []

    def steer(self, snapshot: Snapshot) -> Sequence[Action]:
        routers = snapshot.pipelines[0].stages[KEY].routers
        self.queues.append(sum(r.counters.queue or 0.0 for r in routers))
        return self._policy.steer(snapshot)


def follow(traffic: Traffic, settings: PolicySettings, seed: int = SEED) -> Course:
    """Runs the eight-stage pipeline under the policy and reads the key stage off it."""
    pipeline = PipelineSpec(
        name="p",
        stages=tuple(StageSpec(alpha_s=s) for s in SERVICES_S),
        arrivals=ArrivalSpec(times_s=traffic.times_s(seed)),
        slo=Slo(deadline_s=DEADLINE_S),
    )
    world = World(pipelines=(pipeline,), load=LoadSpec(fixed_s=START_S))
    watched = _Watched(settings)
    outcome = simulate(world, watched, seed).pipelines[0]
    seconds = np.arange(1, int(traffic.pieces[-1][0]) + 1)
    series = outcome.stages[KEY].series
    row = np.searchsorted(series[:, 0], seconds, side="right") - 1
    second = np.floor(outcome.arrived_s).astype(int)
    latency_s = np.full(len(seconds), np.nan)
    for k in np.unique(second[second < len(seconds)]):
        latency_s[k] = outcome.latency_s[second == k].mean()
    looks = np.array(watched.queues)
    per_second = round(1 / world.tick_s)
    index = np.minimum(seconds * per_second, len(looks) - 1)
    jumps = np.flatnonzero(np.diff(series[:, 1], prepend=-1.0))
    return Course(
        at_s=seconds.astype(np.float64),
        desired=series[row, 1],
        ready=series[row, 2],
        queue=looks[index],
        latency_s=latency_s,
        changes=tuple((float(series[i, 0]), int(series[i, 1])) for i in jumps),
    )


def settled_s(course: Course, since_s: float, until_s: float) -> float:
    """Seconds from a step up until the wanted number is what it stays at least, to the end of the step."""
    inside = [(t, n) for t, n in course.changes if t < until_s]
    last = inside[-1][1]
    below = [t for t, n in inside if t >= since_s and n < last]
    later = [t for t, n in inside if t > (below[-1] if below else since_s) and n >= last]
    return (later[0] if later else since_s) - since_s


def dips(course: Course, since_s: float, until_s: float, rate_rps: float) -> int:
    """How often the wanted number became less than the load needs in that time."""
    need = math.ceil(rate_rps * SERVICES_S[KEY])
    return sum(n < need for t, n in course.changes if since_s <= t < until_s)


def reversals(course: Course, since_s: float, until_s: float) -> int:
    """How often the wanted number turned from falling to rising while the rate stood still."""
    numbers = [n for t, n in course.changes if since_s <= t < until_s]
    signs = [b > a for a, b in itertools.pairwise(numbers)]
    return sum(not a and b for a, b in itertools.pairwise(signs))


def propagation(seeds: int, scale: float) -> dict[str, Floats]:
    """Mean CV per stage on one held-out chain: counted, and by both predictors.

    Returns:
        Name of the source to array [entry CVs, stages].
    """
    found: dict[str, list[Floats]] = {"simulated": [], "qna": [], "attention": []}
    for cv in TEST_CVS:
        runs = [held_out_example(seed, cv, scale) for seed in range(seeds)]
        found["simulated"].append(np.mean([e.cv for e in runs], axis=0))
        for name, predictor in (("qna", qna.propagate), ("attention", attention.propagate)):
            scvs = [predictor(e.cv[0] ** 2, e.stations) for e in runs]
            found[name].append(np.mean(np.sqrt(scvs), axis=0))
    return {name: np.array(rows) for name, rows in found.items()}


def run(*, quick: bool = False, out: Path = Path("out")) -> BenchResult:
    """Runs the three experiments.

    Args:
        quick: fewer chains behind the CV curves.
        out: the figures go to its folder `behaviour`.
    """
    settings = PolicySettings()
    step, burst = follow(STEP, settings), follow(BURST, settings)
    cvs = propagation(2 if quick else 4, 0.25 if quick else 1.0)
    folder = out / "behaviour"
    folder.mkdir(parents=True, exist_ok=True)
    _draw_course(folder / "step.png", "80, 320, 160 a second", step)
    _draw_course(folder / "burst.png", "600 a second for 2 s", burst)
    _draw_cvs(folder / "cv.png", cvs)
    rows = [
        {"experiment": traffic.name, "most": int(c.desired.max()), "longest queue": int(c.queue.max()),
         "worst second (s)": round(float(np.nanmax(c.latency_s)), 3),
         "median second (s)": round(float(np.nanmedian(c.latency_s)), 3)}
        for traffic, c in ((STEP, step), (BURST, burst))
    ]  # fmt: skip
    figures = {
        "settled_s": Figure(
            [settled_s(step, 60.0, 150.0)],
            "seconds from a 4x step until the wanted number stays",
            f"at most {START_S + 1:g} s (one start and 1 s)",
        ),
        "dips": Figure(
            [float(dips(step, 150.0, 240.0, 160.0))],
            "times the wanted number fell below lambda / mu after a step down",
            "0",
        ),
        "reversals": Figure(
            [float(sum(reversals(step, *span) for span in ((10, 60), (65, 150), (150, 240))))],
            "turns from fewer to more replicas at a steady rate",
            "0",
        ),
    }
    times = ", ".join(f"{1000 * s:g}" for s in SERVICES_S)
    world = f"services {times} ms; key stage {KEY}; deadline {DEADLINE_S:g} s; a start takes {START_S:g} s"
    text = folder / "charts.md"
    text.write_text("\n\n".join(_charts(step, burst, cvs)) + "\n")
    notes = [world, f"figures and Mermaid charts in {folder}"]
    return BenchResult(rows=rows, figures=figures, notes=notes)


def _charts(step: Course, burst: Course, cvs: dict[str, Floats]) -> list[str]:
    coarse = np.arange(4, len(step.at_s), 5)
    early = np.arange(24, 60, 1)
    charts = [
        chart("Step: replicas of the key stage (wanted, ready)", "second", step.at_s[coarse], "replicas",
              [step.desired[coarse], step.ready[coarse]]),
        chart("Burst: replicas of the key stage (wanted, ready)", "second", burst.at_s[early], "replicas",
              [burst.desired[early], burst.ready[early]]),
        chart("Burst: items waiting at the key stage", "second", burst.at_s[early], "items",
              [burst.queue[early]]),
    ]  # fmt: skip
    stages = np.arange(1, cvs["qna"].shape[1] + 1)
    for i, cv in enumerate(TEST_CVS):
        lines = [cvs[name][i] for name in ("simulated", "qna", "attention")]
        charts.append(
            chart(f"CV by stage, entry CV {cv:g} (simulated, qna, attention)", "stage", stages, "CV", lines)
        )
    return charts


def chart(title: str, x_label: str, x: Floats, y_label: str, lines: Sequence[Floats]) -> str:
    """A Mermaid line chart as text."""
    body = [f'    title "{title}"', f'    x-axis "{x_label}" [{", ".join(f"{v:g}" for v in x)}]']
    body.append(f'    y-axis "{y_label}"')
    body += [f"    line [{', '.join(f'{v:.3g}' for v in line)}]" for line in lines]
    return "\n".join(["```mermaid", "xychart-beta", *body, "```"])


def _draw_course(path: Path, title: str, course: Course) -> None:
    figure, panels = _canvas(3, 8.0, 6.5)
    panels[0].step(course.at_s, course.desired, where="post", label="wanted", color="#D55E00")
    panels[0].step(course.at_s, course.ready, where="post", label="ready", color="#0072B2")
    panels[0].legend(fontsize=8)
    panels[0].set(ylabel="replicas", title=f"{title}: key stage")
    panels[1].plot(course.at_s, course.queue, color="#0072B2")
    panels[1].set(ylabel="waiting items")
    panels[2].plot(course.at_s, course.latency_s, color="#0072B2")
    panels[2].axhline(DEADLINE_S, color="0.5", linestyle=":")
    panels[2].set(ylabel="latency (s)", xlabel="second", yscale="log")
    figure.savefig(path, dpi=130)


def _draw_cvs(path: Path, cvs: dict[str, Floats]) -> None:
    figure, (axes,) = _canvas(1, 8.0, 5.0)
    stages = np.arange(1, cvs["qna"].shape[1] + 1)
    styles = {"simulated": ("o", "-"), "qna": ("", "--"), "attention": ("", ":")}
    for name, (mark, style) in styles.items():
        for i, cv in enumerate(TEST_CVS):
            label = name if i == 0 else None
            axes.plot(stages, cvs[name][i], marker=mark, linestyle=style, color=f"C{i}", label=label)
            if name == "simulated":
                axes.annotate(f"{cv:g}", (1, cvs[name][i][0]), fontsize=8)
    axes.set(xlabel="stage", ylabel="CV of arrivals", yscale="log", title="CV along held-out chains (mean)")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=130)


def _canvas(rows: int, width_in: float, height_in: float) -> tuple[Any, list[Any]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    figure = Canvas(figsize=(width_in, height_in), layout="constrained")
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(rows, 1, squeeze=False).flat)
    for axes in panels:
        axes.grid(visible=True, color="0.9", linewidth=0.7)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, panels
