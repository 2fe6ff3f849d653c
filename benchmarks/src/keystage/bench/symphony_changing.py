"""Symphony 5.7: a changing load on 512 GPUs, with the autoscaling advice, as in Figure 15.

Before it: `symphony`. After it: rows by part of the run, and the picture with the paper's four panels. 24
models of Table 3, evenly spread over its batching effects; rates as `symphony_rates` says. Once all 512 GPUs
serve and the advice is only written down, as in the paper; once the cluster follows it.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from keystage.batching.advice import AdviceSettings
from keystage.bench.batching_cluster import serve
from keystage.bench.batching_models import GTX1080TI, Model, capacity_rps
from keystage.bench.symphony_autoscaled import Autoscaled, Second
from keystage.bench.symphony_rates import SURGE, drawn_arrivals, rates, weights
from keystage.bench.symphony_systems import OURS, system

COUNT = 24
ADVICE = AdviceSettings(add_s=1.0, release_s=5.0, spare_ratio=0.05)
"""The run is a day in minutes, so the intervals are seconds."""
START_S = 2.0
"""From a replica asked for to its first batch, emulated: a start with its parameters on the disk."""


@dataclasses.dataclass(frozen=True, slots=True)
class Changing:
    """One run.

    Attributes:
        replicas: GPUs there are.
        seconds: length.
        follows: whether the advice is carried out.
        seed: of rates and arrivals.
    """

    replicas: int
    seconds: int
    follows: bool
    seed: int


def models() -> list[Model]:
    """24 of Table 3, from the strongest batching effect to the weakest."""
    picked = np.linspace(0, len(GTX1080TI) - 1, COUNT).round().astype(int)
    return [GTX1080TI[i] for i in picked]


def capacity(replicas: int, seed: int) -> float:
    """What the cluster can do for the mean mix at the batch sizes of the staggered pattern, requests/s."""
    return 0.85 * capacity_rps(models(), weights(COUNT, seed).tolist(), replicas)


def course(asked: Changing) -> list[Second]:
    """Runs it and answers what was seen in each second."""
    served = models()
    shares = weights(COUNT, asked.seed)
    rates_rps = rates(COUNT, asked.seconds, capacity(asked.replicas, asked.seed), shares, asked.seed)
    drawn = drawn_arrivals(rates_rps, asked.seed)
    kept: list[Autoscaled] = []

    def make() -> Autoscaled:
        inner = system(OURS, served, shares.tolist())(float(rates_rps.sum(axis=1).mean()))
        profiles = [model.profile for model in served]
        kept.append(
            Autoscaled(inner, profiles, ADVICE, asked.replicas, follows=asked.follows, start_s=START_S)
        )
        return kept[-1]

    serve(make, served, drawn, asked.replicas, seconds=float(asked.seconds), warm_s=0.0)
    return kept[0].seconds[: asked.seconds]


def rows(asked: Changing, seconds: list[Second]) -> list[dict[str, Any]]:
    """Summaries: before, in and after the surge."""
    begin, end = int(SURGE[0] * asked.seconds), int(SURGE[1] * asked.seconds)
    parts = {"before the surge": (2, begin), "surge": (begin, end), "after": (end, asked.seconds)}
    made = []
    for name, (low, high) in parts.items():
        part = seconds[low:high]
        arrived, bad = sum(s.arrived for s in part), sum(s.bad for s in part)
        made.append(
            {
                "advice": "followed" if asked.follows else "written down",
                "seed": asked.seed,
                "part": name,
                "offered_rps": arrived / len(part),
                "load": arrived / len(part) / capacity(asked.replicas, asked.seed),
                "bad_ratio": bad / max(1, arrived),
                "gpus": float(np.mean([s.replicas for s in part])),
                "gpus_used": float(np.mean([s.used for s in part])),
                "gpus_busy": float(np.mean([s.busy_s for s in part])),
                "advised_more": sum(max(0, s.advice) for s in part),
                "advised_fewer": sum(max(0, -s.advice) for s in part),
            }
        )
    return made


def draw(runs: list[tuple[Changing, list[Second]]], path: Path) -> None:
    """Figure 15's panels for each run: requests, GPUs, advice, bad rate."""
    from keystage.bench.flat_top_plot import canvas

    figure, panels = canvas(4, len(runs), 5.5 * len(runs), 8.0)
    for column, (asked, seconds) in enumerate(runs):
        at_s = np.arange(len(seconds))
        load, gpus, advice, bad = panels[column :: len(runs)]
        good = np.array([s.good for s in seconds])
        load.stackplot(
            at_s, good, [s.bad for s in seconds], colors=("#0b6e4f", "#bbbbbb"), labels=("good", "bad")
        )
        load.set(ylabel="requests/s", title="advice followed" if asked.follows else "advice written down")
        load.legend(frameon=False, loc="upper left")
        gpus.plot(at_s, [s.replicas for s in seconds], color="0.6", label="there are")
        gpus.plot(at_s, [s.used for s in seconds], color="#c44900", label="had a batch")
        gpus.plot(at_s, [s.busy_s for s in seconds], color="#0b6e4f", label="busy")
        gpus.set(ylabel="GPUs")
        gpus.legend(frameon=False)
        advice.bar(at_s, [s.advice for s in seconds], color="#1f77b4", width=1.0)
        advice.set(ylabel="GPUs advised")
        bad.plot(at_s, [s.bad / max(1, s.arrived) for s in seconds], color="k", linewidth=1)
        bad.set(ylabel="bad rate", xlabel="seconds")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
