"""How the variation of arrivals travels through a chain of stages (predictor `qna`).

Before it: rates, services and replicas of every stage, and the variation at the entry. After it: the
smoother and the corrector use the variation of stages that were not, or not yet, measured. Pure
arithmetic; it must not know replicas as functions, nor read weights.

Symbols: ca2, cd2, cs2 squared coefficients of variation of the gaps between arrivals, between
departures, and of service times; rho utilisation at full batches; c servers; b largest batch; n mean
batch. Rates do not matter: all is dimensionless.

Whitt (1983), The Queueing Network Analyzer, eq. 24, with mixing in front (sections IV.C-D):

    cd2 = 1 + (1 - rho^2) (ca2 - 1) + rho^2 / sqrt(c) (cs2 - 1)                            (1)

which is w ca2 + (1 - w)(1 - 1/sqrt(c)) + rho^2 cs2 / sqrt(c) with w = 1 - rho^2. `whitt` is (1).
Against simulation (1) misses what burst traffic through many servers and batches does; `propagate` keeps
the form and changes five things, each with its reason:

    n   = min(b, max(n0, 1 + min(y, y^(1/3))))     n0: batch of a steady flow, n0 = lambda l(n0) / c
          y = ca2 rho^2 / c
    g2  = max(0, (ca2 + 1) / n - 1)                scv of the gaps between batches
    d2  = w g2 + (1 - w)(1 - 1/c^2) min(1, ca2) + rho^2 cs2 / sqrt(c)
    w   = (1 - rho^e) / (1 - min(rho, R)^e),       e = 2 - (2/3) ca2 / (ca2 + 3)
    d2' = d2 + (1 - d2) m,  m = s / (s + 1 + ca2), s = rho c sqrt(cs2 (1 - 1/c))
    cd2 = (d2' + 1) n - 1                                                                  (2)
    R  <- max(R, rho) (1 - f)(1 - m) (1 - g)^4,    f = n rho^2 cs2 / (sqrt(c) cd2),
                                                   g = max(0, 1 - max(ca2, d2') / cd2)

1. Batches: n items leave at one instant, with gaps of zero between them; steady batches give n - 1.
2. e falls from 2 (calm: Whitt) to 4/3 (bursts): a burst of X items (ca2 = 2 X - 1) leaves as one busy
   period of X / (1 - rho) items, so cd2 ~ (1 - rho) ca2; Marshall's formula with the M^X/G/1 wait.
3. R, the highest utilisation this flow has passed: constant services in a row make it wait at the slowest
   stage only (Friedman 1965), so equal stages behind pass it on as it is, where (1) smooths at every one.
   What services (f, m) and batches (g) made anew has not passed anything yet.
4. m: side by side in c servers items are moved apart by s mean gaps, the spread of service times. Moved by
   more than a burst is long (1 + ca2 = 2 X items), or by more than a gap, they come as if at random, scv 1.
5. Regular arrivals (ca2 < 1) do not meet in c constant servers, and 1/c^2 in place of 1/sqrt(c): those that
   start together finish together.

The form is derived; the powers 1/3, 4 and 4/3, the 3 in e and 1/c^2 are rounded from a fit to 280 random
chains of eight stages, and tested on others (`keystage train-cv` prints the table).
Valid for open chains in steady state. A decode ring is closed: do not apply it on loop edges.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

LEAST_SCV = 1e-3
"""No smaller result: below CV 0.03 nothing that is sized by it changes."""
_MOST_R = 0.999
_H = 3.0
_E = 2 / 3


@dataclasses.dataclass(frozen=True, slots=True)
class Station:
    """One stage as the formulas see it.

    Attributes:
        utilisation: rho >= 0, arrival rate over the capacity of all servers at full batches; more than 1
            is taken as 1 (a saturated stage departs at its own rhythm).
        servers: c >= 1.
        service_scv: cs2 >= 0 of a batch's service time.
        most: largest batch b >= 1.
        fixed_ratio: beta / (alpha + beta) of l(n) = alpha n + beta: the part of a lone item's service
            that a batch pays once; 0..1.
    """

    utilisation: float
    servers: float
    service_scv: float = 0.0
    most: float = 1.0
    fixed_ratio: float = 0.0


def mean_batch(station: Station) -> float:
    """Batch n0 at a steady flow: the fixed point of n = lambda l(n) / c, within 1..b."""
    b, s = station.most, station.fixed_ratio
    if b <= 1:
        return 1.0
    rho, c = min(1.0, station.utilisation), station.servers
    alone = rho * c * b / ((1 - s) * b + s)  # lambda (alpha + beta)
    spare = c - (1 - s) * alone
    return b if spare <= 0 else min(b, max(1.0, s * alone / spare))


def whitt(arrival_scv: float, station: Station) -> float:
    """Departure scv by (1), for comparison."""
    rho = min(1.0, station.utilisation)
    root = math.sqrt(station.servers)
    return max(LEAST_SCV, 1 + (1 - rho**2) * (arrival_scv - 1) + rho**2 / root * (station.service_scv - 1))


def depart(arrival_scv: float, station: Station, passed: float) -> tuple[float, float]:
    """One stage by (2): departure scv, and R behind it.

    Args:
        arrival_scv: ca2 >= 0.
        station: the stage.
        passed: R in front of it, 0..0.999; 0 at the entry.
    """
    rho, c = min(1.0, station.utilisation), station.servers
    n = mean_batch(station)
    if station.most > 1:
        y = arrival_scv * rho**2 / c
        n = min(station.most, max(n, 1 + min(y, y ** (1 / 3))))
    e = 2 - _E * arrival_scv / (arrival_scv + _H)
    w = (1 - rho**e) / (1 - min(rho, passed) ** e)
    noise = rho**2 * station.service_scv / math.sqrt(c)
    apart = rho * c * math.sqrt(station.service_scv * (1 - 1 / c))
    m = apart / (apart + 1 + arrival_scv)
    between = w * max(0.0, (arrival_scv + 1) / n - 1) + noise
    between += (1 - w) * (1 - 1 / c**2) * min(1.0, arrival_scv)
    between += (1 - between) * m
    scv = max(LEAST_SCV, (between + 1) * n - 1)
    kept = (1 - min(1.0, n * noise / scv)) * (1 - m) * min(1.0, max(arrival_scv, between) / scv) ** 4
    return scv, min(_MOST_R, max(passed, rho) * kept)


def propagate(entry_scv: float, stations: Sequence[Station]) -> list[float]:
    """Arrival scv of every stage of one chain by (2); the first is the entry's own."""
    scv, passed = max(LEAST_SCV, entry_scv), 0.0
    found: list[float] = []
    for station in stations:
        found.append(scv)
        scv, passed = depart(scv, station, passed)
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class Chains:
    """Many chains at once, each field a float array [p, k]: `Station` field by field."""

    utilisation: Floats
    servers: Floats
    service_scv: Floats
    most: Floats
    fixed_ratio: Floats


