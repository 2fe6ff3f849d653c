"""What CPU cores are worth to each stage of a bundle: the offline profile of QUART section 5.3.

After `models.profile`, whose times it turns into rows, and before the controller, which fits them
(`controller.maths.cpu_fit`). It is an idle machine's compute; sending and receiving are not part of it
(`communication_s` 0), and neither is a queue. Cores beyond those of the machine that measures are not in
the profile.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from keystage.bundle import store
from keystage.bundle.api import CPU_PROFILE, CPU_PROFILE_VERSION, CpuProfile, CpuRow, StageSpec
from keystage.models.profile import Grid, Measured, measure_bundle

BATCHES = (1, 2, 4, 8)
REPEATS = 5


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
    counts = tuple(threads or range(1, len(os.sched_getaffinity(0)) + 1))
    grid = Grid(batches=tuple(batches), cores=counts, repeats=repeats)
    measured = measure_bundle(bundle_dir, threads=counts[0], grid=grid)
    profile = cpu_profile(store.load(bundle_dir).stages, measured)
    if write:
        write_cpu_profile(store.bundle_path(bundle_dir), profile)
    return profile


def cpu_profile(stages: Sequence[StageSpec], measured: Sequence[Measured]) -> CpuProfile:
    """The rows of every stage, by cores, then rows of the batch, then in the order they were measured."""
    return CpuProfile(
        CPU_PROFILE_VERSION,
        [_rows(spec, result) for spec, result in zip(stages, measured, strict=True)],
    )


def write_cpu_profile(folder: Path, profile: CpuProfile) -> None:
    """Writes `cpu-profile.json`, atomically."""
    path = folder / CPU_PROFILE
    fresh = path.with_suffix(".json.new")
    fresh.write_bytes(msgspec.json.encode(profile))
    fresh.replace(path)


def _rows(spec: StageSpec, measured: Measured) -> list[CpuRow]:
    return [
        CpuRow(
            latency_s=latency_s,
            cores=cores,
            batch=batch,
            activation_bytes=spec.activation_bytes,
            parameters=spec.parameters,
        )
        for (cores, batch), times in sorted(measured.batches.items())
        for latency_s in times
    ]
