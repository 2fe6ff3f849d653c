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
from keystage.models.base import HearingStage, LoadedStage, Row
from keystage.models.base import StageError as ModelStageError
from keystage.models.blocks import BLOCK_TOKENS, BlockPool, blocks_for
from keystage.models.decoder import DecoderStage
from keystage.models.loading import load_stage, rehearse, synchronize, warm_up
from keystage.models.single_pass import looping_stage
from keystage.wire.api import StepRows
from keystage.worker.executor import Activation, AnyActivation, StageError, StepOutput
from keystage.worker.sampling import SamplingError, sample
from keystage.worker.supply import Supply

DEFAULT_KV_BYTES = 512 * 1024 * 1024
"""As `worker.config.WorkerConfig.kv_bytes`."""
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


def use_device(device: torch.device) -> None:
    """Makes a GPU this thread's: kernels, streams and events that name none go to the current one."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


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
        kv_bytes: bytes of KV state over all hosted stages.
        deterministic: every position is computed alone: what a session gets hangs, to the last bit, on
            nothing that is computed beside it, nor on how its own tokens are cut into waves.
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
        kv_bytes: int = DEFAULT_KV_BYTES,
        *,
        deterministic: bool = False,
    ) -> None:
        if threads:
            torch.set_num_threads(threads)
        use_device(torch.device(device))
        self._pipeline = pipeline
        self._is_deterministic = deterministic
        self._last_stage = len(pipeline.stages) - 1
        self._device = torch.device(device)
        self._dtype_name = dtype
        self._models: dict[int, LoadedStage] = {}
        self._supplied: set[int] = set()
        for stage in stages:
            found = supply.stage(pipeline, stage, device, dtype) if supply is not None else None
            if found is None:
                try:
                    self._models[stage] = load_stage(bundle, pipeline, stage, device, _DTYPES[dtype])
                except torch.OutOfMemoryError as error:
                    raise StageError(
                        f"stage {stage} of {pipeline.name} does not fit {device}: {error}"
                    ) from error
            else:
                self._models[stage] = looping_stage(found)
                self._supplied.add(stage)
        if supply is not None and self._device.type != "cpu":
            supply.release()  # the device has its own copy
        # Buffers are contiguous and paged in as they are written: the blocks say how far that may go.
        self._pool = BlockPool(kv_bytes // (BLOCK_TOKENS * max(1, self.kv_token_bytes)))

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of KV state per token position, over all hosted stages."""
        return sum(model.kv_token_bytes for model in self._models.values())

    @property
    def kv_blocks(self) -> tuple[int, int]:
        """See `Executor.kv_blocks`."""
        return self._pool.free_blocks, self._pool.total

    def open(self, session: int, tokens: int) -> None:
        """Allocates address space for KV state in every hosted stage; memory follows as it is written."""
        self._pool.free(session)
        try:
            for model in self._models.values():
                model.open(session, tokens)
        except torch.OutOfMemoryError as error:
            self.close(session)
            raise StageError(f"no memory for {tokens} KV positions: {error}", retryable=True) from error

    def take_input(self, session: int, data: bytes) -> None:
        """Gives a session's input to the first stage of the pipeline; see `TakesInput.take_input`."""
        model = self._models[0]
        try:
            if not isinstance(model, HearingStage):
                raise ModelStageError(f"{self._pipeline.name} takes no input beside tokens")
            model.take_input(session, data)
        except ModelStageError as error:
            self.close(session)
            raise StageError(str(error)) from error

    def reserve(self, session: int, tokens: int) -> bool:
        """Takes blocks for positions below `tokens`; see `Executor.reserve`."""
        return self._pool.reserve(session, tokens) is not None

    @torch.inference_mode()
    def copy_out(self, session: int, stage: int) -> AnyActivation | None:
        """See `CopiesState.copy_out`; stages with state of other kinds are replayed."""
        model = self._models.get(stage)
        state = model.kv.read(session) if isinstance(model, DecoderStage) else None
        return self._output(state) if state is not None and state.numel() else None

    @torch.inference_mode()
    def copy_in(self, session: int, stage: int, tokens: int, state: AnyActivation) -> bool:
        """See `CopiesState.copy_in`."""
        model = self._models.get(stage)
        if not isinstance(model, DecoderStage) or len(state.shape) != 4 or state.shape[2] > tokens:
            return False
        try:
            self.open(session, tokens)
        except (ModelStageError, StageError):
            return False
        is_in = self.reserve(session, state.shape[2]) and model.kv.write(session, self._input([], state))
        if not is_in:
            self.close(session)
        return is_in

    def rewind(self, session: int, positions: int) -> bool:
        """See `CopiesState.rewind`."""
        return all(
            isinstance(model, DecoderStage) and model.kv.rewind(session, positions)
            for model in self._models.values()
        )

    def close(self, session: int) -> None:
        """Frees KV state and its blocks."""
        self._pool.free(session)
        for model in self._models.values():
            model.close(session)

    def set_threads(self, threads: int) -> None:
        """Intra-op threads of this thread's operators."""
        torch.set_num_threads(threads)

    def step(
        self, first: int, last: int, ids: Sequence[int], activation: AnyActivation | None, rows: StepRows
    ) -> StepOutput:
        """Runs one wave; see `Executor.step`."""
        model_rows = rows_of(rows)
        want = [i for i, sampled in enumerate(rows.sample) if sampled]
        try:
            x = self._run(first, last, self._input(ids, activation), model_rows, want)
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

    def batch(self, first: int, last: int, inputs: Sequence[Activation]) -> list[Activation]:
        """Looping stages do not run single-pass."""
        raise StageError(f"stages {first}..{last} of {self._pipeline.name} are looping, not single-pass")

    def single(self, body: bytes) -> bytes:
        """Takes `ids` (int64 [T]) or `hidden` ([T, hidden]); answers `hidden`, or `logits` [1, vocab].

        A stage that hears takes `input` (float32 samples) beside `ids`, which have its prefix in front.
        """
        stages = sorted(self._models)
        try:
            tensors = load_safetensors(body)
        except (SafetensorError, ValueError) as error:
            raise StageError(f"body is no safetensors: {error}") from error
        name = "ids" if stages[0] == 0 else "hidden"
        heard = tensors.pop("input", None) if name == "ids" else None
        if set(tensors) != {name}:
            raise StageError(f"stage {stages[0]} takes one tensor {name!r}, got {sorted(tensors)}")
        x = tensors[name].to(self._device)
        if x.ndim != (1 if name == "ids" else 2) or not 0 < x.shape[0] <= self._pipeline.context_length:
            raise StageError(
                f"{name} has shape {tuple(x.shape)}; axis 0 takes 1..{self._pipeline.context_length} tokens"
            )
        try:
            self.open(_SINGLE_SLOT, int(x.shape[0]))
            if not self.reserve(_SINGLE_SLOT, int(x.shape[0])):
                free, total = self.kv_blocks
                raise StageError(
                    f"{x.shape[0]} positions need {blocks_for(int(x.shape[0]))} KV blocks, "
                    f"{free} of {total} are free",
                    retryable=True,
                )
            if heard is not None:
                self.take_input(_SINGLE_SLOT, heard.float().numpy().tobytes())
            row = [Row(_SINGLE_SLOT, 0, int(x.shape[0]))]
            x = self._run(stages[0], stages[-1], x, row, [0])
        except (ModelStageError, RuntimeError, IndexError) as error:
            raise StageError(f"stages {stages[0]}..{stages[-1]} failed: {error}") from error
        finally:
            self.close(_SINGLE_SLOT)
        out = "logits" if stages[-1] == self._last_stage else "hidden"
        return bytes(save_safetensors({out: x.cpu().contiguous()}))

    def _run(
        self, first: int, last: int, x: torch.Tensor, rows: Sequence[Row], want: Sequence[int]
    ) -> torch.Tensor:
        """As `_through`, position after position where that is asked for.

        The row that opens a session with a prefix (frames of audio) stays whole: it is the same row in a
        replay, and the prefix is computed in one piece in any case.
        """
        if not self._is_deterministic or not rows:
            return self._through(first, last, x, rows, want)
        has_prefix = self._models[first].shape.prefix > 0
        found: list[torch.Tensor] = []
        at = 0
        for index, row in enumerate(rows):
            size = row.count if has_prefix and row.start == 0 else 1
            for start in range(row.start, row.start + row.count, size):
                is_newest = start + size == row.start + row.count
                wanted = [0] if is_newest and index in want else []
                piece = x[at : at + size]
                found.append(self._through(first, last, piece, [Row(row.slot, start, size)], wanted))
                at += size
        return torch.cat(found)

    def _through(
        self, first: int, last: int, x: torch.Tensor, rows: Sequence[Row], want: Sequence[int]
    ) -> torch.Tensor:
        """Stages first..last one after another; see `StageModel.forward`."""
        for stage in range(first, last + 1):
            x = self._models[stage].forward(x, rows, want)
        return x

    def first_forward(self) -> None:
        """Runs one token through every hosted stage."""
        for model in self._models.values():
            rehearse(model, _SINGLE_SLOT, 1)
            synchronize(model)

    def warm_up(self) -> None:
        """Runs hosted stages in several sizes, but for those that whoever supplied them has warmed."""
        for stage, model in self._models.items():
            if stage not in self._supplied:
                warm_up(model)

    def _input(self, ids: Sequence[int], activation: AnyActivation | None) -> torch.Tensor:
        if activation is None:
            return torch.tensor(ids, dtype=torch.int64, device=self._device)
        assert isinstance(activation, Activation), "no lane was opened here"
        # frombuffer takes the bytes where they lie (in the producer's ring): no copy on the CPU.
        x = torch.frombuffer(activation.data, dtype=_DTYPES[activation.dtype]).view(activation.shape)
        return x.to(self._device)

    def _output(self, x: torch.Tensor) -> AnyActivation:
        host = x.detach().cpu().contiguous()
        flat = host.view(torch.uint8).numpy().reshape(-1)
        return Activation(self._dtype_name, tuple(host.shape), flat.data)


def rows_of(rows: StepRows) -> list[Row]:
    """The rows of a wave as a model takes them; a session's number is its slot."""
    return [
        Row(session, start, count)
        for session, start, count in zip(rows.sessions, rows.positions, rows.counts, strict=True)
    ]
