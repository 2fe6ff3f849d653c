"""From a bundle to a running stage: one sequential read, checked, then viewed in place.

Used by the worker between `loading` and `warming`, and by `keystage profile`. The file is read
into one buffer (not mapped: mapped reads are slow on network file systems), its chunk hashes are
checked on that buffer, and parameters are views of it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from keystage.bundle import store
from keystage.bundle.api import Pipeline
from keystage.bundle.hashing import buffer_chunks
from keystage.bundle.safetensors_file import parse_header, read_range
from keystage.models.base import AnyStage, LoadedStage, Row, StageRole, torch_dtype
from keystage.models.families import family_named
from keystage.models.program import ModuleParameters
from keystage.models.raw import tensors_in
from keystage.models.shared import Keep
from keystage.models.single_pass import SinglePassStage, looping_stage, single_pass_stage

_WARM_TOKENS = 16
_WARM_BATCHES = (1, 2, 4, 8)


def role_of(pipeline: Pipeline, stage_index: int) -> StageRole:
    """Which part of the model a stage is.

    Raises:
        BundleError: no such stage.
    """
    first, end = store.stage_of(pipeline, stage_index).layers
    return StageRole(first, end, stage_index == 0, stage_index == len(pipeline.stages) - 1)


def read_stage(
    bundle_dir: str | os.PathLike[str], pipeline: Pipeline, stage_index: int, *, check: bool = True
) -> dict[str, torch.Tensor]:
    """Reads the parameters of a stage, as views of one buffer on the CPU.

    Args:
        bundle_dir: folder or `file://` address of the bundle.
        pipeline: its description.
        stage_index: which stage.
        check: whether chunk hashes are compared; False only where they were before.

    Raises:
        BundleError: no such stage; missing, truncated or altered file.
    """
    stage = store.stage_of(pipeline, stage_index)
    folder = store.bundle_path(bundle_dir)
    store.check_size(folder, stage)
    path = folder / stage.file
    header = parse_header(path)
    buffer = torch.empty(stage.nbytes, dtype=torch.uint8)
    body = buffer.numpy().data
    read_range(path, 0, body)
    if check:
        store.check_chunks(path, stage, pipeline.dtype, buffer_chunks(body))
    return tensors_in(buffer, str(path), header)


def load_stage(
    bundle_dir: str | os.PathLike[str],
    pipeline: Pipeline,
    stage_index: int,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype | None = None,
    *,
    check: bool = True,
) -> LoadedStage:
    """Loads a looping stage onto a device.

    Args:
        bundle_dir: folder or `file://` address of the bundle.
        pipeline: its description.
        stage_index: which stage.
        device: `cpu`, `cuda`, `cuda:N`.
        dtype: `fp32`, `bf16`, `fp16` or a torch type; the bundle's own when None.
        check: see `read_stage`.

    Raises:
        BundleError: see `read_stage`; or a parameter is missing.
        SplitError: unknown family or type name.
        StageError: the stage is single-pass.
    """
    tensors = read_stage(bundle_dir, pipeline, stage_index, check=check)
    return looping_stage(build_stage(pipeline, stage_index, tensors, device, dtype))


def load_single_pass(
    bundle_dir: str | os.PathLike[str],
    pipeline: Pipeline,
    stage_index: int,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype | None = None,
    *,
    check: bool = True,
) -> SinglePassStage:
    """Loads a single-pass stage onto a device; see `load_stage`.

    Raises:
        BundleError, SplitError: see `load_stage`.
        StageError: the stage is looping.
    """
    tensors = read_stage(bundle_dir, pipeline, stage_index, check=check)
    return single_pass_stage(build_stage(pipeline, stage_index, tensors, device, dtype))


def build_stage(
    pipeline: Pipeline,
    stage_index: int,
    tensors: Mapping[str, torch.Tensor],
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype | None = None,
    share: Keep | None = None,
) -> AnyStage:
    """Makes a stage from parameters that are in memory already; see `load_stage`.

    Args:
        pipeline: its description.
        stage_index: which stage.
        tensors: parameters by name.
        device: see `load_stage`.
        dtype: see `load_stage`.
        share: takes every large tensor that the stage makes for itself (`shared.SharedMemory.move`).
            The stage then uses `tensors` in place where it makes none.
    """
    kind = dtype if isinstance(dtype, torch.dtype) else torch_dtype(dtype or pipeline.dtype)
    family = family_named(pipeline.family)
    with torch.inference_mode():
        return family.build(
            pipeline.config, role_of(pipeline, stage_index), tensors, torch.device(device), kind, share
        )


def warm_up(stage: AnyStage) -> None:
    """Runs it once in a few sizes, so that the first request meets warm kernels.

    A looping stage computes prompts and decode steps in slots below zero, which it opens and closes;
    the sessions a worker holds are not touched. Parameters of a stream module run nothing.
    """
    if isinstance(stage, ModuleParameters):
        return
    if isinstance(stage, SinglePassStage):
        # Of an image network on a CPU an item takes a third of a second.
        for batch in _WARM_BATCHES[:2] if stage.device.type == "cpu" else _WARM_BATCHES:
            stage.forward(stage.samples(batch))
    else:
        _warm_up_sessions(looping_stage(stage))
    synchronize(stage)


def rehearse(stage: AnyStage, slot: int, tokens: int) -> None:
    """Computes tokens, or an item, of no meaning.

    Args:
        stage: any; a first wave or batch brings its kernels.
        slot: of a looping stage, opened and closed.
        tokens: how many a looping stage computes, at least; those of its prefix come before them.
    """
    if isinstance(stage, ModuleParameters):
        return
    if isinstance(stage, SinglePassStage):
        stage.forward(stage.samples(1))
        return
    model = looping_stage(stage)
    count = model.shape.prefix + tokens
    model.open(slot, count)
    try:
        model.forward(sample_input(model, count), [Row(slot, 0, count)], [0])
    finally:
        model.close(slot)


def _warm_up_sessions(model: LoadedStage) -> None:
    prefix, context = model.shape.prefix, model.shape.context_length
    batches = _WARM_BATCHES[:2] if prefix else _WARM_BATCHES
    opening = max(prefix + 1, min(prefix + _WARM_TOKENS, context - len(batches)))
    lengths = {-1 - row: opening for row in range(max(batches))}
    try:
        for slot in lengths:
            model.open(slot, min(opening + len(batches), context))
            model.forward(sample_input(model, opening), [Row(slot, 0, opening)], [0])
        for batch in batches:
            slots = [slot for slot in list(lengths)[:batch] if lengths[slot] < context]
            rows = [Row(slot, lengths[slot], 1) for slot in slots]
            if rows:
                model.forward(sample_input(model, len(rows)), rows, range(len(rows)))
            lengths.update({slot: lengths[slot] + 1 for slot in slots})
    finally:
        for slot in lengths:
            model.close(slot)


def sample_input(model: LoadedStage, tokens: int) -> torch.Tensor:
    """An input of the right kind for `tokens` tokens, the same at each call."""
    generator = torch.Generator().manual_seed(tokens)
    if model.role.is_first:
        return torch.randint(model.shape.vocab_size, (tokens,), generator=generator)
    return torch.randn(tokens, model.shape.hidden_size, generator=generator).to(model.device, model.dtype)


def synchronize(model: AnyStage) -> None:
    """Waits until the device has finished what was queued; returns at once on CPU."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
