"""Wide residual networks as a single-pass family: an image in, a score for every class out.

Loaded by `models.loading`, driven by the worker batch by batch. An item is an image [3, H, W] at first,
uint8 (0 to 255) or float32 (normalised already), an activation [C, H', W'] between stages, and float32
[classes] (logits) at the end. Images of one size run as one batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from keystage.models import wide_resnet_config, wide_resnet_layout
from keystage.models.base import Execution, ModelShape, StageError, StageRole, StageTensor
from keystage.models.convolution import Convolution, convolution, memory_format
from keystage.models.linear import Linear
from keystage.models.named_tensors import NamedTensors
from keystage.models.shared import Keep
from keystage.models.wide_resnet_config import Block, WideResNetConfig

CPU_ITEMS = 4
"""Images that run at once on a CPU: more bring no speed, and their activations leave its caches."""
DEVICE_ITEMS = 64
"""The same on a GPU, where 64 images keep all of it busy and their activations take some 2 GiB."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """One block, ready to run: three convolutions, and one for what is added where its size changes."""

    convolutions: tuple[Convolution, Convolution, Convolution]
    shortcut: Convolution | None


class WideResNetStage:
    """Blocks [first, end), with the stem and the classifier where they belong."""

    def __init__(
        self,
        config: WideResNetConfig,
        role: StageRole,
        named: NamedTensors,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._config = config
        self.role = role
        self.shape = _shape(config)
        self.device = device
        self.dtype = dtype
        self.most_items = CPU_ITEMS if device.type == "cpu" else DEVICE_ITEMS
        self.input_name = "image" if role.is_first else "hidden"
        self.output_name = "logits" if role.is_last else "hidden"
        blocks = config.blocks[role.first_layer : role.end_layer]
        self._first, self._last = blocks[0], blocks[-1]
        eps = config.norm_eps
        self._format = memory_format(device, dtype)
        if named.is_in_place:
            self._format = torch.contiguous_format  # as the weights lie
        self._mean, self._std = (
            torch.tensor(values, device=device)[:, None, None] for values in (config.mean, config.std)
        )
        side = config.image_size
        self._stem = convolution(named, wide_resnet_layout.STEM, eps, side, 2) if role.is_first else None
        self._layers = [_layer(named, block, eps, side) for block in blocks]
        self._head: Linear | None = None
        if role.is_last:
            head = wide_resnet_layout.HEAD
            self._head = named.linear([f"{head}.weight"], named.vector(f"{head}.bias"))

    @torch.inference_mode()
    def forward(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """See `SinglePassStage.forward`."""
        for item in inputs:
            self._check(item)
        order = sorted(range(len(inputs)), key=lambda index: _kind(inputs[index]))
        results: list[tuple[int, torch.Tensor]] = []
        for _, alike in itertools.groupby(order, key=lambda index: _kind(inputs[index])):
            indices = list(alike)
            for start in range(0, len(indices), self.most_items):
                part = indices[start : start + self.most_items]
                outputs = self._run(torch.stack([inputs[index] for index in part]).to(self.device))
                results += zip(part, outputs.unbind(), strict=True)
        return [output for _, output in sorted(results, key=lambda result: result[0])]

    def samples(self, items: int, tokens: int = 0) -> list[torch.Tensor]:
        """See `SinglePassStage.samples`: images of the network's own size."""
        generator = torch.Generator().manual_seed(items)
        side = self._config.image_size
        if self.role.is_first:
            shape = (3, side, side)
            return [torch.randint(256, shape, generator=generator, dtype=torch.uint8) for _ in range(items)]
        reduced = -(-side // (self._first.reduction // self._first.stride))
        shape = (self._first.inputs, reduced, reduced)
        return [torch.rand(shape, generator=generator).to(self.device, self.dtype) for _ in range(items)]

    def _check(self, item: torch.Tensor) -> None:
        shape, config = tuple(item.shape), self._config
        channels, kinds = self._first.inputs, [self.dtype]
        low, high = 1, config.most_side
        if self.role.is_first:
            channels, kinds, low = 3, [torch.uint8, torch.float32], config.least_side
        sides = shape[1:]
        if (
            len(shape) != 3
            or shape[0] != channels
            or not all(low <= side <= high for side in sides)
            or item.dtype not in kinds
        ):
            named = " or ".join(str(kind).removeprefix("torch.") for kind in kinds)
            raise StageError(
                f"an item of type {str(item.dtype).removeprefix('torch.')} and shape {list(shape)}: {named} "
                f"[{channels}, H, W] is expected, H and W from {low} to {high}"
            )

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        """One batch of items of one size."""
        if self._stem is not None:
            x = self._stem(self._normalised(x).contiguous(memory_format=self._format))
            x = functional.max_pool2d(x, 3, 2, 1)
        else:
            x = x.contiguous(memory_format=self._format)
        for layer in self._layers:
            first, second, third = layer.convolutions
            inner = third(second(first(x)))
            x = functional.relu_(inner.add_(x if layer.shortcut is None else layer.shortcut(x)))
        if self._head is None:
            return x.contiguous()
        return self._head(x.mean((2, 3))).float()

    def _normalised(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype is not torch.uint8:
            return x.to(self.dtype)
        return ((x.float() / 255 - self._mean) / self._std).to(self.dtype)


class WideResNetFamily:
    """`keystage.models.single_pass.SinglePassFamily` for wide residual networks."""

    name = "wide_resnet"
    architectures = (wide_resnet_config.ARCHITECTURE,)
    execution: Execution = "single-pass"

    def shape(self, config: Mapping[str, Any]) -> ModelShape:
        """See `Family.shape`; there are no tokens, and the vocabulary is the classes."""
        return _shape(wide_resnet_config.parse(config))

    def stage_tensors(self, config: Mapping[str, Any], role: StageRole) -> list[StageTensor]:
        """See `Family.stage_tensors`."""
        return wide_resnet_layout.stage_tensors(wide_resnet_config.parse(config), role)

    def end_parameters(self, config: Mapping[str, Any]) -> tuple[int, int]:
        """See `Family.end_parameters`."""
        found = wide_resnet_config.parse(config)
        first = sum(_elements(tensor) for tensor in wide_resnet_layout.stem_tensors())
        last = wide_resnet_layout.head_tensors(found, found.outputs)
        return first, sum(_elements(tensor) for tensor in last)

    def is_derived(self, config: Mapping[str, Any], name: str) -> bool:
        """See `Family.is_derived`."""
        del config
        return wide_resnet_layout.is_derived(name)

    def activation_elements(self, config: Mapping[str, Any], end_layer: int) -> int:
        """See `SinglePassFamily.activation_elements`; of an image of the network's own size."""
        found = wide_resnet_config.parse(config)
        block = found.blocks[end_layer - 1]
        return block.outputs * (-(-found.image_size // block.reduction)) ** 2

    def build(
        self,
        config: Mapping[str, Any],
        role: StageRole,
        tensors: Mapping[str, torch.Tensor],
        device: torch.device,
        dtype: torch.dtype,
        share: Keep | None = None,
    ) -> WideResNetStage:
        """See `Family.build`."""
        found = wide_resnet_config.parse(config)
        expected = wide_resnet_layout.stage_tensors(found, role)
        named = NamedTensors(expected, tensors, device, dtype, share)
        return WideResNetStage(found, role, named, device, dtype)


WIDE_RESNET = WideResNetFamily()


def _layer(named: NamedTensors, block: Block, eps: float, image_size: int) -> _Layer:
    names = [(f"{block.name}.conv{index}", f"{block.name}.bn{index}") for index in (1, 2, 3)]
    after = -(-image_size // block.reduction)
    before = after * block.stride
    convolutions = (
        convolution(named, names[0], eps, before),
        convolution(named, names[1], eps, before, block.stride),
        convolution(named, names[2], eps, after, is_rectified=False),
    )
    if not block.has_shortcut:
        return _Layer(convolutions, None)
    shortcut = (f"{block.name}.downsample.0", f"{block.name}.downsample.1")
    return _Layer(convolutions, convolution(named, shortcut, eps, before, block.stride, is_rectified=False))


def _shape(config: WideResNetConfig) -> ModelShape:
    return ModelShape(len(config.blocks), config.outputs, config.classes, 0)


def _kind(item: torch.Tensor) -> tuple[str, tuple[int, ...]]:
    return str(item.dtype), tuple(item.shape)


def _elements(tensor: StageTensor) -> int:
    return torch.Size(tensor.shape).numel()
