"""Measures what CPU cores are worth to each stage of a bundle: the offline profile of QUART section 5.3.

After `models.loading` and before the controller, which fits the rows (`controller.maths.cpu_fit`). It
measures an idle machine's compute; sending and receiving are not part of it (`communication_s` 0), and
neither is a queue. Cores beyond those of the machine that measures are not in the profile.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import msgspec
import torch

from keystage.bundle import store
from keystage.bundle.api import CPU_PROFILE, CPU_PROFILE_VERSION, CpuProfile, CpuRow
from keystage.models.base import LoadedStage
from keystage.models.loading import load_stage, warm_up
from keystage.models.profile import decode_times

BATCHES = (1, 2, 4, 8)
REPEATS = 5
PROMPT_TOKENS = 64


def profile_cpu(
    bundle_dir: str | os.PathLike[str],
    threads: Sequence[int] | None = None,
    *,
    batches: Sequence[int] = BATCHES,
    repeats: int = REPEATS,
    write: bool = False,
) -> CpuProfile:
    """Loads the stages of a bundle one after another and times batches at several thread numbers.

    Args:
        bundle_dir: folder or `file://` address.
        threads: thread numbers; by default 1 to the cores of this machine.
        batches: rows of a batch.
        repeats: rows of the profile per thread number and batch: the fit needs to see the noise.
        write: whether `cpu-profile.json` is written beside `pipeline.json`.

    Raises:
        BundleError: the bundle is damaged.
        SplitError: unknown type name or family.
    """
    counts = list(threads or range(1, len(os.sched_getaffinity(0)) + 1))
    pipeline = store.load(bundle_dir)
    before = torch.get_num_threads()
    stages: list[list[CpuRow]] = []
    try:
        for spec in pipeline.stages:
            model = load_stage(bundle_dir, pipeline, spec.index, "cpu", None)
            warm_up(model)
            rows: list[CpuRow] = []
            for count in counts:
                torch.set_num_threads(count)
                rows += _rows(model, count, batches, repeats, spec.activation_bytes, spec.parameters)
            stages.append(rows)
    finally:
        torch.set_num_threads(before)
    profile = CpuProfile(CPU_PROFILE_VERSION, stages)
    if write:
        path = store.bundle_path(bundle_dir) / CPU_PROFILE
        fresh = path.with_suffix(".json.new")
        fresh.write_bytes(msgspec.json.encode(profile))
        fresh.replace(path)
    return profile


def _rows(
    model: LoadedStage,
    cores: int,
    batches: Sequence[int],
    repeats: int,
    activation_bytes: int,
    parameters: int,
) -> list[CpuRow]:
    return [
        CpuRow(
            latency_s=latency_s,
            cores=cores,
            batch=batch,
            activation_bytes=activation_bytes,
            parameters=parameters,
        )
        for batch in batches
        for latency_s in decode_times(model, batch, PROMPT_TOKENS, repeats)
    ]
