"""Random parameters in the shape of a real model, as a source: `random:llama-7b` and the like.

For measurements at sizes whose weights are not to be had, and for tests. Parameters are made one at a time
when they are read and are the same on every machine and in every split: large matrices are windows into
one block of random numbers, each from a place of its own (13 B numbers drawn one by one would take minutes).
Names and shapes are those the family states, so nothing here knows an architecture.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from keystage.bundle.errors import SplitError
from keystage.bundle.random_shapes import shape_config
from keystage.bundle.source import Vocabulary
from keystage.models.base import StageRole, StageTensor
from keystage.models.families import family_of

if TYPE_CHECKING:
    import torch

_VERSION = 1
"""Part of a bundle's identity: another way to draw numbers makes other bundles."""
_BLOCK_ITEMS = 8 * 1024 * 1024 - 3
"""Odd, so that no two rows of a matrix that is longer are equal."""
_BLOCK_SEED = 20_260_801


class RandomSource:
    """See `keystage.bundle.source.ModelSource`."""

    def __init__(self, shape: str) -> None:
        self._config = shape_config(shape)
        self._tensors: dict[str, StageTensor] | None = None
        self._block: np.ndarray[Any, np.dtype[np.float32]] | None = None
        self.words = f"random parameters of the shape {shape}"

    def config(self) -> dict[str, Any]:
        """See `ModelSource.config`."""
        return dict(self._config)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """See `ModelSource.shapes`."""
        return {name: tensor.source_shape for name, tensor in self._all().items()}

    def read(self, name: str) -> torch.Tensor:
        """See `ModelSource.read`; float32."""
        import torch

        tensor = self._all().get(name)
        if tensor is None:
            raise SplitError(f"{self.words}: parameter {name} is missing")
        values = self._drawn(name, math.prod(tensor.shape))
        scale, shift = _spread(tensor)
        if scale != 1.0:
            values *= np.float32(scale)
        if shift:
            values += np.float32(shift)
        if name.endswith("running_var"):
            np.abs(values, out=values)
        return torch.from_numpy(values).view(tensor.source_shape)

    def write_vocabulary(self, folder: Path) -> Vocabulary:
        """See `ModelSource.write_vocabulary`: there is none, ids are raw bytes."""
        del folder
        return Vocabulary()

    def _all(self) -> dict[str, StageTensor]:
        if self._tensors is None:
            family = family_of(self._config)
            whole = StageRole(0, family.shape(self._config).layers, is_first=True, is_last=True)
            self._tensors = {t.source: t for t in family.stage_tensors(self._config, whole)}
        return self._tensors

    def _drawn(self, name: str, count: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Numbers of mean 0 and variance 1."""
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
        if count < _BLOCK_ITEMS // 8:
            return np.random.default_rng(seed).standard_normal(count, dtype=np.float32)
        if self._block is None:
            self._block = np.random.default_rng(_BLOCK_SEED).standard_normal(_BLOCK_ITEMS, dtype=np.float32)
        values = np.empty(count, dtype=np.float32)
        start, done = seed % _BLOCK_ITEMS, 0
        while done < count:
            part = self._block[start : start + count - done]
            values[done : done + len(part)] = part
            start, done = 0, done + len(part)
        return values


def random_parameters(shape: str) -> int:
    """Parameters that a shape has.

    Raises:
        SplitError: unknown shape.
    """
    config = shape_config(shape)
    family = family_of(config)
    whole = StageRole(0, family.shape(config).layers, is_first=True, is_last=True)
    return sum(
        math.prod(shape)
        for shape in {t.source: t.shape for t in family.stage_tensors(config, whole)}.values()
    )


def random_identity(shape: str) -> str:
    """SHA-256 (hex) of what decides the parameters.

    Raises:
        SplitError: unknown shape.
    """
    return hashlib.sha256(
        msgspec.json.encode([_VERSION, shape, shape_config(shape)], order="sorted")
    ).hexdigest()


def _spread(tensor: StageTensor) -> tuple[float, float]:
    """Standard deviation and mean: activations keep their size from layer to layer.

    Matrices have 1 / sqrt(inputs); gains of norms lie around 1, biases and running means around 0.
    """
    if len(tensor.shape) > 1:
        return math.prod(tensor.shape[1:]) ** -0.5, 0.0
    if tensor.source.endswith("weight"):
        return 0.1, 1.0
    if tensor.source.endswith("running_var"):
        return 0.1, 1.0
    return 0.02, 0.0
