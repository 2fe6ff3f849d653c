"""Measures the service time of stages: `keystage profile`.

After `models.loading` and before the controller, which reads the result from `pipeline.json`.
Short on purpose (a few seconds per stage): decode over a few batch sizes and one prompt. It
measures what one idle device does, not what a loaded machine does.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence

import torch

from keystage.bundle import store
from keystage.bundle.api import StageProfile
from keystage.models.base import LoadedStage, Row
from keystage.models.loading import load_stage, sample_input, synchronize, warm_up
from keystage.models.service_time import fit

_BATCHES = (1, 2, 4, 8)
_PROMPT_TOKENS = 64
_REPEATS = 5


def measure(
    model: LoadedStage,
    *,
    batches: Sequence[int] = _BATCHES,
    prompt_tokens: int = _PROMPT_TOKENS,
    repeats: int = _REPEATS,
) -> StageProfile:
    """Measures one stage, with slots below zero that it opens and closes.

    Args:
        model: a loaded stage; warm kernels are assumed (`warm_up`).
        batches: decode batch sizes, at least two.
        prompt_tokens: length of the prompt, and of the KV state that decode attends to.
        repeats: timed runs of each kind; their median counts.

    Returns:
        l(b) = alpha b + beta for decode, and seconds per prompt token.
    """
    prompt = max(1, min(prompt_tokens, model.shape.context_length - repeats - 1))
    slots = [-1 - row for row in range(max(batches))]
    try:
        for slot in slots:
            model.open(slot, min(prompt + repeats + 1, model.shape.context_length))
        prefill_s = 0.0
        for slot in slots:
            prefill_s = _median(functools.partial(_prefill, model, slot, prompt), model, 2)
        times = [_decode_s(model, slots[:batch], prompt, repeats) for batch in batches]
    finally:
        for slot in slots:
            model.close(slot)
    alpha, beta = fit(list(batches), times)
    return StageProfile(model.device.type, alpha, beta, prefill_s / prompt)


def profile_bundle(
    bundle_dir: str | os.PathLike[str],
    device: str = "cpu",
    dtype: str | None = None,
    threads: int = 1,
    *,
    write: bool = False,
) -> list[StageProfile]:
    """Loads the stages of a bundle one after another and measures each.

    Args:
        bundle_dir: folder or `file://` address.
        device: `cpu`, `cuda`, `cuda:N`.
        dtype: `fp32`, `bf16`, `fp16`; the bundle's own when None.
        threads: CPU threads of a worker; the setting of this process is restored at the end.
        write: whether `pipeline.json` gets the result.

    Raises:
        BundleError: the bundle is damaged.
        SplitError: unknown type name or family.
    """
    pipeline = store.load(bundle_dir)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        profiles: list[StageProfile] = []
        for stage in pipeline.stages:
            model = load_stage(bundle_dir, pipeline, stage.index, device, dtype)
            warm_up(model)
            profiles.append(measure(model))
    finally:
        torch.set_num_threads(before)
    if write:
        store.write(store.bundle_path(bundle_dir), store.with_profiles(pipeline, profiles))
    return profiles


def decode_times(model: LoadedStage, batch: int, prompt_tokens: int, repeats: int) -> list[float]:
    """Seconds of single decode steps of a batch after a prompt, in order.

    Args:
        model: a loaded, warm stage; slots below zero are opened and closed.
        batch: rows.
        prompt_tokens: length of the KV state, cut to what the stage holds.
        repeats: how many.
    """
    prompt = max(1, min(prompt_tokens, model.shape.context_length - repeats - 2))
    slots = [-1 - row for row in range(batch)]
    times: list[float] = []
    try:
        for slot in slots:
            model.open(slot, min(prompt + repeats + 2, model.shape.context_length))
            _prefill(model, slot, prompt)
        x = sample_input(model, batch)
        for now in range(prompt, prompt + repeats + 1):
            begin = time.perf_counter()
            model.forward(x, [Row(slot, now, 1) for slot in slots], range(batch))
            synchronize(model)
            times.append(time.perf_counter() - begin)
    finally:
        for slot in slots:
            model.close(slot)
    return times[1:]  # the first step of a batch size runs cold


def _prefill(model: LoadedStage, slot: int, tokens: int) -> None:
    model.forward(sample_input(model, tokens), [Row(slot, 0, tokens)], [0])


def _decode_s(model: LoadedStage, slots: Sequence[int], start: int, repeats: int) -> float:
    """Median seconds of a decode step, each step one position further."""
    for slot in slots:
        _prefill(model, slot, start)
    x = sample_input(model, len(slots))
    position = iter(range(start, start + repeats))

    def step() -> None:
        now = next(position)
        model.forward(x, [Row(slot, now, 1) for slot in slots], range(len(slots)))

    return _median(step, model, repeats)


def _median(run: Callable[[], None], model: LoadedStage, repeats: int) -> float:
    times: list[float] = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        synchronize(model)
        times.append(time.perf_counter() - begin)
    return sorted(times)[len(times) // 2]
