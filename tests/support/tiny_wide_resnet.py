"""A wide residual network in plain torch modules, with torchvision's names: what stages are compared with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

TINY: dict[str, Any] = {
    "architectures": ["WideResNet"],
    "model_type": "wide_resnet",
    "layers": [2, 1, 2, 1],
    "width_per_group": 16,
    "num_classes": 11,
    "image_size": 64,
}


class _Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample = (
            nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
            if stride != 1 or inputs != outputs
            else None
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.relu(self.bn1(self.conv1(x)))
        inner = torch.relu(self.bn2(self.conv2(inner)))
        inner = self.bn3(self.conv3(inner))
        return torch.relu(inner + (x if self.downsample is None else self.downsample(x)))


class WideResNet(nn.Module):
    """The unsplit network; `layers` are blocks per group."""

    def __init__(self, layers: Sequence[int], width_per_group: int, num_classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        inputs = 64
        for group, depth in enumerate(layers):
            planes = 64 << group
            blocks = []
            for index in range(depth):
                stride = 2 if group and not index else 1
                blocks.append(_Bottleneck(inputs, planes * width_per_group // 64, 4 * planes, stride))
                inputs = 4 * planes
            self.add_module(f"layer{group + 1}", nn.Sequential(*blocks))
        self.fc = nn.Linear(inputs, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.max_pool2d(torch.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        for group in (self.layer1, self.layer2, self.layer3, self.layer4):
            x = group(x)
        return self.fc(x.mean((2, 3)))


def randomize(model: nn.Module) -> Any:
    """Gives every parameter and every running figure a random value of a trained network's size."""
    torch.manual_seed(3)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.3, 0.9)
            nn.init.normal_(module.bias, 0.0, 0.2)
            nn.init.normal_(module.running_mean, 0.0, 0.2)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
    return model.eval()


def tiny_wide_resnet(**changes: Any) -> tuple[Any, dict[str, Any]]:
    """A random network and its config; the same one for the same arguments."""
    config = {**TINY, **changes}
    torch.manual_seed(2)
    model = WideResNet(config["layers"], config["width_per_group"], config["num_classes"])
    return randomize(model), config


def write_folder(model: nn.Module, config: dict[str, Any], folder: Path) -> Path:
    """Saves a network as a folder to split: its state dict, counters of training steps left out or not."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    floating = {k: v.detach().contiguous() for k, v in model.state_dict().items()}
    save_file(floating, folder / "model.safetensors")
    return folder


def normalised(image: torch.Tensor) -> torch.Tensor:
    """A uint8 image as the network takes it."""
    mean = torch.tensor([0.485, 0.456, 0.406])[:, None, None]
    std = torch.tensor([0.229, 0.224, 0.225])[:, None, None]
    return (image.float() / 255 - mean) / std
