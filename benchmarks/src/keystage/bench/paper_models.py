"""The five models of QUART's Table 1, and what has to be assumed about them to simulate them.

Before it: nothing. After it: `paper_world` makes stages of them. Sizes, operators, tokens and
execution times are the paper's; the rest is derived or assumed here, each with its reason:

- l(b) = alpha b + beta. Per batch, whatever its size, a device reads the parameters once and starts
  every operator once: beta = size / 696 GB/s (memory bandwidth of the A40 named in the paper's case
  studies) + operators x 10 us (a usual kernel launch). alpha is the rest of the execution time, so
  l(1) is Table 1's. A model that is limited by computation gains little from batches; one limited by
  memory (OPT-66B on 128 tokens) gains much.
- Largest batch: the largest b <= 4 with l(b) <= 1.5 l(1), since a longer one alone would miss the
  objective of Figure 6b. The paper counts throughput as 1 / latency, that is without batches, which this
  gives for three of the five.
- An even division by parameters (DeepSpeed) leaves times uneven, because layers cannot be cut and
  embeddings cost no time: the factors below, of mean 1. This is what makes key stages.
- A tenth of an item's time at two cores is CPU work (communication, serialisation) that shrinks with
  cores. The paper's Figure 3b (-33 % from 2 to 4 cores) would mean two thirds, but it contains HTTP
  serialisation of tensors, which Table 1's stand-alone execution does not.
"""

from __future__ import annotations

import dataclasses
import math

MEMORY_BPS = 696e9
LAUNCH_S = 10e-6
CPU_RATIO = 0.1
CORES = 2.0
MOST_CORES = 8.0
SERVICE_SCV = 0.05
"""Squared CV of a batch's time around l(b): kernels are nearly deterministic, lengths vary a little."""
MOST_BATCH = 4
BATCH_STRETCH = 1.5


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
    """One row of Table 1, and the shape of its stages.

    Attributes:
        name: as the paper has it.
        size_bytes: size of all parameters.
        operators: operators of a forward pass.
        tokens: tokens of a response, 1 where the paper has none (x).
        exec_s: stand-alone execution of one request.
        layers: work per stage of eight, in layers or relative; only the proportions count.
        activation_bytes: output of a stage for one request.
        why: reasons for `layers` and `activation_bytes`.
    """

    name: str
    size_bytes: int
    operators: int
    tokens: int
    exec_s: float
    layers: tuple[float, ...]
    activation_bytes: int
    why: str

    @property
    def factors(self) -> tuple[float, ...]:
        """Time of each stage over the mean."""
        mean = sum(self.layers) / len(self.layers)
        return tuple(layer / mean for layer in self.layers)

    @property
    def beta_s(self) -> float:
        """Seconds per batch of the whole model."""
        return self.size_bytes / MEMORY_BPS + self.operators * LAUNCH_S

    @property
    def alpha_s(self) -> float:
        """Seconds per item of the whole model, CPU work at `CORES` cores included."""
        return self.exec_s - self.beta_s

    @property
    def most(self) -> int:
        """Largest batch."""
        allowed = math.floor((BATCH_STRETCH * self.exec_s - self.beta_s) / self.alpha_s + 1e-9)
        return max(1, min(MOST_BATCH, allowed))

    def service_s(self, items: int) -> float:
        """l(b) of the whole model."""
        return self.alpha_s * items + self.beta_s


MODELS = (
    Model(
        "Whisper-9B", 2_900_000_000, 677, 1, 0.074,
        (1.15, 1.15, 1.15, 1.05, 0.9, 0.9, 0.9, 0.8), 3_840_000,
        "the first stages hold the audio encoder (1,500 frames), the last ones the text decoder (few "
        "tokens); bounded to 20 % because the paper calls its division even; 1,500 x 1,280 values of 2 bytes",
    ),
    Model(
        "BERT-21B", 43_000_000_000, 1195, 128, 0.137,
        (5, 6, 6, 6, 6, 6, 6, 6.5), 1_573_000,
        "43 GB of 2-byte parameters at width 6,144 are 47 layers: embedding and 5 layers first, 6 layers "
        "each, the prediction head (half a layer) last; 128 x 6,144 values of 2 bytes",
    ),
    Model(
        "LLAMA-7B", 14_000_000_000, 225, 1024, 0.243,
        (4, 4, 4, 4, 4, 4, 4, 4.65), 8_389_000,
        "32 layers of width 4,096, four a stage; the output head (0.13 of 0.2 billion parameters of a "
        "layer) comes on top of the last; 1,024 x 4,096 values of 2 bytes",
    ),
    Model(
        "OPT-66B", 132_000_000_000, 581, 128, 0.278,
        (8, 8, 8, 8, 8, 8, 8, 8.45), 2_359_000,
        "64 layers of width 9,216, eight a stage; the output head (0.46 of 1.02 billion parameters of a "
        "layer) comes on top of the last; 128 x 9,216 values of 2 bytes",
    ),
    Model(
        "WideResnet", 16_000_000_000, 295, 1, 0.646,
        (1.2, 1.15, 1.1, 1.0, 0.95, 0.9, 0.85, 0.85), 3_000_000,
        "convolutions on large maps cost more time a parameter, so stages of equal size get quicker "
        "towards the end; bounded to 20 %; a few thousand channels of small maps",
    ),
)  # fmt: skip
"""Table 1 of QUART."""

BERT = MODELS[1]
CASE_STUDY_LAYERS = (9.0, 10.0, 10.0, 9.0, 9.5)
"""BERT-21B in the five stages of the paper's case studies: 47 layers, embedding first, head last."""


def stage_parts(model: Model, layers: tuple[float, ...] | None = None) -> list[tuple[float, float, float]]:
    """(alpha_s without CPU work, beta_s, cpu_core_s) of each stage."""
    work = layers or model.layers
    total = sum(work)
    parts = []
    for layer in work:
        share = layer / total
        cpu_s = CPU_RATIO * model.exec_s * share
        parts.append((model.alpha_s * share - cpu_s, model.beta_s * share, cpu_s * CORES))
    return parts
