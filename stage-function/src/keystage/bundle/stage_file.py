"""Writing the stages' safetensors files, one parameter at a time, with a progress bar.

Called by `bundle.split` after the plan is checked. At no time more than one parameter (and its
converted copy) is in memory. Hashing follows in `bundle.hashing`, from the written file.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from keystage.bundle.dtypes import ITEM_BYTES
from keystage.bundle.errors import SplitError
from keystage.bundle.plan import parameters
from keystage.bundle.safetensors_file import header_bytes
from keystage.bundle.source import ModelSource
from keystage.models.base import StageTensor, torch_dtype

if TYPE_CHECKING:
    import torch


def write_stages(
    source: ModelSource, plan: Sequence[Sequence[StageTensor]], folder: Path, dtype: str
) -> list[Path]:
    """Writes `stage-NN.safetensors` for every stage; progress goes to stderr.

    Args:
        source: where parameters come from.
        plan: parameters of each stage, in file order.
        folder: where to write.
        dtype: `float32`, `bfloat16` or `float16`.

    Returns:
        The files, by stage.

    Raises:
        SplitError: a parameter cannot be read, or does not fit the type.
    """
    paths = [folder / f"stage-{index:02d}.safetensors" for index in range(len(plan))]
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        for index, (path, tensors) in enumerate(zip(paths, plan, strict=True)):
            total = parameters(tensors) * ITEM_BYTES[dtype]
            task = progress.add_task(f"stage {index + 1}/{len(plan)}", total=total)
            write_file(source, tensors, path, dtype, functools.partial(progress.advance, task))
    return paths


def write_file(
    source: ModelSource,
    tensors: Sequence[StageTensor],
    path: Path,
    dtype: str,
    advance: Callable[[int], object],
) -> None:
    """Writes one safetensors file.

    Args:
        source: where parameters come from.
        tensors: what goes in, in this order.
        path: the file.
        dtype: `float32`, `bfloat16` or `float16`.
        advance: told the bytes written after each parameter.

    Raises:
        SplitError: a parameter cannot be read, or does not fit the type.
    """
    with path.open("wb") as file:
        file.write(header_bytes({tensor.name: tensor.shape for tensor in tensors}, dtype))
        for tensor in tensors:
            body = _body(source.read(tensor.source), tensor, dtype)
            file.write(body)
            advance(len(body))


def _body(values: torch.Tensor, tensor: StageTensor, dtype: str) -> memoryview:
    import torch

    kind = torch_dtype(dtype)
    turned = values.t() if tensor.is_transposed else values
    converted = turned.to(kind).contiguous()
    if kind is torch.float16 and values.dtype is not kind and not bool(converted.isfinite().all()):
        raise SplitError(
            f"parameter {tensor.source} does not fit fp16: its largest value is {values.abs().max():.3g}, "
            f"fp16 ends at 65504; use bf16 or fp32"
        )
    return converted.view(-1).view(torch.uint8).numpy().data
