"""Measures the service time of stages: `keystage profile`.

After `models.loading` and before everybody who reads `pipeline.json`: the controller and the simulator
(l(b) per stage), `keystage split --method time` (seconds per layer). `models.stage_timing` runs the steps,
`models.service_time` fits them and says how the error bars are made. It measures what one idle device does,
not what a loaded machine does, and takes seconds per stage, not minutes.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import torch

from keystage.bundle import store
from keystage.bundle.api import StageProfile
from keystage.models.base import AnyStage, LoadedStage
from keystage.models.blocks import blocks_for
from keystage.models.families import runs_as_span
from keystage.models.loading import build_stage, read_stage, warm_up
from keystage.models.service_time import Line, fit_repeats
from keystage.models.single_pass import SinglePassStage, looping_stage
from keystage.models.stage_timing import STEPS, LoopingClock, SinglePassClock, prefill_s, rounds

_LONGER = 8
"""The KV state whose decode step is set against the asked one is so many times as long."""
_LEAST_REPEATS = 3


@dataclass(frozen=True, slots=True)
class Grid:
    """What is measured.

    Attributes:
        batches: rows of a batch, at least two sizes.
        tokens: positions of KV state that decode attends to.
        item_tokens: of an item of single-pass work, where it has tokens; 0: the stage's own choice.
        chunks: tokens of a prefill chunk.
        cores: CPU threads that are set against one another; empty: only those of the profile.
        repeats: timed runs of each kind.
    """

    batches: tuple[int, ...] = (1, 2, 4, 8)
    tokens: int = 64
    item_tokens: int = 0
    chunks: tuple[int, ...] = (16, 64, 256)
    cores: tuple[int, ...] = ()
    repeats: int = 9

    def __post_init__(self) -> None:
        """Refuses what cannot be fitted.

        Raises:
            ValueError: names the bound and the value.
        """
        if len(set(self.batches)) < 2:
            raise ValueError(f"a line needs at least two batch sizes, got {list(self.batches)}")
        counts = {"batches": self.batches, "chunks": self.chunks, "cores": self.cores}
        for name, values in {**counts, "tokens": (self.tokens,), "repeats": (self.repeats,)}.items():
            if any(value < 1 for value in values):
                raise ValueError(f"{name} must be at least 1, got {', '.join(map(str, values))}")
        if self.item_tokens < 0:
            raise ValueError(f"item_tokens must be 0 or more, got {self.item_tokens}")


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured of one stage.

    Attributes:
        profile: the fits, as `pipeline.json` takes them.
        misfit_ratio: largest distance of a batch's median from the line, over that median.
        batches: seconds by (cores, rows), in order; cores are 0 where the device is no CPU.
        prefill: seconds by tokens of the chunk.
    """

    profile: StageProfile
    misfit_ratio: float
    batches: Mapping[tuple[int, int], Sequence[float]]
    prefill: Mapping[int, Sequence[float]] = field(default_factory=dict)


def measure(stage: AnyStage, grid: Grid, threads: int = 0) -> Measured:
    """Measures one stage.

    Args:
        stage: a loaded stage; warm kernels are assumed (`warm_up`).
        grid: what is measured.
        threads: CPU threads that the profile is for; 0 leaves the present number.
    """
    is_cpu = stage.device.type == "cpu"
    mine = (threads or torch.get_num_threads()) if is_cpu else 0
    cores = sorted({mine, *(grid.cores if is_cpu else ())})
    batches = sorted(set(grid.batches))
    if isinstance(stage, SinglePassStage):
        times = rounds(SinglePassClock(stage, batches[-1], grid.item_tokens), batches, cores, grid.repeats)
        profile, misfit_ratio = _line_of(stage, times, batches, mine)
        return Measured(profile, misfit_ratio, times)
    model = looping_stage(stage)
    with LoopingClock(model, batches[-1], grid.tokens) as clock:
        times = rounds(clock, batches, cores, grid.repeats)
        held = clock.held
    profile, misfit_ratio = _line_of(stage, times, batches, mine)
    prefill = _prefill(model, grid, mine)
    chunk = _chunk_line(prefill)
    kv_token_s, kv_error_s = _kv_slope(model, grid, batches[-1], mine)
    profile = msgspec.structs.replace(
        profile,
        prefill_token_s=chunk.alpha_s,
        prefill_error_s=chunk.alpha_error_s,
        prefill_beta_s=chunk.beta_s,
        kv_token_s=kv_token_s,
        kv_error_s=kv_error_s,
        tokens=held,
    )
    return Measured(profile, misfit_ratio, times, prefill)


