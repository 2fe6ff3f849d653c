"""A family of decoders: what a family module must say, and everything that follows from it.

`models.llama`, `models.opt` and `models.gpt2` each make one of these from a function that reads
config.json; `models.families` lists them. It is the only place where names, parameters and the
running stage come together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from keystage.models import decoder_layout
from keystage.models.base import Execution, ModelShape, StageRole, StageTensor
from keystage.models.decoder import DecoderStage
from keystage.models.decoder_config import DecoderConfig
from keystage.models.decoder_layout import DecoderLayout
from keystage.models.decoder_parameters import gather
from keystage.models.shared import Keep


@dataclass(frozen=True, slots=True)
class DecoderFamily:
    """`keystage.models.base.Family` for decoders.

    Attributes:
        name: see `Family.name`.
        architectures: see `Family.architectures`.
        describe: reads a config.json; raises SplitError.
        derived: whether a stored parameter of this name holds nothing of its own.
        execution: see `Family.execution`.
    """

    name: str
    architectures: tuple[str, ...]
    describe: Callable[[Mapping[str, Any]], tuple[DecoderConfig, DecoderLayout]]
    derived: Callable[[str], bool]
    execution: Execution = "looping"

    def shape(self, config: Mapping[str, Any]) -> ModelShape:
        """See `Family.shape`."""
        found, _ = self.describe(config)
        return ModelShape(found.layers, found.hidden_size, found.vocab_size, found.context_length)

    def stage_tensors(self, config: Mapping[str, Any], role: StageRole) -> list[StageTensor]:
        """See `Family.stage_tensors`."""
        return decoder_layout.stage_tensors(*self.describe(config), role)

    def end_parameters(self, config: Mapping[str, Any]) -> tuple[int, int]:
        """See `Family.end_parameters`."""
        return decoder_layout.end_parameters(*self.describe(config))

    def is_derived(self, config: Mapping[str, Any], name: str) -> bool:
        """See `Family.is_derived`."""
        found, layout = self.describe(config)
        return self.derived(name) or (found.is_tied and name == f"{layout.head}.weight")

    def build(
        self,
        config: Mapping[str, Any],
        role: StageRole,
        tensors: Mapping[str, torch.Tensor],
        device: torch.device,
        dtype: torch.dtype,
        share: Keep | None = None,
    ) -> DecoderStage:
        """See `Family.build`."""
        found, layout = self.describe(config)
        parameters = gather(found, layout, role, tensors, device, dtype, share)
        return DecoderStage(found, role, parameters, device, dtype)
