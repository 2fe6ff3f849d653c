"""The Whisper family: how its models are named, cut and run. `models.families` lists it.

Layers are counted encoder first, then decoder, and a cut may lie between any two. The running stage
is `models.whisper_stage`; nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from keystage.models import whisper_config, whisper_layout
from keystage.models.base import Execution, ModelShape, StageRole, StageTensor

if TYPE_CHECKING:
    import torch

    from keystage.models.shared import Keep
    from keystage.models.whisper_stage import WhisperStage


class WhisperFamily:
    """`keystage.models.base.Family` for `WhisperForConditionalGeneration`."""

    name = "whisper"
    architectures = ("WhisperForConditionalGeneration",)
    execution: Execution = "looping"

    def shape(self, config: Mapping[str, Any]) -> ModelShape:
        """See `Family.shape`."""
        return whisper_config.shape_of(whisper_config.parse(config))

    def stage_tensors(self, config: Mapping[str, Any], role: StageRole) -> list[StageTensor]:
        """See `Family.stage_tensors`."""
        return whisper_layout.stage_tensors(whisper_config.parse(config), role)

    def end_parameters(self, config: Mapping[str, Any]) -> tuple[int, int]:
        """See `Family.end_parameters`."""
        return whisper_layout.end_parameters(whisper_config.parse(config))

    def is_derived(self, config: Mapping[str, Any], name: str) -> bool:
        """See `Family.is_derived`."""
        return name == whisper_layout.HEAD

    def build(
        self,
        config: Mapping[str, Any],
        role: StageRole,
        tensors: Mapping[str, torch.Tensor],
        device: torch.device,
        dtype: torch.dtype,
        share: Keep | None = None,
    ) -> WhisperStage:
        """See `Family.build`."""
        from keystage.models.whisper_parameters import gather
        from keystage.models.whisper_stage import WhisperStage

        parsed = whisper_config.parse(config)
        return WhisperStage(parsed, role, gather(parsed, role, tensors, device, dtype, share), device, dtype)
