"""Goodput against network delay: Symphony's Figure 14, with our own hand-off as one point.

Before it: `flat_top`. Twenty models alike (the ResNet50 of Table 2), 32 emulated GPUs, Poisson; the
scheduler reckons with a delay from its word to the start of the work and batches start then. Our hand-off's
tail is what `keystage bench hop` measured on this machine: read from its document when there is one, measured
now otherwise.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keystage.batching.api import Delays
from keystage.bench import batching_arrivals as laws
from keystage.bench.batching_cluster import RunLength, goodput
from keystage.bench.batching_models import TABLE_2, Model, capacity_rps
from keystage.bench.symphony_systems import OURS, system

COUNT, REPLICAS = 20, 32
BENDS = {
    0.0: "",
    24e-6: "RDMA median",
    33e-6: "RDMA 99.99 %",
    100e-6: "",
    1e-3: "",
    3.034e-3: "TCP median",
    6e-3: "",
    10e-3: "",
    15e-3: "",
    36.4e-3: "TCP 99.99 %",
}
"""Delays in seconds, and where the paper has measured them (section 5.6)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Tail:
    """Our hand-off.

    Attributes:
        seconds: its 99th percentile.
        source: where that comes from, in words.
    """

    seconds: float
    source: str


def hop_tail(out: Path, *, quick: bool) -> Tail:
    """The 99th percentile of handing 16 KiB to the next worker, send to acknowledgement."""
    path = out / "bench-hop.json"
    if path.exists():
        document = json.loads(path.read_bytes())
        rows, source = document["rows"], f"{path} (bench hop)"
    else:
        from keystage.bench import hop

        rows, source = hop.run(quick=True).rows, "bench hop --quick, in this run"
    found = next(row for row in rows if row["activation"] == "16kib" and row["way"] == "keystage")
    seconds = float(found["p99_us"]) / 1e6
    return Tail(
        seconds,
        f"{1e3 * seconds:.3g} ms, p99 of {found['hops']} hand-offs of 16 KiB on a machine in use, {source}",
    )


def bends(slos_s: Sequence[float], tail: Tail, *, quick: bool) -> list[dict[str, Any]]:
    """Goodput by objective and delay, and over that without delay."""
    delays_s = (0.0, 3.034e-3) if quick else tuple(BENDS)
    rows: list[dict[str, Any]] = []
    for slo_s in slos_s:
        none = 0.0
        for delay_s in sorted({*delays_s, tail.seconds}):
            found = _goodput_rps(slo_s, delay_s)
            none = none or found
            rows.append(
                {
                    "slo_ms": 1e3 * slo_s,
                    "delay_ms": 1e3 * delay_s,
                    "goodput_rps": found,
                    "of_none": found / none if none else 0.0,
                    "is_ours": delay_s == tail.seconds,
                    "paper": BENDS.get(delay_s, "our hand-off"),
                }
            )
    return rows


def _goodput_rps(slo_s: float, delay_s: float) -> float:
    base = TABLE_2[0].model
    models = [Model(f"{base.name}-{i}", base.profile, slo_s) for i in range(COUNT)]
    shares = [1 / COUNT] * COUNT
    within = [dataclasses.replace(model, slo_s=max(1e-9, slo_s - delay_s)) for model in models]
    most = capacity_rps(within, shares, REPLICAS)
    if most <= 0:
        return 0.0
    found = goodput(
        system(OURS, models, shares, Delays(control_s=delay_s)),
        models,
        lambda rate, seconds, seed: laws.arrivals([rate / COUNT] * COUNT, seconds, seed),
        REPLICAS,
        most_rps=most,
        pooled=True,
        length=RunLength(requests=10_000, each=500, slos=5.0, warm_slos=3.0),
        tolerance_ratio=0.01,
    )
    return found.rate_rps
