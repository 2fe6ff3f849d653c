"""A wide residual network's sizes, checked and typed; its file has the fields that are named here.

Read by `keystage split` and again from `pipeline.json` when a stage is built; the router reads from it how
an image is cut. The network is torchvision's `wide_resnet50_2` and its relatives: bottleneck blocks in
four groups, each block a layer. Pure, and free of torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keystage.bundle.errors import SplitError
from keystage.models.config_fields import MOST_LAYERS, count, number, shown

ARCHITECTURE = "WideResNet"
STEM_CHANNELS = 64
EXPANSION = 4
"""A block's outputs are so many times its group's planes."""
_LEAST_SIDE = 32


@dataclass(frozen=True, slots=True)
class Block:
    """One layer.

    Attributes:
        name: what its parameters' names begin with, without a dot.
        inputs: channels that come in.
        width: channels inside.
        outputs: channels that go out.
        stride: of its middle convolution.
        has_shortcut: whether what is added passes a convolution of its own.
        reduction: sides of the image over sides of its output.
    """

    name: str
    inputs: int
    width: int
    outputs: int
    stride: int
    has_shortcut: bool
    reduction: int


@dataclass(frozen=True, slots=True)
class WideResNetConfig:
    """Sizes and constants.

    Attributes:
        blocks: the layers.
        classes: what it tells apart.
        image_size: side in pixels of the square that an image is cut to.
        resize: shorter side in pixels that an image is brought to before.
        mean: of each colour, 0 to 1, taken off.
        std: of each colour, divided by.
        norm_eps: added to the variance in every norm.
    """

    blocks: tuple[Block, ...]
    classes: int
    image_size: int
    resize: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    norm_eps: float

    @property
    def least_side(self) -> int:
        """Pixels: smaller images vanish on the way."""
        return _LEAST_SIDE

    @property
    def most_side(self) -> int:
        """Pixels: an activation grows with the square of it."""
        return 2 * self.image_size

    @property
    def outputs(self) -> int:
        """Channels of the last layer."""
        return self.blocks[-1].outputs


def parse(config: Mapping[str, Any]) -> WideResNetConfig:
    """Reads a config.json.

    Raises:
        SplitError: a field is missing or impossible.
    """
    depths = config.get("layers")
    if (
        not isinstance(depths, Sequence)
        or len(depths) != 4
        or not all(isinstance(depth, int) and 1 <= depth <= MOST_LAYERS for depth in depths)
    ):
        raise SplitError(
            f"config.json: layers must be four numbers of blocks, 1 to {MOST_LAYERS}, got {shown(depths)}"
        )
    image_size = count(config, "image_size", 224)
    return WideResNetConfig(
        blocks=tuple(_blocks(depths, count(config, "width_per_group", 64))),
        classes=count(config, "num_classes"),
        image_size=image_size,
        resize=count(config, "resize", -(-image_size * 8 // 7)),
        mean=_colours(config, "image_mean", (0.485, 0.456, 0.406)),
        std=_colours(config, "image_std", (0.229, 0.224, 0.225)),
        norm_eps=number(config, "batch_norm_eps", 1e-5),
    )


def _blocks(depths: Sequence[int], width_per_group: int) -> list[Block]:
    blocks: list[Block] = []
    inputs = STEM_CHANNELS
    for group, depth in enumerate(depths):
        planes = 64 << group
        outputs = planes * EXPANSION
        for index in range(depth):
            stride = 2 if group and not index else 1
            width = planes * width_per_group // 64
            shortcut = stride != 1 or inputs != outputs
            blocks.append(
                Block(f"layer{group + 1}.{index}", inputs, width, outputs, stride, shortcut, 4 << group)
            )
            inputs = outputs
    return blocks


def _colours(config: Mapping[str, Any], key: str, default: tuple[float, ...]) -> tuple[float, ...]:
    values = config.get(key) or default
    if not isinstance(values, Sequence) or len(values) != 3:
        raise SplitError(f"config.json: {key} must be three numbers above 0, got {shown(values)}")
    return tuple(number({key: value}, key) for value in values)
