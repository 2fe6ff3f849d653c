"""Model profiles of Symphony (Chen et al., SOSP 2023), as data: Tables 2, 3 and 4, and its analytic bounds.

What the batching benchmarks emulate. The tables give l(b) = alpha b + beta in milliseconds, fitted by the
paper's authors to TensorFlow on the GPU named, with the latency objective that they set for each model; a
model of Table 2 stands with the goodput that they measured on eight GPUs. Nothing here was measured by us.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from keystage.batching.profile import LatencyProfile


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
    """A model to be served.

    Attributes:
        name: as the paper prints it.
        profile: service time of a batch.
        slo_s: from arrival to the end of its batch.
    """

    name: str
    profile: LatencyProfile
    slo_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """One row of Table 2, with what Figure 1 adds (median batch sizes, section 2.2).

    Attributes:
        model: the row's model.
        replicas: GPUs.
        uncoordinated_rps: its "No Coordination" throughput.
        staggered_rps: its "Staggered" throughput.
        goodput_rps: by system.
        median_batch: by system.
    """

    model: Model
    replicas: int
    uncoordinated_rps: float
    staggered_rps: float
    goodput_rps: dict[str, float]
    median_batch: dict[str, int]


def uncoordinated(model: Model, replicas: int) -> tuple[int, float]:
    """Batch size and requests/s of replicas that do not know of each other (Symphony, section 5.3).

    A request waits up to l(b) for the batch before its own: 2 l(b) <= SLO.

    Returns:
        (0, 0.0) when not even a batch of one fits.
    """
    return _bound(model, replicas, model.slo_s / 2)


def staggered(model: Model, replicas: int) -> tuple[int, float]:
    """Batch size and requests/s of the staggered pattern (Symphony, equations 1 and 2).

    Replicas start l(b)/N apart: (1 + 1/N) l(b) <= SLO. An upper bound where arrivals are evenly spaced and
    every request must be in time; a percent that may be late lets a scheduler pass it.
    """
    return _bound(model, replicas, model.slo_s / (1 + 1 / replicas))


def capacity_rps(models: Sequence[Model], shares: Sequence[float], replicas: int) -> float:
    """Requests/s that no scheduler can pass: every batch is the largest that fits its SLO, no replica idles.

    Args:
        models: served.
        shares: of the requests, one a model.
        replicas: how many.

    Returns:
        0 when a model that has requests cannot run even one within its SLO.
    """
    seconds = 0.0
    for model, share in zip(models, shares, strict=True):
        batch = model.profile.largest_batch(model.slo_s)
        if batch == 0 and share > 0:
            return 0.0
        seconds += share * model.profile.latency_s(batch) / max(batch, 1)
    return replicas / seconds


def _bound(model: Model, replicas: int, within_s: float) -> tuple[int, float]:
    batch = model.profile.largest_batch(within_s)
    return (batch, replicas * batch / model.profile.latency_s(batch)) if batch else (0, 0.0)


def _model(name: str, alpha_ms: float, beta_ms: float, slo_ms: float) -> Model:
    return Model(name, LatencyProfile(alpha_ms / 1000, beta_ms / 1000), slo_ms / 1000)


TABLE_2 = (
    Measured(
        _model("ResNet50", 1.053, 5.072, 25),
        8,
        4501,
        5839,
        {"symphony": 5264, "clockwork": 1358, "nexus": 4027, "shepherd": 4445},
        {"clockwork": 1, "nexus": 6, "shepherd": 9, "symphony": 14},
    ),
    Measured(
        _model("InceptionResNetV2", 5.090, 18.368, 70),
        8,
        713,
        1083,
        {"symphony": 926, "clockwork": 458, "nexus": 618, "shepherd": 778},
        {"clockwork": 1, "nexus": 2, "shepherd": 4, "symphony": 8},
    ),
)
"""Table 2: one model alone on eight GPUs, Poisson arrivals."""

_TABLE_3 = (
    ("NASNetMobile", 0.570, 14.348, 33),
    ("MobileNetV3Small", 0.335, 5.350, 20),
    ("DenseNet169", 1.271, 13.618, 37),
    ("DenseNet121", 1.061, 10.312, 29),
    ("DenseNet201", 1.733, 15.687, 45),
    ("EfficientNetV2B0", 1.006, 7.493, 23),
    ("MobileNetV3Large", 0.820, 5.256, 20),
    ("InceptionV3", 1.964, 8.771, 33),
    ("EfficientNetV2B1", 1.661, 7.247, 27),
    ("ResNet50V2", 1.409, 5.947, 23),
    ("ResNet152V2", 3.471, 13.049, 53),
    ("ResNet101V2", 2.438, 9.095, 37),
    ("InceptionResNetV2", 5.090, 18.368, 77),
    ("EfficientNetB0", 1.569, 5.586, 23),
    ("MobileNetV2", 1.180, 3.483, 20),
    ("ResNet101", 3.164, 9.065, 43),
    ("EfficientNetB1", 2.489, 6.674, 33),
    ("ResNet50", 2.050, 5.378, 27),
    ("EfficientNetV2B2", 2.254, 5.896, 29),
    ("VGG19", 3.059, 7.857, 40),
    ("ResNet152", 4.599, 11.212, 59),
    ("MobileNet", 1.009, 2.390, 20),
    ("VGG16", 2.734, 5.786, 33),
    ("EfficientNetB2", 3.446, 5.333, 38),
    ("EfficientNetV2B3", 4.072, 5.981, 44),
    ("NASNetLarge", 17.656, 18.952, 179),
    ("EfficientNetV2S", 8.463, 8.862, 85),
    ("EfficientNetB3", 5.924, 4.849, 57),
    ("EfficientNetV2L", 40.313, 28.208, 378),
    ("EfficientNetV2M", 22.619, 14.786, 210),
    ("EfficientNetB5", 23.435, 10.301, 208),
    ("Xception", 4.751, 2.046, 42),
    ("SSDMobilenet", 23.778, 9.729, 209),
    ("EfficientNetB4", 12.088, 4.412, 105),
    ("BERT", 7.008, 0.159, 56),
)

_TABLE_4 = (
    ("DenseNet121", 0.054, 10.546, 21),
    ("DenseNet201", 0.304, 14.345, 31),
    ("DenseNet169", 0.289, 13.365, 29),
    ("ResNet50V2", 0.135, 5.560, 20),
    ("EfficientNetB0", 0.115, 4.326, 20),
    ("ResNet101", 0.284, 8.266, 20),
    ("ResNet152", 0.390, 10.449, 24),
    ("ResNet101V2", 0.391, 8.219, 20),
    ("MobileNetV3Large", 0.196, 4.072, 20),
    ("EfficientNetB1", 0.291, 5.797, 20),
    ("ResNet50", 0.268, 5.172, 20),
    ("ResNet152V2", 0.589, 10.054, 24),
    ("MobileNetV2", 0.190, 2.892, 20),
    ("EfficientNetV2B3", 0.543, 7.596, 20),
    ("InceptionResNetV2", 1.112, 15.27, 39),
    ("EfficientNetV2B1", 0.443, 5.929, 20),
    ("NASNetMobile", 0.536, 6.860, 20),
    ("EfficientNetV2B0", 0.377, 4.272, 20),
    ("EfficientNetB2", 0.520, 5.333, 20),
    ("MobileNetV3Small", 0.315, 3.211, 20),
    ("InceptionV3", 0.913, 6.732, 20),
    ("MobileNet", 0.285, 1.901, 20),
    ("EfficientNetV2S", 1.454, 7.378, 26),
    ("EfficientNetV2B2", 0.901, 4.532, 20),
    ("VGG16", 0.660, 2.252, 20),
    ("EfficientNetB3", 1.239, 4.205, 20),
    ("Xception", 0.801, 2.638, 20),
    ("VGG19", 0.893, 2.181, 20),
    ("NASNetLarge", 3.464, 7.154, 42),
    ("EfficientNetV2M", 4.479, 6.861, 49),
    ("EfficientNetB4", 2.881, 4.103, 31),
    ("EfficientNetV2L", 7.520, 6.675, 73),
    ("EfficientNetB5", 6.121, 2.283, 53),
    ("SSDMobilenet", 19.448, 4.442, 164),
    ("EfficientNetB6", 9.754, 1.984, 82),
    ("EfficientNetB7", 16.339, 2.751, 136),
    ("BERT", 7.353, 0.222, 59),
)

GTX1080TI: tuple[Model, ...] = tuple(_model(*row) for row in _TABLE_3)
"""Table 3: 35 models on an NVIDIA 1080Ti, by falling beta / alpha."""

A100: tuple[Model, ...] = tuple(_model(*row) for row in _TABLE_4)
"""Table 4: 37 models on an NVIDIA A100, by falling beta / alpha."""

GPUS: dict[str, tuple[Model, ...]] = {"1080Ti": GTX1080TI, "A100": A100}


def named(gpu: str, name: str) -> Model:
    """The model of this name on this GPU.

    Raises:
        KeyError: the table has no such model, or there is no such table.
    """
    for model in GPUS[gpu]:
        if model.name == name:
            return model
    raise KeyError(f"{gpu} has no {name!r}, it has {', '.join(model.name for model in GPUS[gpu])}")
