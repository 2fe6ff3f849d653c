"""Table 1's models in four stages, as the real platform emulates them and the simulator simulates them.

Before it: `paper_models`. After it: the benchmarks of the whole (`e2e`, `mixed`, `soak`). QUART cuts into
eight stages; here two of its stages each are one, so that a pipeline with room to grow fits on a machine of
two cores, where every replica is a process. l(b) = alpha b + beta of a stage is the paper's stand-alone
execution time shared out by the stages' work, the CPU part included; nothing shrinks with cores, because an
emulated device only sleeps. A replica of a stage holds one GPU, and so does an instance of the whole model
where that fits on one (48 GB), as in `paper_world`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from keystage.bench.paper_models import CORES as PAPER_CORES
from keystage.bench.paper_models import MODELS, Model, stage_parts
from keystage.bench.paper_world import gpus_of_whole
from keystage.simulator.api import StageSpec

STAGES = 4


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """One function of a pipeline: a stage, or the whole model.

    Attributes:
        alpha_s: seconds per item.
        beta_s: seconds per batch.
        most: largest batch.
        gpus: GPUs a replica holds.
    """

    alpha_s: float
    beta_s: float
    most: int
    gpus: int = 1

    @property
    def device(self) -> str:
        """What emulates it (`KEYSTAGE_DEVICE`)."""
        return f"emulated:alpha={self.alpha_s:.6f},beta={self.beta_s:.6f}"

    @property
    def item_s(self) -> float:
        """Seconds of a batch of one."""
        return self.alpha_s + self.beta_s


def parts(model: Model, *, whole: bool = False) -> tuple[Part, ...]:
    """The functions of a model.

    Args:
        model: of Table 1.
        whole: one function that computes all of it, as INFless sees models.
    """
    work = tuple(a + b for a, b in zip(model.layers[::2], model.layers[1::2], strict=True))
    stages = [
        Part(alpha_s + core_s / PAPER_CORES, beta_s, model.most)
        for alpha_s, beta_s, core_s in stage_parts(model, work)
    ]
    if not whole:
        return tuple(stages)
    alpha_s, beta_s = sum(p.alpha_s for p in stages), sum(p.beta_s for p in stages)
    return (Part(alpha_s, beta_s, model.most, gpus_of_whole(model)),)


def stage_specs(
    served: Sequence[Part], replicas: Sequence[int], *, most_replicas: int, occupied_s: float = 0.0
) -> tuple[StageSpec, ...]:
    """The same for the simulator.

    Args:
        served: functions.
        replicas: ready at the start, by function.
        most_replicas: bound of each.
        occupied_s: seconds a batch keeps its replica beside its service (hand-off).
    """
    return tuple(
        StageSpec(
            alpha_s=part.alpha_s,
            beta_s=part.beta_s + occupied_s,
            most=part.most,
            gpus=0,
            max_replicas=most_replicas,
            replicas=count,
        )
        for part, count in zip(served, replicas, strict=True)
    )


def one_each_rps(model: Model) -> float:
    """Requests a second of one replica of each stage without batches, were the stages equal."""
    return STAGES / model.exec_s


def described(indices: Sequence[int]) -> str:
    """The models of these rows of Table 1 with their stages' service times, in words."""
    texts = []
    for index in indices:
        times = ", ".join(f"{1e3 * p.item_s:.1f}" for p in parts(MODELS[index]))
        texts.append(
            f"{MODELS[index].name} {1e3 * MODELS[index].exec_s:.0f} ms in stages of {times} ms, "
            f"batches of at most {MODELS[index].most}"
        )
    return "; ".join(texts)
