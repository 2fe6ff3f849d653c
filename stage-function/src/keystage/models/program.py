"""Parameters of stream modules as a model family, so that they are kept, shared and checked like any others.

The half of a stream program without code: `build` gives the tensors, in place where they are mapped, and
whoever runs the module (`worker.torch_program`) hands them to its `load`. A KeysManager holds them and never
runs a program's code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from keystage.bundle.dtypes import ITEM_BYTES
from keystage.bundle.errors import BundleError, SplitError
from keystage.models.base import Execution, ModelShape, StageRole, StageTensor

if TYPE_CHECKING:
    import torch

FAMILY = "program"


class _Config(msgspec.Struct, frozen=True):
    """What is read of `pipeline.json`'s config: names and shapes of each module's parameters."""

    tensors: list[list[tuple[str, tuple[int, ...]]]]


@dataclass(frozen=True, slots=True)
class ModuleParameters:
    """A stage that cannot run by itself: the parameters of one module on a device.

    Attributes:
        role: which module.
        shape: of the program.
        device: where the tensors are.
        dtype: the bundle's; a tensor may have another of its own.
        tensors: by name.
    """

    role: StageRole
    shape: ModelShape
    device: torch.device
    dtype: torch.dtype
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)


class ProgramFamily:
    """See `base.Family`."""

    name = FAMILY
    architectures = ("StreamProgram",)
    execution: Execution = "program"

    def shape(self, config: Mapping[str, Any]) -> ModelShape:
        """A layer a module; nothing else is known."""
        return ModelShape(len(_parsed(config).tensors), 0, 0, 0)

    def stage_tensors(self, config: Mapping[str, Any], role: StageRole) -> list[StageTensor]:
        """The parameters of a module."""
        modules = _parsed(config).tensors
        return [StageTensor(name, name, shape) for name, shape in modules[role.first_layer]]

    def end_parameters(self, config: Mapping[str, Any]) -> tuple[int, int]:
        """There are no ends."""
        return 0, 0

    def is_derived(self, config: Mapping[str, Any], name: str) -> bool:
        """Nothing follows from anything."""
        return False

    def build(
        self,
        config: Mapping[str, Any],
        role: StageRole,
        tensors: Mapping[str, torch.Tensor],
        device: torch.device,
        dtype: torch.dtype,
        share: Callable[[torch.Tensor], None] | None = None,
    ) -> ModuleParameters:
        """Checks and places the parameters; types stay as they are stored.

        Raises:
            BundleError: a parameter is missing, or has another shape.
        """
        for expected in self.stage_tensors(config, role):
            found = tensors.get(expected.name)
            if found is None or tuple(found.shape) != expected.shape:
                have = "is missing" if found is None else f"has shape {list(found.shape)}"
                raise BundleError(
                    f"parameter {expected.name} of module {role.first_layer} {have}, "
                    f"expected {list(expected.shape)}"
                )
        placed = {name: tensor.to(device) for name, tensor in tensors.items()}
        return ModuleParameters(role, self.shape(config), device, dtype, placed)


def config_of(modules: list[Mapping[str, torch.Tensor]]) -> dict[str, Any]:
    """What `pipeline.json` says of the modules' parameters.

    Raises:
        SplitError: a parameter is of no type that bundles hold.
    """
    described = []
    for index, tensors in enumerate(modules):
        rows = []
        for name, tensor in tensors.items():
            kind = str(tensor.dtype).removeprefix("torch.")
            if kind not in ITEM_BYTES:
                raise SplitError(
                    f"parameter {name} of module {index} is {kind}; known are {', '.join(ITEM_BYTES)} "
                    "(integers belong into options, or buffers that are not saved)"
                )
            rows.append([name, list(tensor.shape)])
        described.append(rows)
    return {"architectures": ["StreamProgram"], "tensors": described}


def _parsed(config: Mapping[str, Any]) -> _Config:
    try:
        return msgspec.convert(config, _Config)
    except msgspec.ValidationError as error:
        raise SplitError(f"config of a stream program: {error}") from error


PROGRAM = ProgramFamily()
