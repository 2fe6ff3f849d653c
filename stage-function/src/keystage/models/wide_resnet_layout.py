"""Names, shapes and file order of a wide residual network's parameters: torchvision's state dict."""

from __future__ import annotations

from keystage.models.base import StageRole, StageTensor
from keystage.models.wide_resnet_config import STEM_CHANNELS, Block, WideResNetConfig

STEM = ("conv1", "bn1")
HEAD = "fc"
NORM_PARTS = ("weight", "bias", "running_mean", "running_var")
_COUNTER = "num_batches_tracked"


def stem_tensors() -> list[StageTensor]:
    """Parameters of what comes before the first layer, in file order."""
    return _convolution(*STEM, STEM_CHANNELS, 3, 7)


def block_tensors(block: Block) -> list[StageTensor]:
    """Parameters of one layer, in file order."""
    sizes = ((block.width, block.inputs, 1), (block.width, block.width, 3), (block.outputs, block.width, 1))
    tensors: list[StageTensor] = []
    for index, (outputs, inputs, side) in enumerate(sizes, 1):
        tensors += _convolution(f"{block.name}.conv{index}", f"{block.name}.bn{index}", outputs, inputs, side)
    if block.has_shortcut:
        name = f"{block.name}.downsample"
        tensors += _convolution(f"{name}.0", f"{name}.1", block.outputs, block.inputs, 1)
    return tensors


def head_tensors(config: WideResNetConfig, inputs: int) -> list[StageTensor]:
    """Parameters of the classifier, in file order."""
    return [_same(f"{HEAD}.weight", config.classes, inputs), _same(f"{HEAD}.bias", config.classes)]


def stage_tensors(config: WideResNetConfig, role: StageRole) -> list[StageTensor]:
    """Parameters of a stage, in file order.

    A stage that is called the last one and does not hold the last layer has a head that fits it, so that
    it can be run with parameters of no meaning.
    """
    blocks = config.blocks[role.first_layer : role.end_layer]
    tensors = stem_tensors() if role.is_first else []
    for block in blocks:
        tensors += block_tensors(block)
    return tensors + (head_tensors(config, blocks[-1].outputs) if role.is_last else [])


def is_derived(name: str) -> bool:
    """Whether a stored parameter may be left out: counters of training steps."""
    return name.endswith(_COUNTER)


def _convolution(name: str, norm: str, outputs: int, inputs: int, side: int) -> list[StageTensor]:
    norms = [_same(f"{norm}.{part}", outputs) for part in NORM_PARTS]
    return [_same(f"{name}.weight", outputs, inputs, side, side), *norms]


def _same(name: str, *shape: int) -> StageTensor:
    return StageTensor(name, name, shape)
