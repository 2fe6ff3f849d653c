"""The port between the engine loop and what computes: a torch model, or an emulated device.

The engine moves bytes and never imports torch, so that emulated workers start in a fraction of
the time. An `Activation` is a row-major [rows, ...] block of bytes with its type and shape.
"""

from __future__ import annotations

import dataclasses
import os
import resource
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, runtime_checkable

from keystage.models.blocks import BLOCK_TOKENS, BlockPool
from keystage.wire.api import StepRows

if TYPE_CHECKING:
    from keystage.worker.device_lane import DeviceLane

Handoff: TypeAlias = Literal["auto", "pinned", "pageable"]
"""Best way between devices that is allowed; see `device_lane`."""

EMULATED_KV_BLOCKS = 1 << 20
"""Blocks of an emulated device unless told otherwise: more than any test or benchmark fills."""


class StageError(Exception):
    """Compute failed for a whole wave or batch; the message names the cause.

    Attributes:
        retryable: whether another try may succeed (for example after an out-of-memory).
    """

    def __init__(self, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.retryable = retryable


@dataclasses.dataclass(frozen=True, slots=True)
class Activation:
    """Bytes of a tensor.

    Attributes:
        dtype: element type name.
        shape: elements per axis; axis 0 runs over tokens (looping) or is the item's own.
        data: the bytes, C order, format `B`.
    """

    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    @property
    def nbytes(self) -> int:
        """How many bytes."""
        return self.data.nbytes


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceActivation:
    """A tensor in a device's memory; what makes it may still run, what reads it is queued behind that.

    Attributes:
        dtype: element type name.
        shape: elements per axis, as for `Activation`.
        nbytes: bytes, C order.
        address: of the first, as the device's driver has it.
        keep: whatever owns the memory.
    """

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    address: int
    keep: object


AnyActivation: TypeAlias = Activation | DeviceActivation
"""Only executors that were given a `device_lane.DeviceLane` make and take those on a device."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepOutput:
    """Result of a wave: an activation for the next stage, or after the last stage its tokens.

    Attributes:
        activation: output of a stage that is not the last, shape [sum(counts), hidden].
        tokens: sampled token per row, -1 where the row does not sample.
    """

    activation: AnyActivation | None
    tokens: list[int]


@runtime_checkable
class BatchBound(Protocol):
    """An executor that knows beyond which size a batch saves nothing."""

    @property
    def most_items(self) -> int:
        """Items of such a batch."""


class Executor(Protocol):
    """Computes the stages a worker hosts."""

    @property
    def kv_blocks(self) -> tuple[int, int]:
        """(free, all) KV blocks of `models.blocks.BLOCK_TOKENS` positions, each for all hosted stages."""

    def open(self, session: int, tokens: int) -> None:
        """Makes (or resets) the state of a session that never holds more than `tokens` positions.

        It holds no blocks yet: `reserve` comes before every step that needs more.
        """

    def reserve(self, session: int, tokens: int) -> bool:
        """Gives an open session the blocks for the positions [0, tokens).

        Returns:
            False when too few blocks are free; then nothing has changed. True at once when it has them.
        """

    def close(self, session: int) -> None:
        """Frees the state and the blocks of a session; unknown ones are ignored."""

    def step(
        self, first: int, last: int, ids: Sequence[int], activation: AnyActivation | None, rows: StepRows
    ) -> StepOutput:
        """Runs stages first..last (all hosted here) on one wave.

        Args:
            first: first stage index.
            last: last stage index.
            ids: token ids when first is 0, else empty.
            activation: input when first is not 0.
            rows: the wave.

        Raises:
            StageError: the wave failed.
        """

    def batch(self, first: int, last: int, inputs: Sequence[Activation]) -> list[Activation]:
        """Runs stages first..last (all hosted here) on one single-pass batch, one output per input.

        Raises:
            StageError: the batch failed.
        """

    def single(self, body: bytes) -> bytes:
        """Runs the hosted stages alone on one safetensors body (`POST /` of a stage).

        Raises:
            StageError: the body does not fit the stage.
        """

    def set_threads(self, threads: int) -> None:
        """Computes with so many CPU threads from now on; called between waves, by the engine's thread."""

    def first_forward(self) -> None:
        """Computes something for the first time: the end of a start as its timeline counts it."""

    def warm_up(self) -> None:
        """Runs once, so that the first request does not pay for lazy initialisation."""


@runtime_checkable
class CopiesState(Protocol):
    """An executor that can hand a session's KV state to another one of the same kind."""

    def copy_out(self, session: int, stage: int) -> AnyActivation | None:
        """The KV state of a session in one stage; None when it cannot be had. The bytes are the caller's."""

    def copy_in(self, session: int, stage: int, tokens: int, state: AnyActivation) -> bool:
        """Opens a session with room for `tokens` positions and the given state in one stage.

        Returns:
            False when it does not fit here, or no blocks are free; then nothing is open.
        """

    def rewind(self, session: int, positions: int) -> bool:
        """Forgets what a session has from `positions` on, in all stages; False when that cannot be done."""


@runtime_checkable
class HasLane(Protocol):
    """An executor whose tensors may stay on its device between workers."""

    def open_lane(self, nbytes: int, handoff: Handoff) -> DeviceLane | None:
        """Makes the lane by which they go; from then on outputs lie on the device. None: there is none.

        Args:
            nbytes: device memory for tensors on their way.
            handoff: best way that is allowed.
        """


@runtime_checkable
class TakesInput(Protocol):
    """An executor whose first stage works on more than token ids (sound)."""

    def take_input(self, session: int, data: bytes) -> None:
        """Gives an open session its input; on failure the session is closed.

        Raises:
            StageError: the stage takes none, or not that.
        """


@dataclasses.dataclass(frozen=True, slots=True)
class EmulatedDevice:
    """Service time of an emulated device: alpha_s * b + beta_s for b rows.

    Attributes:
        alpha_s: seconds per row.
        beta_s: seconds per batch.
        load_s: seconds a start takes (loading parameters).
        poison: first token of a prompt, or first byte of an item, that ends the process (SIGABRT) which
            computes it: a request as one fears it, for tests. -1: none does.
    """

    alpha_s: float = 0.0
    beta_s: float = 0.0
    load_s: float = 0.0
    poison: int = -1


def parse_emulated(spec: str) -> EmulatedDevice:
    """Reads `emulated`, `emulated:alpha=0.001,beta=0.004,load=0.2` (seconds), `emulated:poison=666`.

    Raises:
        ValueError: names the unknown key or the value that is no non-negative number.
    """
    values = {"alpha": 0.0, "beta": 0.0, "load": 0.0, "poison": -1.0}
    _, _, rest = spec.partition(":")
    for part in filter(None, rest.split(",")):
        key, _, text = part.partition("=")
        if key not in values:
            raise ValueError(f"device {spec!r}: unknown key {key!r}, known are {', '.join(values)}")
        try:
            values[key] = float(text)
        except ValueError:
            raise ValueError(f"device {spec!r}: {key}={text!r} is not a number of seconds") from None
        if key == "poison":
            if not (values[key] >= 0 and values[key].is_integer()):
                raise ValueError(f"device {spec!r}: poison={text} must be a token id or a byte")
        elif not 0 <= values[key] < 3600:
            raise ValueError(f"device {spec!r}: {key}={text} must be in [0, 3600) seconds")
    return EmulatedDevice(values["alpha"], values["beta"], values["load"], int(values["poison"]))


def emulated_token(session: int, position: int, vocab_size: int) -> int:
    """The token an emulated model "samples": a hash of (session, position), splitmix64."""
    x = (session * 0x9E3779B97F4A7C15 + position + 1) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (x ^ (x >> 31)) % vocab_size


class EmulatedExecutor:
    """Sleeps for the device time and moves real bytes; everything around it is real.

    Args:
        device: service time.
        stages: number of stages of the pipeline.
        activation_bytes: bytes per row of every stage's output.
        vocab_size: number of token ids.
        kv_blocks: KV blocks it accounts for.
    """

    def __init__(
        self,
        device: EmulatedDevice,
        stages: int,
        activation_bytes: int,
        vocab_size: int,
        kv_blocks: int = EMULATED_KV_BLOCKS,
    ) -> None:
        self._device = device
        self._stages = stages
        self._activation_bytes = activation_bytes
        self._vocab_size = vocab_size
        self._buffer = memoryview(bytearray(activation_bytes))
        self._pool = BlockPool(kv_blocks)

    @property
    def kv_blocks(self) -> tuple[int, int]:
        """See `Executor.kv_blocks`."""
        return self._pool.free_blocks, self._pool.total

    def open(self, session: int, tokens: int) -> None:
        """Keeps no state but the blocks."""
        self._pool.free(session)

    def take_input(self, session: int, data: bytes) -> None:
        """Has no use for it."""

    def reserve(self, session: int, tokens: int) -> bool:
        """Counts the blocks."""
        return self._pool.reserve(session, tokens) is not None

    def copy_out(self, session: int, stage: int) -> Activation | None:
        """A byte for each block."""
        blocks = len(self._pool.table(session))
        return Activation("uint8", (blocks,), memoryview(bytes(blocks))) if blocks else None

    def copy_in(self, session: int, stage: int, tokens: int, state: AnyActivation) -> bool:
        """Counts as many blocks."""
        self._pool.free(session)
        return self._pool.reserve(session, BLOCK_TOKENS * state.shape[0]) is not None

    def rewind(self, session: int, positions: int) -> bool:
        """Has nothing that reaches anywhere."""
        return True

    def close(self, session: int) -> None:
        """Frees the blocks."""
        self._pool.free(session)

    def set_threads(self, threads: int) -> None:
        """Has no threads: it sleeps."""

    def step(
        self, first: int, last: int, ids: Sequence[int], activation: AnyActivation | None, rows: StepRows
    ) -> StepOutput:
        """Sleeps once per stage; tokens come from `emulated_token`."""
        if self._device.poison >= 0 and first == 0:
            self._check_prompts(ids, rows)
        self._sleep(len(rows.sessions) * 1.0, stages=last - first + 1)
        if last == self._stages - 1:
            tokens = [
                emulated_token(session, position + count, self._vocab_size) if sample else -1
                for session, position, count, sample in zip(
                    rows.sessions, rows.positions, rows.counts, rows.sample, strict=True
                )
            ]
            return StepOutput(None, tokens)
        nbytes = sum(rows.counts) * self._activation_bytes
        if self._buffer.nbytes < nbytes:
            self._buffer = memoryview(bytearray(nbytes))
        shape = (sum(rows.counts), self._activation_bytes)
        return StepOutput(Activation("uint8", shape, self._buffer[:nbytes]), [])

    def _check_prompts(self, ids: Sequence[int], rows: StepRows) -> None:
        begin = 0
        for position, count in zip(rows.positions, rows.counts, strict=True):
            if position == 0 and ids[begin] == self._device.poison:
                _die()
            begin += count

    def batch(self, first: int, last: int, inputs: Sequence[Activation]) -> list[Activation]:
        """Sleeps once per stage, then hands every input on unchanged."""
        if any(item.data[:1] == bytes([self._device.poison]) for item in inputs if self._device.poison >= 0):
            _die()
        self._sleep(float(len(inputs)), stages=last - first + 1)
        return [Activation(item.dtype, item.shape, memoryview(bytes(item.data))) for item in inputs]

    def single(self, body: bytes) -> bytes:
        """Sleeps as for one row and returns the body."""
        self._sleep(1.0, stages=1)
        return body

    def first_forward(self) -> None:
        """Has nothing to compute."""

    def warm_up(self) -> None:
        """Sleeps for the start-up time."""
        if self._device.load_s:
            time.sleep(self._device.load_s)

    def _sleep(self, rows: float, stages: int) -> None:
        seconds = (self._device.alpha_s * rows + self._device.beta_s) * stages
        if seconds > 0:
            time.sleep(seconds)


def _die() -> None:
    """Ends the process as a fault of its own does, without a core file."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.abort()
