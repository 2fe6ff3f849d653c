"""The cells of Symphony's synthetic workloads (Table 1, Figure 7): all, and a stratified sample. Pure.

Before: nothing. After: `batching_sweep`, which measures deferred against eager in each. Table 1 spans model,
number of models, GPUs a model, SLO and burstiness; we take it for the profiles of both GPUs, and beside cells
of one model (all copies alike) the mixed ones: all models of a GPU's table, each with its own SLO there.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence
from typing import TypeVar

from keystage.bench.batching_models import GPUS, Model, capacity_rps, named

NAMES = ("DenseNet121", "InceptionV3", "ResNet50V2", "VGG16", "Xception", "BERT")
MIXED = "mixed"
MODELS = (8, 16, 24, 32, 48, 64)
RATIOS = (1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0)
SLOS_MS = (20, 25, 30, 40, 50)
SHAPES = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0)

SLOS_A_RUN = 20
"""A run is at least so many SLOs long."""

MOST_REQUESTS = 100_000
"""In so many SLOs, of a cell of the sample."""

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """One synthetic workload.

    Attributes:
        gpu: whose profiles.
        name: the model of which all are copies, or `MIXED`.
        count: models.
        ratio: GPUs a model.
        slo_ms: of all models; 0 when each has its own.
        shape: of the gamma law of gaps: 1 is Poisson, 0.1 the burstiest.
    """

    gpu: str
    name: str
    count: int
    ratio: float
    slo_ms: int
    shape: float

    @property
    def models(self) -> tuple[Model, ...]:
        """What is served."""
        if self.name == MIXED:
            return GPUS[self.gpu]
        model = dataclasses.replace(named(self.gpu, self.name), slo_s=self.slo_ms / 1000)
        return (model,) * self.count

    @property
    def replicas(self) -> int:
        """GPUs."""
        return round(self.count * self.ratio)

    @property
    def is_feasible(self) -> bool:
        """Whether every model can serve a request that does not wait: l(1) <= SLO."""
        return all(model.profile.latency_s(1) <= model.slo_s for model in self.models)

    @property
    def most_rps(self) -> float:
        """What no scheduler can pass."""
        models = self.models
        return capacity_rps(models, [1 / len(models)] * len(models), self.replicas)

    def __str__(self) -> str:
        slo = f"{self.slo_ms} ms" if self.slo_ms else "own SLOs"
        return f"{self.gpu} {self.name} x {self.count}, {self.replicas} GPUs, {slo}, gamma {self.shape:g}"


def every() -> list[Cell]:
    """All feasible cells."""
    cells = [
        Cell(gpu, name, count, ratio, slo_ms, shape)
        for gpu, name, count, ratio, slo_ms, shape in itertools.product(
            GPUS, NAMES, MODELS, RATIOS, SLOS_MS, SHAPES
        )
    ]
    cells += [
        Cell(gpu, MIXED, len(GPUS[gpu]), ratio, 0, shape)
        for gpu, ratio, shape in itertools.product(GPUS, RATIOS, SHAPES)
    ]
    return [cell for cell in cells if cell.is_feasible]


def sample(count: int, seed: int) -> list[Cell]:
    """Feasible cells that cover every dimension evenly.

    Strata are GPU and model (or mixed), as evenly filled as the count allows. Over the sample each of the
    other dimensions takes each of its values equally often, as far as that divides, in a drawn order. A cell
    of copies that would need runs of more than `MOST_REQUESTS` has fewer models, at the same GPUs a model.

    Args:
        count: cells wanted; a cell that is not feasible is left out, so there may be fewer.
        seed: of the draw.
    """
    draw = random.Random(seed)
    strata = _dealt([(gpu, name) for gpu in GPUS for name in (*NAMES, MIXED)], count, draw)
    dimensions = zip(
        strata,
        _dealt(MODELS, count, draw),
        _dealt(RATIOS, count, draw),
        _dealt(SLOS_MS, count, draw),
        _dealt(SHAPES, count, draw),
        strict=True,
    )
    cells = []
    for (gpu, name), models, ratio, slo_ms, shape in dimensions:
        if name == MIXED:
            cells.append(Cell(gpu, MIXED, len(GPUS[gpu]), ratio, 0, shape))
        else:
            cells.append(_affordable(Cell(gpu, name, models, ratio, slo_ms, shape)))
    return [cell for cell in dict.fromkeys(cells) if cell.is_feasible]


def _affordable(cell: Cell) -> Cell:
    """The cell, or the same with as many models as its runs allow."""
    for count in reversed(MODELS):
        fewer = dataclasses.replace(cell, count=min(count, cell.count))
        if SLOS_A_RUN * fewer.most_rps * fewer.slo_ms / 1000 <= MOST_REQUESTS:
            return fewer
    return dataclasses.replace(cell, count=min(MODELS))


def _dealt(values: Sequence[T], count: int, draw: random.Random) -> list[T]:
    """So many values, each equally often as far as that divides, shuffled."""
    whole, rest = divmod(count, len(values))
    dealt = [*values] * whole + draw.sample([*values], rest)
    draw.shuffle(dealt)
    return dealt
