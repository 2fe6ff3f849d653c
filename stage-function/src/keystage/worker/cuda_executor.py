"""Runs the decoder stages of a worker on a GPU as one span: see `models.cuda_span`.

Chosen by `app` where the device is a GPU, the family a decoder and Triton is there; `torch_executor` serves
everything else, and loads the stages here too. Stages that do not follow each other (0 and 2 of one
worker) make a span each. A wave whose rows all decode is one launch, and its tokens are the only thing
that the host waits for.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from keystage.bundle.api import Pipeline
from keystage.models.base import Row
from keystage.models.base import StageError as ModelStageError
from keystage.models.blocks import BLOCK_TOKENS
from keystage.models.cuda_graph import DecodeGraph, Enter
from keystage.models.cuda_span import CudaSpan
from keystage.models.decoder import DecoderStage
from keystage.models.loading import synchronize, warm_up
from keystage.wire.api import StepRows
from keystage.worker.cuda_lane import open_lane
from keystage.worker.device_health import room
from keystage.worker.device_lane import DeviceLane, LaneError
from keystage.worker.device_sampling import draw
from keystage.worker.executor import AnyActivation, DeviceActivation, Handoff, StageError, StepOutput
from keystage.worker.sampling import SamplingError, check_logits, uniform
from keystage.worker.supply import Supply
from keystage.worker.torch_executor import TorchExecutor, rows_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Placed:
    """A span and which stages of the pipeline it is."""

    first: int
    last: int
    span: CudaSpan


class CudaExecutor(TorchExecutor):
    """Stages on a GPU.

    Args:
        bundle: see `TorchExecutor`.
        pipeline: see there.
        stages: see there.
        device: see there.
        dtype: see there.
        threads: see there.
        supply: see there; a stage that comes as a span keeps its own KV state and graphs.
        kv_bytes: bytes of KV state over all hosted stages.
        slots: sessions at most: the largest batch that is captured.

    Raises:
        StageError: the KV state does not fit the device.
    """

    def __init__(
        self,
        bundle: Path,
        pipeline: Pipeline,
        stages: Sequence[int],
        device: str,
        dtype: str,
        threads: int,
        supply: Supply | None,
        kv_bytes: int,
        slots: int,
    ) -> None:
        super().__init__(bundle, pipeline, stages, device, dtype, threads, supply, kv_bytes)
        self._slots = slots
        self._lane: DeviceLane | None = None
        if self._device.type == "cuda" and not self._supplied:
            free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
            if kv_bytes > free_bytes:
                raise StageError(
                    f"KEYSTAGE_KV_BYTES: {kv_bytes} bytes of KV state do not fit the {free_bytes} of "
                    f"{total_bytes} bytes that {device} has free"
                )
        blocks = kv_bytes // (BLOCK_TOKENS * max(1, self.kv_token_bytes))
        self._spans: list[_Placed] = []
        run: list[int] = []
        for stage in [*sorted(stages), -1]:
            model = self._models.get(stage)
            if run and not (isinstance(model, DecoderStage) and stage == run[-1] + 1):
                self._spans.append(_Placed(run[0], run[-1], CudaSpan(self._decoders(run), blocks)))
                run = []
            if isinstance(model, CudaSpan):
                self._spans.append(_Placed(stage, stage, model))
            elif isinstance(model, DecoderStage):
                run.append(stage)

    def _decoders(self, stages: Sequence[int]) -> list[DecoderStage]:
        found = [self._models[stage] for stage in stages]
        return [model for model in found if isinstance(model, DecoderStage)]

    # ------------------------------------------------------------ sessions

    @property
    def kv_blocks(self) -> tuple[int, int]:
        """See `Executor.kv_blocks`; of the span that has least."""
        pools = [placed.span.pool.free_and_total for placed in self._spans]
        return min(free for free, _ in pools), min(total for _, total in pools)

    def open(self, session: int, tokens: int) -> None:
        """See `Executor.open`."""
        try:
            for placed in self._spans:
                placed.span.open(session, tokens)
        except ModelStageError as error:
            self.close(session)
            raise StageError(str(error)) from error

    def reserve(self, session: int, tokens: int) -> bool:
        """See `Executor.reserve`; a span that reserved before another refused keeps what it has."""
        return all(placed.span.reserve(session, tokens) for placed in self._spans)

    def close(self, session: int) -> None:
        """See `Executor.close`."""
        for placed in self._spans:
            placed.span.close(session)

    @torch.inference_mode()
    def copy_out(self, session: int, stage: int) -> AnyActivation | None:
        """See `CopiesState.copy_out`: the session's blocks, gathered, in the form of a CPU's state."""
        placed = self._of_stage(stage)
        try:
            state = placed.span.read(session, stage - placed.first) if placed is not None else None
        except torch.OutOfMemoryError as error:
            log.warning("no memory to copy the KV state of session %d out: %s", session, error)
            return None
        return self._output(state) if state is not None else None

    @torch.inference_mode()
    def copy_in(self, session: int, stage: int, tokens: int, state: AnyActivation) -> bool:
        """See `CopiesState.copy_in`."""
        placed = self._of_stage(stage)
        if placed is None or len(state.shape) != 4 or state.shape[2] > tokens:
            return False
        try:
            self.open(session, tokens)
        except StageError:
            return False
        is_in = self.reserve(session, state.shape[2])
        try:
            is_in = is_in and placed.span.write(session, stage - placed.first, self._input([], state))
        except (torch.OutOfMemoryError, LaneError) as error:
            log.warning("no KV state of session %d copied in, %d bytes: %s", session, state.nbytes, error)
            is_in = False
        if not is_in:
            self.close(session)
        return is_in

    def rewind(self, session: int, positions: int) -> bool:
        """See `CopiesState.rewind`."""
        return all(placed.span.pool.rewind(session, positions) for placed in self._spans)

    def _of_stage(self, stage: int) -> _Placed | None:
        return next((placed for placed in self._spans if placed.first <= stage <= placed.last), None)

    # ------------------------------------------------------------ tensors that stay on the device

    def open_lane(self, nbytes: int, handoff: Handoff) -> DeviceLane | None:
        """See `HasLane.open_lane`."""
        self._lane = open_lane(self._device, nbytes, handoff)
        return self._lane

    def _input(self, ids: Sequence[int], activation: AnyActivation | None) -> torch.Tensor:
        if isinstance(activation, DeviceActivation):
            x = torch.empty(activation.shape, dtype=_dtype_of(activation), device=self._device)
            self._entering(activation)(x)
            return x
        return super()._input(ids, activation)

    def _output(self, x: torch.Tensor) -> AnyActivation:
        if self._lane is None:
            return super()._output(x)
        x = x.detach().contiguous()
        return DeviceActivation(self._dtype_name, tuple(x.shape), x.nbytes, x.data_ptr(), x)

    def _entering(self, activation: AnyActivation) -> Enter:
        """What brings an activation into a tensor of the device, as soon as the device gets there."""
        lane = self._lane
        if isinstance(activation, DeviceActivation):
            assert lane is not None
            return lambda target: lane.enter(activation, target.data_ptr())
        host = torch.frombuffer(activation.data, dtype=_dtype_of(activation)).view(activation.shape)

        def enter(target: torch.Tensor) -> None:
            target.copy_(host, non_blocking=True)

        return enter

    # ------------------------------------------------------------ steps

    def step(
        self, first: int, last: int, ids: Sequence[int], activation: AnyActivation | None, rows: StepRows
    ) -> StepOutput:
        """See `Executor.step`.

        Raises:
            StageError: see there; names stages, rows, tokens and the device's memory.
            DeviceLostError: no wave can be computed on the device any more.
        """
        try:
            return self._step(first, last, ids, activation, rows)
        except (StageError, torch.OutOfMemoryError) as error:
            is_retryable = error.retryable if isinstance(error, StageError) else True
            raise self._explained(first, last, rows, error, is_retryable) from error
        except (SamplingError, ModelStageError, LaneError, RuntimeError, IndexError, ValueError) as error:
            raise self._explained(first, last, rows, error, isinstance(error, LaneError)) from error

    def _step(
        self, first: int, last: int, ids: Sequence[int], activation: AnyActivation | None, rows: StepRows
    ) -> StepOutput:
        model_rows = rows_of(rows)
        placed = next((p for p in self._spans if p.first <= first and last <= p.last), None)
        if placed is None:
            return super().step(first, last, ids, activation, rows)
        graph = placed.span.graph_for(model_rows, first - placed.first, last - placed.first)
        if graph is None:
            return super().step(first, last, ids, activation, rows)
        x, shape = (
            (ids, (len(ids),)) if activation is None else (self._entering(activation), activation.shape)
        )
        placed.span.start(graph, x, shape, model_rows, first - placed.first)
        if last == self._last_stage:
            return StepOutput(None, _picked(graph, rows))
        assert graph.hidden is not None
        return StepOutput(self._output(graph.hidden[: len(model_rows)]), [])

    def _explained(
        self, first: int, last: int, rows: StepRows, error: Exception, is_retryable: bool
    ) -> StageError:
        """What failed, of what size, and how full the device was; or that the device is lost."""
        wave = (
            f"stages {first}..{last} on {self._device}, wave of {len(rows.sessions)} rows and "
            f"{sum(rows.counts)} tokens, positions up to {max(rows.positions, default=0)}"
        )
        if isinstance(error, torch.OutOfMemoryError):
            wave = f"out of device memory in {wave}"
        left = room(self._device, wave, error)
        where = f"{wave}, {left}" if left else wave
        return StageError(f"{where}: {type(error).__name__}: {error}", retryable=is_retryable)

    def _through(
        self, first: int, last: int, x: torch.Tensor, rows: Sequence[Row], want: Sequence[int]
    ) -> torch.Tensor:
        """See `TorchExecutor._through`: span after span."""
        for placed in self._spans:
            begin, end = max(first, placed.first), min(last, placed.last)
            if begin <= end:
                x = placed.span.forward(x, rows, want, begin - placed.first, end - placed.first)
        return x

    # ------------------------------------------------------------ start

    def first_forward(self) -> None:
        """Runs one token through every span."""
        for placed in self._spans:
            span = placed.span
            span.open(-1, 1)
            try:
                x = torch.zeros(1, dtype=torch.int64)
                if not span.role.is_first:
                    x = torch.zeros(1, span.shape.hidden_size, dtype=span.dtype)
                span.forward(x, [Row(-1, 0, 1)], [0])
            finally:
                span.close(-1)
            synchronize(span)

    def warm_up(self) -> None:
        """Captures graphs and runs prompts of a few sizes, but not where a start must be quick.

        A stage that came from memory was warm there, or records its graphs as it meets waves.
        """
        for placed in self._spans:
            if placed.first in self._supplied:
                continue
            try:
                placed.span.capture(most_rows=self._slots)
                warm_up(placed.span)
            except torch.OutOfMemoryError as error:
                raise StageError(
                    f"no memory for the graphs of stages {placed.first}..{placed.last} beside their KV "
                    f"state: {error}"
                ) from error


def _dtype_of(activation: AnyActivation) -> torch.dtype:
    dtype = getattr(torch, activation.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _picked(graph: DecodeGraph, rows: StepRows) -> list[int]:
    """The next token of every row that wants one, -1 for the others.

    Raises:
        SamplingError: logits without a finite maximum.
    """
    count = len(rows.sessions)
    warm = [i for i in range(count) if rows.sample[i] and rows.temperatures[i] > 0]
    drawn: torch.Tensor | None = None
    if warm:
        assert graph.logits is not None
        numbers = [uniform(rows.seeds[i], rows.positions[i] + rows.counts[i]) for i in warm]
        drawn = draw(
            graph.logits[warm] if len(warm) < count else graph.logits[:count],
            [rows.temperatures[i] for i in warm],
            [rows.top_ps[i] for i in warm],
            numbers,
        )
    likeliest, peaks = graph.greedy(count)
    check_logits(np.flatnonzero(~np.isfinite(peaks)).tolist())
    tokens: list[int] = [
        token if sampled else -1 for token, sampled in zip(likeliest.tolist(), rows.sample, strict=True)
    ]
    if drawn is not None:
        for i, token in zip(warm, drawn.tolist(), strict=True):
            tokens[i] = token
    return tokens
