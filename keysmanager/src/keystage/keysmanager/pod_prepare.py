"""What a stage pod makes ready before it knows (or has) its parameters.

Called by `pod`: everything is imported, and on a device of torch as much is done as the bundle's
description allows. On a GPU that is a standby's `Prepared` (context, arena, decode graph) for the shape
class that most stages of the pipeline have; a stage of another class uses the context alone. On a CPU the
kernels of every kind of stage run once on a model of one layer of zeros: a worker then meets no cold
kernel, and nothing is kept.
"""

from __future__ import annotations

import gc
import importlib
import logging
from collections import Counter
from typing import TYPE_CHECKING

from keystage.bundle.api import Pipeline
from keystage.bundle.dtypes import SHORT_NAMES
from keystage.keysmanager.pod_config import PodConfig
from keystage.keysmanager.shape import shape_of

if TYPE_CHECKING:
    from keystage.keysmanager.standby import Prepared

log = logging.getLogger("keystage.keysmanager")

_IMPORTED = ("keystage.worker.app", "keystage.wire.certificate", "keystage.keysmanager.pod_supply")
_IMPORTED_WITH_TORCH = ("keystage.worker.torch_executor", "safetensors.torch", "torch.utils.mkldnn")


def load_program(config: PodConfig) -> None:
    """Imports everything that the worker needs, also what it imports late."""
    for name in _IMPORTED:
        importlib.import_module(name)
    if config.has_torch:
        for name in _IMPORTED_WITH_TORCH:
            importlib.import_module(name)


def prepare(config: PodConfig, pipeline: Pipeline) -> Prepared | None:
    """Makes a parked pod ready for a stage of the pipeline, whichever it will be.

    Returns:
        What a worker of one shape class needs; None: on the CPU, or where no stage has parameters.

    Raises:
        StageError, StandbyError, SplitError: the device or type cannot be used.
    """
    if not config.has_torch or pipeline.family == "emulated":
        return None
    import torch

    from keystage.keysmanager.standby import Prepared
    from keystage.worker.torch_executor import check_device

    if config.threads:
        torch.set_num_threads(config.threads)
    device = check_device(config.device)
    dtype = SHORT_NAMES.get(config.dtype, pipeline.dtype)
    prepared = None
    if device == "cpu":
        _rehearse(pipeline, dtype)
    elif dtype == pipeline.dtype:
        prepared = Prepared(pipeline, commonest(pipeline, device, dtype), device, dtype, config.kv_bytes)
    else:
        log.info("%s is stored in %s: nothing is prepared for %s", pipeline.name, pipeline.dtype, dtype)
    gc.collect()
    gc.freeze()  # later collections look at what comes later alone
    return prepared


def commonest(pipeline: Pipeline, device: str, dtype: str) -> int:
    """The first stage of the shape class that most stages belong to."""
    shapes = [shape_of(pipeline, stage.index, device, dtype) for stage in pipeline.stages]
    return shapes.index(Counter(shapes).most_common(1)[0][0])


def _rehearse(pipeline: Pipeline, dtype: str) -> None:
    """Runs a model of one layer of zeros for each kind of stage: first, last, both or neither."""
    import torch

    from keystage.models.base import StageRole, torch_dtype
    from keystage.models.families import family_named
    from keystage.models.loading import role_of, warm_up
    from keystage.models.shared import trim_heap

    family, kind = family_named(pipeline.family), torch_dtype(dtype)
    roles = {(role.is_first, role.is_last) for role in (role_of(pipeline, s.index) for s in pipeline.stages)}
    for is_first, is_last in sorted(roles):
        role = StageRole(0, 1, is_first, is_last)
        with torch.inference_mode():
            zeros = {
                tensor.name: torch.zeros(tensor.shape, dtype=kind)
                for tensor in family.stage_tensors(pipeline.config, role)
            }
            model = family.build(pipeline.config, role, zeros, torch.device("cpu"), kind, None)
        warm_up(model)
        del model, zeros
        gc.collect()
    trim_heap()
