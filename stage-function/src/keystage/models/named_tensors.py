"""A stage's tensors by name, checked, and moved, fused and shared as they are taken.

Between `models.loading`, which reads a stage's file, and the modules that gather a family's
parameters. Where matrices already lie side by side in the file, the fused matrix is a view and
nothing is copied. A stage must take its large tensors in one fixed order: that is how a process that
gets them ready-made finds them (`shared.Ready`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from keystage.bundle.errors import BundleError
from keystage.models.base import StageTensor
from keystage.models.linear import Linear, is_packable, linear, ready_linear
from keystage.models.shared import Keep, Ready


class NamedTensors:
    """The tensors of a stage.

    Args:
        expected: what must be there.
        tensors: what is there, by name.
        device: where to.
        dtype: as what.
        share: see `loading.build_stage`.

    Attributes:
        device: where they go.
        dtype: as what.

    Raises:
        BundleError: a tensor is missing or has another shape.
    """

    def __init__(
        self,
        expected: Sequence[StageTensor],
        tensors: Mapping[str, torch.Tensor],
        device: torch.device,
        dtype: torch.dtype,
        share: Keep | None,
    ) -> None:
        _check(expected, tensors)
        self._tensors = tensors
        self.device = device
        self.dtype = dtype
        self._share = share
        self._ready = share if isinstance(share, Ready) else None
        # Without packed matrices the shared file is used as it is, and nothing need be copied from it.
        self._detach = share is None or is_packable(device, dtype)
        self._sources = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def vector(self, name: str) -> torch.Tensor:
        """One small tensor on the device in the stage's type, detached from the read buffer."""
        return self._moved(self._tensors[name])

    def table(self, name: str) -> torch.Tensor:
        """One matrix of which rows are taken; shared where other processes may need it."""
        if self._ready is not None:
            return self._ready.take(tuple(self._tensors[name].shape))
        table = self._moved(self._tensors[name])
        self._keep(table)
        return table

    @property
    def is_in_place(self) -> bool:
        """Whether parameters must be used where they lie: on a device they may arrive only later."""
        return self._share is not None and self.device.type != "cpu"

    def stored(self, name: str) -> torch.Tensor:
        """One vector as the file has it, for what a stage makes of several."""
        return self._tensors[name]

    def made(self, shape: tuple[int, ...], make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """A tensor that the stage makes of others; shared where other processes may need it.

        Args:
            shape: its shape.
            make: makes it, on the device in the stage's type; not called where another process has made it.
        """
        if self._ready is not None:
            return self._ready.take(shape)
        tensor = make()
        self._keep(tensor)
        return tensor

    def fused(self, names: Sequence[str]) -> torch.Tensor:
        """Tensors below one another along axis 0, as a view where they lie so in memory."""
        parts = [self._tensors[name] for name in names]
        joined = _adjacent(parts)
        return (torch.cat(parts) if joined is None else joined).to(self.device, self.dtype)

    def linear(self, names: Sequence[str], bias: torch.Tensor | None = None) -> Linear:
        """The multiplication with matrices below one another; shared where other processes may need it."""
        if self._ready is not None:
            rows = sum(self._tensors[name].shape[0] for name in names)
            shape = (rows, *self._tensors[names[0]].shape[1:])
            return ready_linear(self._ready.take(shape), bias)
        return linear(self.fused(names), bias, keep=self._keep)

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        copy = self._detach and tensor.device == self.device
        return tensor.to(self.device, self.dtype, copy=copy)

    def _keep(self, tensor: torch.Tensor) -> None:
        """Shares a tensor if it is one that the stage has made."""
        if self._share is None or tensor.device.type != "cpu":
            return
        if tensor.is_mkldnn or tensor.untyped_storage().data_ptr() not in self._sources:
            self._share(tensor)


def _check(expected: Sequence[StageTensor], tensors: Mapping[str, torch.Tensor]) -> None:
    for wanted in expected:
        tensor = tensors.get(wanted.name)
        if tensor is None:
            raise BundleError(f"parameter {wanted.name} is missing")
        if tuple(tensor.shape) != wanted.shape:
            raise BundleError(
                f"parameter {wanted.name}: shape {list(wanted.shape)} expected, {list(tensor.shape)} found"
            )


def _adjacent(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """A view over tensors that lie one after another in one storage, or None."""
    first = parts[0]
    end = first.storage_offset()
    for part in parts:
        same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (same and part.is_contiguous() and part.dtype == first.dtype and part.storage_offset() == end):
            return None
        end += part.numel()
    rows = sum(part.shape[0] for part in parts)
    shape = (rows, *first.shape[1:])
    return first.as_strided(shape, first.stride(), first.storage_offset())
