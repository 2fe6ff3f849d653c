"""Runs real stages with torch: bytes in, bytes out. Imported only when a real device is asked for.

One `StageModel` per hosted stage; consecutive stages hand over in memory. Sampling happens after
the last stage on the rows that ask for it. Stages that a `Supply` has ready are taken from it, the
others are read from the bundle.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors

from keystage.bundle.api import Pipeline
from keystage.models.base import LoadedStage, Row
from keystage.models.base import StageError as ModelStageError
from keystage.models.loading import load_stage, sample_input, synchronize, warm_up
from keystage.wire.api import StepRows
from keystage.worker.executor import Activation, StageError, StepOutput
from keystage.worker.sampling import SamplingError, sample
from keystage.worker.supply import Supply

_SINGLE_SLOT = -1
"""Slot of `POST /` calls; session numbers are never negative, and the warm-up is over."""

_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
}


def check_device(name: str) -> str:
    """Checks that a device exists; returns its full name (`cuda` becomes `cuda:0`).

    Raises:
        StageError: unknown or absent; names what there is.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        raise StageError(f"KEYSTAGE_DEVICE={name}: expected cpu, cuda, cuda:N or emulated:...") from None
    if device.type == "cuda":
        count = torch.cuda.device_count()
        index = device.index or 0
        if index >= count:
            raise StageError(f"KEYSTAGE_DEVICE={name}: this machine shows {count} CUDA devices")
        return f"cuda:{index}"
    return device.type


class TorchExecutor:
    """Loads the hosted stages onto a device.

    Args:
        bundle: bundle folder.
        pipeline: its description.
        stages: hosted stage indices.
        device: torch device name.
        dtype: element type of parameters and activations.
        threads: intra-op threads, 0 leaves torch's choice.
        supply: what is in memory already, None: nothing.
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
    ) -> None:
        if threads:
            torch.set_num_threads(threads)
        self._pipeline = pipeline
        self._last_stage = len(pipeline.stages) - 1
        self._device = torch.device(device)
        self._dtype_name = dtype
        self._models: dict[int, LoadedStage] = {}
        self._supplied: set[int] = set()
        for stage in stages:
            model = supply.stage(pipeline, stage, device, dtype) if supply is not None else None
            if model is None:
                model = load_stage(bundle, pipeline, stage, device, _DTYPES[dtype])
            else:
                self._supplied.add(stage)
            self._models[stage] = model
        if supply is not None and self._device.type != "cpu":
            supply.release()  # the device has its own copy

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of KV state per token position, over all hosted stages."""
        return sum(model.kv_token_bytes for model in self._models.values())

    def open(self, session: int, tokens: int) -> None:
        """Allocates KV state in every hosted stage."""
        try:
            for model in self._models.values():
                model.open(session, tokens)
        except torch.OutOfMemoryError as error:
            self.close(session)
            raise StageError(f"no memory for {tokens} KV positions: {error}", retryable=True) from error

    def close(self, session: int) -> None:
        """Frees KV state."""
        for model in self._models.values():
            model.close(session)

    def set_threads(self, threads: int) -> None:
        """Intra-op threads of this thread's operators."""
        torch.set_num_threads(threads)

    def step(
        self, first: int, last: int, ids: Sequence[int], activation: Activation | None, rows: StepRows
    ) -> StepOutput:
        """Runs one wave; see `Executor.step`."""
        model_rows = [
            Row(session, start, count)
            for session, start, count in zip(rows.sessions, rows.positions, rows.counts, strict=True)
        ]
        want = [i for i, sampled in enumerate(rows.sample) if sampled]
        try:
            x = self._input(ids, activation)
            for stage in range(first, last + 1):
                x = self._models[stage].forward(x, model_rows, want)
            if last != self._last_stage:
                return StepOutput(self._output(x), [])
            tokens = [-1] * len(model_rows)
            if want:
                sampled_tokens = sample(
                    x,
                    [rows.seeds[i] for i in want],
                    [rows.positions[i] + rows.counts[i] for i in want],
                    [rows.temperatures[i] for i in want],
                    [rows.top_ps[i] for i in want],
                )
                for i, token in zip(want, sampled_tokens, strict=True):
                    tokens[i] = token
        except torch.OutOfMemoryError as error:
            raise StageError(
                f"out of device memory in stages {first}..{last}: {error}", retryable=True
            ) from error
        except (SamplingError, ModelStageError, RuntimeError, IndexError) as error:
            raise StageError(f"stages {first}..{last} failed: {error}") from error
        return StepOutput(None, tokens)

    def batch(self, stage: int, inputs: Sequence[Activation]) -> list[Activation]:
        """Decoder stages do not run single-pass."""
        raise StageError(f"stage {stage} of {self._pipeline.name} is looping, not single-pass")

    def single(self, body: bytes) -> bytes:
        """Takes `ids` (int64 [T]) or `hidden` ([T, hidden]); answers `hidden`, or `logits` [1, vocab]."""
        stages = sorted(self._models)
        try:
            tensors = load_safetensors(body)
        except (SafetensorError, ValueError) as error:
            raise StageError(f"body is no safetensors: {error}") from error
        name = "ids" if stages[0] == 0 else "hidden"
        if set(tensors) != {name}:
            raise StageError(f"stage {stages[0]} takes one tensor {name!r}, got {sorted(tensors)}")
        x = tensors[name].to(self._device)
        if x.ndim != (1 if name == "ids" else 2) or not 0 < x.shape[0] <= self._pipeline.context_length:
            raise StageError(
                f"{name} has shape {tuple(x.shape)}; axis 0 takes 1..{self._pipeline.context_length} tokens"
            )
        try:
            self.open(_SINGLE_SLOT, int(x.shape[0]))
            row = [Row(_SINGLE_SLOT, 0, int(x.shape[0]))]
            for stage in stages:
                x = self._models[stage].forward(x, row, [0])
        except (ModelStageError, RuntimeError, IndexError) as error:
            raise StageError(f"stages {stages[0]}..{stages[-1]} failed: {error}") from error
        finally:
            self.close(_SINGLE_SLOT)
        out = "logits" if stages[-1] == self._last_stage else "hidden"
        return bytes(save_safetensors({out: x.cpu().contiguous()}))

    def first_forward(self) -> None:
        """Runs one token through every hosted stage."""
        for model in self._models.values():
            _first_forward(model)

    def warm_up(self) -> None:
        """Runs hosted stages in several sizes, but for those that whoever supplied them has warmed."""
        for stage, model in self._models.items():
            if stage not in self._supplied:
                warm_up(model)

    def _input(self, ids: Sequence[int], activation: Activation | None) -> torch.Tensor:
        if activation is None:
            return torch.tensor(ids, dtype=torch.int64, device=self._device)
        # frombuffer takes the bytes where they lie (in the producer's ring): no copy on the CPU.
        x = torch.frombuffer(activation.data, dtype=_DTYPES[activation.dtype]).view(activation.shape)
        return x.to(self._device)

    def _output(self, x: torch.Tensor) -> Activation:
        host = x.detach().cpu().contiguous()
        flat = host.view(torch.uint8).numpy().reshape(-1)
        return Activation(self._dtype_name, tuple(host.shape), flat.data)


def _first_forward(model: LoadedStage) -> None:
    """One token through a stage, so that `forward` is told of something that happened."""
    model.open(_SINGLE_SLOT, 1)
    try:
        model.forward(sample_input(model, 1), [Row(_SINGLE_SLOT, 0, 1)], [0])
    finally:
        model.close(_SINGLE_SLOT)
    synchronize(model)
