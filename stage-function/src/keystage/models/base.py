"""What a model family must offer, and what a stage looks like to the worker that runs it.

A family joins by implementing `Family` in a module of its own and being listed in
`models.families`. `bundle.split` asks it which tensors make a stage, `models.loading` asks it for
the running stage. Nothing here knows a particular architecture, and nothing imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, runtime_checkable

from keystage.bundle.dtypes import full_name

if TYPE_CHECKING:
    import torch


Execution: TypeAlias = Literal["looping", "single-pass", "program"]
"""Whether outputs of the last stage come back to the first, token by token; in a program its graph says."""


class StageError(Exception):
    """A stage was asked for something its state does not allow; the message names the bound."""

    http_status = 500


@dataclass(frozen=True, slots=True)
class Row:
    """One session's tokens in a forward pass: positions [start, start + count).

    Attributes:
        slot: the session's slot.
        start: position of the first token; 0 resets the slot, else it must equal its length.
        count: tokens, at least 1 (1 for decode, a chunk for prefill).
    """

    slot: int
    start: int
    count: int


class StageModel(Protocol):
    """One stage on one device, with the KV state of its sessions. Not safe for several threads."""

    def open(self, slot: int, capacity: int) -> None:
        """Reserves KV state for a session of `capacity` tokens; an open slot is replaced.

        Raises:
            StageError: capacity below 1 or beyond the context length.
        """

    def close(self, slot: int) -> None:
        """Frees a slot's KV state; an unknown slot is ignored."""

    def forward(self, x: torch.Tensor, rows: Sequence[Row], want: Sequence[int]) -> torch.Tensor:
        """Runs the rows' tokens through the stage and extends their KV state.

        Args:
            x: first stage: int64 token ids [T]; else activations [T, hidden] in the stage's dtype.
                T is the sum of the rows' counts, rows one after another. Any device.
            rows: at most one per slot; prefill and decode may mix.
            want: indices into `rows` whose last token needs logits; only the last stage looks.

        Returns:
            Activations [T, hidden] in the stage's dtype, or, from the last stage, logits float32
            [len(want), vocab], on the stage's device.

        Raises:
            StageError: unknown slot, a start that is not the slot's length, a full slot, wrong shape.
        """


@runtime_checkable
class HearingStage(Protocol):
    """A first stage that makes the positions of its prefix from an input of their own."""

    def take_input(self, slot: int, data: bytes) -> None:
        """Gives an open slot its input; without one the prefix is made of silence.

        Raises:
            StageError: not what the stage takes.
        """


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model that do not depend on its family.

    Attributes:
        layers: number of layers.
        hidden_size: width of the activation.
        vocab_size: number of token ids.
        context_length: token positions, with those of `prefix`.
        prefix: positions at the front of every session that hold no tokens (frames of audio): a
            session's first row carries them all, and what follows them.
    """

    layers: int
    hidden_size: int
    vocab_size: int
    context_length: int
    prefix: int = 0


@dataclass(frozen=True, slots=True)
class StageTensor:
    """One parameter of a stage.

    Attributes:
        name: name in the stage's file.
        source: name in the unsplit model (differs where a tied matrix is held twice).
        shape: elements per axis, as the stage holds it.
        is_transposed: whether the unsplit model stores the matrix with its two axes the other way
            round; it is turned when the stage's file is written.
    """

    name: str
    source: str
    shape: tuple[int, ...]
    is_transposed: bool = False

    @property
    def source_shape(self) -> tuple[int, ...]:
        """Elements per axis in the unsplit model."""
        return self.shape[::-1] if self.is_transposed else self.shape


@dataclass(frozen=True, slots=True)
class StageRole:
    """Which part of the model a stage is.

    Attributes:
        first_layer: index of its first layer.
        end_layer: one past its last layer.
        is_first: it holds the embedding and takes token ids.
        is_last: it holds the final norm and the head and gives logits.
    """

    first_layer: int
    end_layer: int
    is_first: bool
    is_last: bool


class AnyStage(Protocol):
    """What a stage with parameters can say of itself, however it is executed."""

    @property
    def role(self) -> StageRole:
        """Which part of the model it is."""

    @property
    def shape(self) -> ModelShape:
        """Sizes of the whole model."""

    @property
    def device(self) -> torch.device:
        """Where it runs."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of parameters, activations and KV state."""


class LoadedStage(AnyStage, StageModel, Protocol):
    """A looping stage with parameters (an emulated stage need not say what it is)."""

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of KV state that one token position takes in this stage."""


class Family(Protocol):
    """A model family: how its layers are named, cut into stages, checked and run."""

    @property
    def name(self) -> str:
        """Name in `pipeline.json`."""

    @property
    def architectures(self) -> tuple[str, ...]:
        """Class names in config.json that it serves."""

    @property
    def execution(self) -> Execution:
        """How its pipelines run; written into `pipeline.json`."""

    def shape(self, config: Mapping[str, Any]) -> ModelShape:
        """Checks a config.json and gives the model's sizes.

        Raises:
            SplitError: a field is missing, impossible, or asks for what is not implemented.
        """

    def stage_tensors(self, config: Mapping[str, Any], role: StageRole) -> list[StageTensor]:
        """The parameters of a stage, in file order.

        Raises:
            SplitError: the config cannot be served.
        """

    def end_parameters(self, config: Mapping[str, Any]) -> tuple[int, int]:
        """Parameters of the embedding, and of the final norm and head (a tied head included)."""

    def is_derived(self, config: Mapping[str, Any], name: str) -> bool:
        """Whether a stored parameter may be left out, since it follows from others."""

    def build(
        self,
        config: Mapping[str, Any],
        role: StageRole,
        tensors: Mapping[str, torch.Tensor],
        device: torch.device,
        dtype: torch.dtype,
        share: Callable[[torch.Tensor], None] | None = None,
    ) -> AnyStage:
        """Makes the running stage from its parameters.

        Args:
            config: as in the bundle.
            role: which part of the model.
            tensors: parameters by name; used in place where type and device are right already.
            device: where to run.
            dtype: type of parameters, activations and KV state.
            share: see `loading.build_stage`.

        Raises:
            BundleError: a parameter is missing or has another shape.
        """


def torch_dtype(name: str) -> torch.dtype:
    """The torch type named `fp32` or `float32` (and so on).

    Raises:
        SplitError: unknown name.
    """
    import torch

    dtype = getattr(torch, full_name(name))
    assert isinstance(dtype, torch.dtype)
    return dtype
