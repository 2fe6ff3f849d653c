"""What a holder has ready for the replicas it forks: raw bytes, or a stage that is built already.

Made in `holder`, inherited by its children through the fork, handed out there by `child`.
"""

from __future__ import annotations

import dataclasses
import gc
from pathlib import Path

import torch

from keystage.bundle import store
from keystage.bundle.api import Pipeline
from keystage.bundle.errors import BundleError
from keystage.keysmanager import packed_segment, segment
from keystage.keysmanager.api import Hold, Parameters
from keystage.keysmanager.pod_api import PackedForm
from keystage.models.base import AnyStage
from keystage.models.loading import build_stage, warm_up
from keystage.models.raw import tensors_in
from keystage.models.shared import SharedMemory, trim_heap


@dataclasses.dataclass(slots=True)
class Stock:
    """Parameters of one stage in this process's memory.

    Attributes:
        parameters: which they are.
        raw: the stage's file, mapped read-only; None once it is not needed any more.
        built: the stage on the CPU, its parameters in shared memory; None where nothing was prepared.
        memory: where `built` has them; None where it uses `raw` in place.
        pipeline: whose description `built` follows: equal parameters may be used in another way.
        published: the packed form for processes that are no children: a descriptor, and what goes with it.
    """

    parameters: Parameters
    raw: memoryview | None
    built: AnyStage | None = None
    memory: SharedMemory | None = None
    pipeline: Pipeline | None = None
    published: tuple[int, PackedForm] | None = None

    def is_built_for(self, pipeline: Pipeline, index: int) -> bool:
        """Whether `built` computes what this stage of this pipeline does, given equal parameters."""
        mine = self.pipeline
        return mine is not None and _use(mine, self.parameters.name.stage) == _use(pipeline, index)

    @property
    def packed_bytes(self) -> int:
        """Bytes of host memory beside the raw segment."""
        return 0 if self.memory is None else self.memory.nbytes


def _use(pipeline: Pipeline, index: int) -> tuple[object, ...]:
    """All that decides what a stage computes, beside its parameters."""
    first, last = index == 0, index == len(pipeline.stages) - 1
    return pipeline.family, pipeline.config, pipeline.stages[index].layers, first, last


def stocked(hold: Hold, fd: int) -> Stock:
    """Maps a segment and makes ready what is asked for; closes nothing.

    Raises:
        SegmentError: not sealed, or smaller than the parameters.
        BundleError: another identity or size than the pipeline's stage; garbled file.
        SharedMemoryError: no memory for the packed form.
    """
    pipeline = store.decode(hold.pipeline, Path(f"pipeline.json of {hold.parameters.pipeline}"))
    check_identity(hold.parameters, pipeline)
    size = segment.check_sealed(fd)
    if size < hold.parameters.nbytes:
        raise segment.SegmentError(
            f"segment of {size} bytes for {hold.parameters.file} of {hold.parameters.nbytes} bytes"
        )
    raw = segment.map_readonly(fd, hold.parameters.nbytes)
    if hold.prepare == "none":
        return Stock(hold.parameters, raw)
    return _built(hold, pipeline, raw)


def check_identity(parameters: Parameters, pipeline: Pipeline) -> None:
    """Refuses parameters that are not those of the stage they are said to be.

    Raises:
        BundleError: no such stage, or another identity or size.
    """
    spec = store.stage_of(pipeline, parameters.name.stage)
    if (spec.identity, spec.nbytes) != (parameters.identity, parameters.nbytes):
        raise BundleError(
            f"stage {spec.index} of {pipeline.name} is {spec.identity[:12]} of {spec.nbytes} bytes, "
            f"the segment holds {parameters.identity[:12]} of {parameters.nbytes} bytes"
        )


def raw_tensors(parameters: Parameters, raw: memoryview) -> dict[str, torch.Tensor]:
    """The parameters in place.

    Raises:
        BundleError: garbled file.
    """
    return tensors_in(segment.as_tensor(raw), f"segment of {parameters.file}")


def _built(hold: Hold, pipeline: Pipeline, raw: memoryview) -> Stock:
    """Builds the stage, its own parameters in shared memory, and runs it once.

    Its kernels and code pages are warm in the children, then. The raw mapping goes with its last
    reference: at once, unless the stage uses it in place.
    """
    index = hold.parameters.name.stage
    memory = SharedMemory(f"keystage-packed-{pipeline.name}-{index}")
    tensors = raw_tensors(hold.parameters, raw)
    model = build_stage(pipeline, index, tensors, "cpu", hold.dtype, share=memory.move)
    published = None
    if memory.nbytes:
        published = packed_segment.publish(
            memory, raw, hold.parameters.file, pipeline, index, hold.dtype or pipeline.dtype
        )
    memory.seal()
    warm_up(model)
    del tensors
    gc.collect()
    trim_heap()
    if memory.nbytes == 0:
        return Stock(hold.parameters, raw, model, pipeline=pipeline)
    return Stock(hold.parameters, None, model, memory, pipeline, published)
