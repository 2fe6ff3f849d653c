"""Runs real single-pass stages with torch: bytes of items in, bytes of items out.

Chosen by `worker.app` where the pipeline is single-pass; imported only when a real device is asked for.
Stages that the worker hosts one after another hand over in memory. Stages that a `Supply` has ready are
taken from it, the others are read from the bundle. It forms no batches and keeps no state between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors

from keystage.bundle.api import Pipeline
from keystage.models.base import StageError as ModelStageError
from keystage.models.loading import load_single_pass, synchronize, warm_up
from keystage.models.single_pass import SinglePassStage, single_pass_stage
from keystage.worker.executor import Activation, StageError
from keystage.worker.sessionless import Sessionless
from keystage.worker.supply import Supply
from keystage.worker.torch_executor import use_device

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8)
}


class TorchSinglePass(Sessionless):
    """Loads the hosted stages onto a device; an `Executor`.

    Args:
        bundle: bundle folder.
        pipeline: its description.
        stages: hosted stage indices.
        device: torch device name.
        dtype: element type of parameters and activations.
        threads: intra-op threads, 0 leaves torch's choice.
        supply: what is in memory already, None: nothing.
        deterministic: every item is computed alone: what it gets hangs, to the last bit, on no other.

    Attributes:
        most_items: items of a batch beyond which a larger one saves nothing.
    """

    def __init__(
        self,
        bundle: Path,
        pipeline: Pipeline,
        stages: Sequence[int],
        device: str,
        dtype: str,
        threads: int,
        supply: Supply | None = None,
        *,
        deterministic: bool = False,
    ) -> None:
        super().__init__(f"{pipeline.name} is single-pass")
        self._is_deterministic = deterministic
        if threads:
            torch.set_num_threads(threads)
        use_device(torch.device(device))
        self._stages: dict[int, SinglePassStage] = {}
        self._supplied: set[int] = set()
        for index in stages:
            found = supply.stage(pipeline, index, device, dtype) if supply is not None else None
            if found is None:
                self._stages[index] = load_single_pass(bundle, pipeline, index, device, dtype)
            else:
                self._stages[index] = single_pass_stage(found)
                self._supplied.add(index)
        if supply is not None and torch.device(device).type != "cpu":
            supply.release()  # the device has its own copy
        self.most_items = min(stage.most_items for stage in self._stages.values())

    def batch(self, first: int, last: int, inputs: Sequence[Activation]) -> list[Activation]:
        """Runs one batch; see `Executor.batch`."""
        try:
            items = [_tensor(item) for item in inputs]
            if self._is_deterministic:
                return _activations([self._run(first, last, [item])[0] for item in items])
            return _activations(self._run(first, last, items))
        except torch.OutOfMemoryError as error:
            if len(inputs) == 1:
                raise StageError(
                    f"out of device memory in stages {first}..{last}, 1 item: {error}", retryable=True
                ) from error
        # Elsewhere or later the same batch would be too large again. What the failed one took is free by now.
        half = len(inputs) // 2
        return [*self.batch(first, last, inputs[:half]), *self.batch(first, last, inputs[half:])]

    def single(self, body: bytes) -> bytes:
        """Takes one item under its stage's name for it (`ids`, `image`, `hidden`); answers one likewise."""
        indices = sorted(self._stages)
        first, last = self._stages[indices[0]], self._stages[indices[-1]]
        try:
            tensors = load_safetensors(body)
        except (SafetensorError, ValueError) as error:
            raise StageError(f"body is no safetensors: {error}") from error
        if set(tensors) != {first.input_name}:
            raise StageError(
                f"stage {indices[0]} takes one tensor {first.input_name!r}, got {sorted(tensors)}"
            )
        output = self._run(indices[0], indices[-1], [tensors[first.input_name]])[0]
        return bytes(save_safetensors({last.output_name: output.cpu().contiguous()}))

    def set_threads(self, threads: int) -> None:
        """Intra-op threads of this thread's operators."""
        torch.set_num_threads(threads)

    def first_forward(self) -> None:
        """Runs an item through every hosted stage."""
        for stage in self._stages.values():
            stage.forward(stage.samples(1))
            synchronize(stage)

    def warm_up(self) -> None:
        """Runs hosted stages in several sizes, but for those that whoever supplied them has warmed."""
        for index, stage in self._stages.items():
            if index not in self._supplied:
                warm_up(stage)

    def _run(self, first: int, last: int, items: list[torch.Tensor]) -> list[torch.Tensor]:
        try:
            for index in range(first, last + 1):
                items = self._stages[index].forward(items)
        except torch.OutOfMemoryError:
            raise
        except (ModelStageError, RuntimeError, IndexError) as error:
            raise StageError(f"stages {first}..{last} failed: {error}") from error
        return items


def _tensor(item: Activation) -> torch.Tensor:
    """An input where it lies: in its producer's ring, or in a message (which is read-only, and copied)."""
    dtype = _DTYPES.get(item.dtype)
    if dtype is None:
        raise StageError(f"an item of type {item.dtype!r}: known are {', '.join(_DTYPES)}")
    data = bytearray(item.data) if item.data.readonly else item.data
    try:
        return torch.frombuffer(data, dtype=dtype).view(item.shape)
    except (RuntimeError, ValueError) as error:
        raise StageError(
            f"an item of {item.data.nbytes} bytes is no {item.dtype} {list(item.shape)}: {error}"
        ) from error


def _activations(outputs: Sequence[torch.Tensor]) -> list[Activation]:
    """Outputs as bytes; from a device in one copy, which waits for it once."""
    if outputs[0].device.type != "cpu":
        flat = torch.cat([output.reshape(-1) for output in outputs]).cpu()
        parts = torch.split(flat, [output.numel() for output in outputs])
        outputs = [part.view(output.shape) for part, output in zip(parts, outputs, strict=True)]
    return [_activation(output.detach().contiguous()) for output in outputs]


def _activation(host: torch.Tensor) -> Activation:
    name = str(host.dtype).removeprefix("torch.")
    data = host.reshape(-1).view(torch.uint8).numpy().data if host.numel() else memoryview(b"")
    return Activation(name, tuple(host.shape), data)