def chains(pipelines: Sequence[Sequence[Station]]) -> Chains:
    """Stacks chains of equal length, [p, k]."""
    columns = (
        np.array([[getattr(s, f.name) for s in stations] for stations in pipelines], dtype=np.float64)
        for f in dataclasses.fields(Station)
    )
    return Chains(*columns)


@dataclasses.dataclass(frozen=True, slots=True)
class Flow:
    """What propagation knows of every stage, arrays [p, k].

    Attributes:
        scv: arrival scv.
        passed: R in front of the stage.
        batch: mean batch n of the stage.
    """

    scv: Floats
    passed: Floats
    batch: Floats


def flow(entry_scv: Floats, many: Chains) -> Flow:
    """`propagate` for many chains.

    Args:
        entry_scv: [p].
        many: chains of k stages.
    """
    rho = np.minimum(1.0, many.utilisation)
    c, b, s = many.servers, many.most, many.fixed_ratio
    alone = rho * c * b / ((1 - s) * b + s)
    spare = c - (1 - s) * alone
    with np.errstate(divide="ignore", invalid="ignore"):
        steady = np.where(spare <= 0, b, np.clip(s * alone / spare, 1.0, b))
    scv = np.maximum(LEAST_SCV, entry_scv)
    passed = np.zeros_like(scv)
    found, behind, sizes = [], [], []
    for k in range(rho.shape[1]):
        r = rho[:, k]
        y = scv * r**2 / c[:, k]
        n = np.minimum(b[:, k], np.maximum(steady[:, k], 1 + np.minimum(y, y ** (1 / 3))))
        found.append(scv)
        behind.append(passed)
        sizes.append(n)
        e = 2 - _E * scv / (scv + _H)
        w = (1 - r**e) / (1 - np.minimum(r, passed) ** e)
        noise = r**2 * many.service_scv[:, k] / np.sqrt(c[:, k])
        apart = r * c[:, k] * np.sqrt(many.service_scv[:, k] * (1 - 1 / c[:, k]))
        m = apart / (apart + 1 + scv)
        between = w * np.maximum(0.0, (scv + 1) / n - 1) + noise
        between = between + (1 - w) * (1 - 1 / c[:, k] ** 2) * np.minimum(1.0, scv)
        between = between + (1 - between) * m
        out = np.maximum(LEAST_SCV, (between + 1) * n - 1)
        kept = (1 - np.minimum(1.0, n * noise / out)) * (1 - m)
        kept = kept * np.minimum(1.0, np.maximum(scv, between) / out) ** 4
        scv, passed = out, np.minimum(_MOST_R, np.maximum(passed, r) * kept)
    return Flow(np.stack(found, 1), np.stack(behind, 1), np.stack(sizes, 1))


def split_scv(scv: float, part_ratio: float) -> float:
    """Scv of a random part of a flow (Whitt 1983, eq. 27): p scv + 1 - p."""
    return part_ratio * scv + 1 - part_ratio


def merge_scv(rates_rps: Sequence[float], scvs: Sequence[float], utilisation: float) -> float:
    """Scv of independent flows put together in front of a stage (Whitt 1983, eq. 29-30).

    Args:
        rates_rps: rates of the flows, not all 0.
        scvs: their scv.
        utilisation: rho of the stage they meet at.

    Raises:
        ValueError: no flow has a rate.
    """
    total = sum(rates_rps)
    if not total > 0:
        raise ValueError(f"flows to be merged need a rate above 0 items/s, got {list(rates_rps)}")
    parts = [rate / total for rate in rates_rps]
    flows = 1 / sum(p * p for p in parts)
    weight = 1 / (1 + 4 * (1 - min(1.0, utilisation)) ** 2 * (flows - 1))
    return weight * sum(p * scv for p, scv in zip(parts, scvs, strict=True)) + 1 - weight