def _line_of(
    stage: AnyStage, times: Mapping[tuple[int, int], Sequence[float]], batches: Sequence[int], cores: int
) -> tuple[StageProfile, float]:
    """l(b) at one number of cores, and its misfit."""
    line = fit_repeats({batch: times[cores, batch] for batch in batches})
    profile = StageProfile(
        device=stage.device.type,
        alpha_s=line.alpha_s,
        beta_s=line.beta_s,
        alpha_error_s=line.alpha_error_s,
        beta_error_s=line.beta_error_s,
        cores=cores,
    )
    return profile, line.misfit_ratio


def measure_bundle(
    bundle_dir: str | os.PathLike[str],
    device: str = "cpu",
    dtype: str | None = None,
    threads: int = 1,
    grid: Grid | None = None,
    *,
    write: bool = False,
    report: Callable[[int, Measured], None] | None = None,
) -> list[Measured]:
    """Loads the stages of a bundle one after another and measures each.

    Args:
        bundle_dir: folder or `file://` address.
        device: `cpu`, `cuda`, `cuda:N`.
        dtype: `fp32`, `bf16`, `fp16`; the bundle's own when None.
        threads: CPU threads of a worker; the setting of this process is restored at the end.
        grid: what is measured, None for the defaults.
        write: whether `pipeline.json` gets the result.
        report: called with each stage's index and result as soon as it is there.

    Raises:
        BundleError: the bundle is damaged.
        SplitError: unknown type name or family.
    """
    pipeline = store.load(bundle_dir)
    chosen = grid or Grid()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    results: list[Measured] = []
    try:
        for stage in pipeline.stages:
            loaded = build_stage(
                pipeline, stage.index, read_stage(bundle_dir, pipeline, stage.index), device, dtype
            )
            loaded = _as_run(loaded, pipeline.family, chosen)
            warm_up(loaded)
            results.append(measure(loaded, chosen, threads))
            if report is not None:
                report(stage.index, results[-1])
    finally:
        torch.set_num_threads(before)
    if write:
        profiles = [result.profile for result in results]
        store.write(store.bundle_path(bundle_dir), store.with_profiles(pipeline, profiles))
    return results


def profile_bundle(
    bundle_dir: str | os.PathLike[str],
    device: str = "cpu",
    dtype: str | None = None,
    threads: int = 1,
    *,
    write: bool = False,
) -> list[StageProfile]:
    """The profiles alone; see `measure_bundle`."""
    return [result.profile for result in measure_bundle(bundle_dir, device, dtype, threads, write=write)]


def _as_run(stage: AnyStage, family: str, grid: Grid) -> AnyStage:
    """The stage as its worker runs it: on a GPU a decoder stage is a span, and decodes by graphs."""
    if stage.device.type != "cuda" or not runs_as_span(family):
        return stage
    from keystage.models.cuda_span import CudaSpan
    from keystage.models.decoder import DecoderStage

    assert isinstance(stage, DecoderStage)
    rows = max(grid.batches)
    blocks = rows * blocks_for(_LONGER * grid.tokens + STEPS) + blocks_for(max(grid.chunks))
    span = CudaSpan([stage], blocks)
    span.capture(most_rows=rows)
    return span


def _prefill(model: LoadedStage, grid: Grid, threads: int) -> dict[int, list[float]]:
    """Seconds of prompts of several lengths, in rounds; the first of each length is not counted."""
    most = model.shape.context_length - model.shape.prefix
    lengths = sorted({min(chunk, most) for chunk in grid.chunks})
    times: dict[int, list[float]] = {length: [] for length in lengths}
    if threads:
        torch.set_num_threads(threads)
    for repeat in range(max(_LEAST_REPEATS, grid.repeats // 2) + 1):
        for length in lengths:
            seconds = prefill_s(model, length)
            if repeat:
                times[length].append(seconds)
    return times


def _chunk_line(prefill: Mapping[int, Sequence[float]]) -> Line:
    """Seconds per token and per chunk; with one length only, all of it counts per token."""
    if len(prefill) > 1:
        return fit_repeats(prefill)
    ((length, times),) = prefill.items()
    return Line(statistics.median(times) / length, 0.0, 0.0, 0.0, 0.0)


def _kv_slope(model: LoadedStage, grid: Grid, rows: int, threads: int) -> tuple[float, float]:
    """Seconds per row and position of KV state beyond the asked number, and their error.

    (0, 0) where the context has no room for a longer one.
    """
    times: dict[int, list[float]] = {}
    for length in (grid.tokens, _LONGER * grid.tokens):
        with LoopingClock(model, rows, length) as clock:
            repeats = max(_LEAST_REPEATS, grid.repeats)
            times[rows * clock.held] = rounds(clock, [rows], [threads], repeats)[threads, rows]
    if len(times) < 2:
        return 0.0, 0.0
    line = fit_repeats(times)
    return line.alpha_s, line.alpha_error_s
