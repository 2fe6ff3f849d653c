"""What a single-pass stage looks like: a batch of items in, an item each out, no state in between.

Encoders and vision models are single-pass. Between a family's module, which implements it, and the
worker (`worker.torch_single`), which turns bytes into tensors and back. Items of a batch may differ in
size; how they are put together is the stage's own business, and an item's result must not depend on
its company beyond rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from keystage.models.base import AnyStage, Family, LoadedStage, StageError

if TYPE_CHECKING:
    import torch


@runtime_checkable
class SinglePassStage(AnyStage, Protocol):
    """One stage on one device. Not safe for several threads."""

    @property
    def input_name(self) -> str:
        """What its items are called in a safetensors body: `ids`, `image`, `hidden`."""

    @property
    def output_name(self) -> str:
        """The same of its results: `hidden`, `embedding`, `tokens`, `logits`."""

    @property
    def most_items(self) -> int:
        """Items that are worth running at once; more of them wait better than they run."""

    def forward(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Runs one batch.

        Args:
            inputs: one tensor an item, on any device; the first stage's types are its family's, later
                stages take activations in the stage's type.

        Returns:
            One tensor an item, in the same order, on the stage's device; float32 from the last stage.

        Raises:
            StageError: an item has a wrong type or shape; names both.
        """

    def samples(self, items: int, tokens: int = 0) -> list[torch.Tensor]:
        """So many inputs of the right kind, the same at each call, for warming up and timing.

        Args:
            items: how many.
            tokens: of each, where items have tokens, as far as the model takes so many; 0: its own choice.
        """


@runtime_checkable
class SinglePassFamily(Family, Protocol):
    """A family whose pipelines are single-pass."""

    def activation_elements(self, config: Mapping[str, Any], end_layer: int) -> int:
        """Elements of the largest item that a stage ending before this layer hands on.

        Raises:
            SplitError: see `Family.shape`.
        """


def looping_stage(stage: AnyStage) -> LoadedStage:
    """The stage as a looping one.

    Raises:
        StageError: it is single-pass.
    """
    if isinstance(stage, SinglePassStage):
        raise StageError("the stage is single-pass and keeps no sessions")
    assert isinstance(stage, _Looping)
    return stage


def single_pass_stage(stage: AnyStage) -> SinglePassStage:
    """The stage as a single-pass one.

    Raises:
        StageError: it is looping.
    """
    if not isinstance(stage, SinglePassStage):
        raise StageError("the stage is looping, not single-pass")
    return stage


@runtime_checkable
class _Looping(LoadedStage, Protocol):
    """`LoadedStage`, to be asked for at run time."""
