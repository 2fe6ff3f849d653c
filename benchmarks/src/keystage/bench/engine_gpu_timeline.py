"""Where the time of a decode step on a GPU goes: kernels of a replayed step, by what they do.

Runs in a process of its own (`engine_gpu_process`): loads a bundle's stages as one span, fills sessions with
prompts, and records replays with torch's profiler. What is left of a step's wall time is the host's and
gaps between kernels. Without a GPU the eager stages are recorded, which shows that this works, no more.
"""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path
from typing import Any

STEPS, DRY_STEPS = 40, 2
_CLASSES = (
    ("attention", ("_part_kernel", "_join_kernel", "scaled_dot", "flash")),
    ("norm and residual", ("_norm_kernel", "rms_norm", "layer_norm")),
    ("rotation and write into blocks", ("_place_kernel", "rotate")),
    ("activation", ("_activate_kernel", "silu", "gelu")),
    ("matrices", ("gemm", "gemv", "nvjet", "cutlass", "cublas", "splitk", "aten::mm", "addmm", "linear")),
    ("choice of the token", ("reduce", "argmax", "max")),
    ("copies", ("memcpy", "memset", "copy")),
)
"""What a kernel does, by a part of its name; the first that fits."""


def answer(order: dict[str, Any]) -> Any:
    """Carries out an order: `bandwidth` (device), `timeline` (bundle, rows, prompt, device)."""
    if order["do"] == "bandwidth":
        return bandwidth(order["device"])
    return timeline(Path(order["bundle"]), order["rows"], order["prompt"], order["device"])


def class_of(kernel: str) -> str:
    """What a kernel does."""
    name = kernel.lower()
    return next((kind for kind, parts in _CLASSES if any(part in name for part in parts)), "other")


def bandwidth(device: str) -> float:
    """Bytes a second that a copy on the device reads and writes."""
    import torch

    is_gpu = device.startswith("cuda")
    nbytes, copies = (2 << 30, 20) if is_gpu else (1 << 24, 4)
    source = torch.empty(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    _wait(device)
    begin_s = time.perf_counter()
    for _ in range(copies):
        target.copy_(source)
    _wait(device)
    return 2 * copies * nbytes / (time.perf_counter() - begin_s)


def timeline(bundle: Path, rows: int, prompt: int, device: str) -> dict[str, Any]:
    """A step's microseconds by what the kernels do, and launches.

    Returns:
        `wall_us`: of a step, without the profiler; `kernels`: (class, microseconds, launches) a step;
        `busy_us`: their sum; `top`: the names that take most.
    """
    from torch.profiler import ProfilerActivity, profile

    is_gpu = device.startswith("cuda")
    steps = STEPS if is_gpu else DRY_STEPS
    step = _stepper(bundle, rows, prompt, device)
    for _ in range(3):
        step()
    _wait(device)
    begin_s = time.perf_counter()
    for _ in range(steps):
        step()
    _wait(device)
    wall_us = 1e6 * (time.perf_counter() - begin_s) / steps
    with profile(activities=[ProfilerActivity.CUDA if is_gpu else ProfilerActivity.CPU]) as recorded:
        for _ in range(steps):
            step()
        _wait(device)
    spent: dict[str, float] = defaultdict(float)
    launches: dict[str, float] = defaultdict(float)
    names: dict[str, float] = defaultdict(float)
    for event in recorded.key_averages():
        us = float(event.self_device_time_total if is_gpu else event.self_cpu_time_total)
        if not us or (is_gpu and "CUDA" not in str(event.device_type)):
            continue
        kind = class_of(event.key)
        spent[kind] += us / steps
        launches[kind] += event.count / steps
        names[event.key] += us / steps
    top = sorted(names.items(), key=lambda item: -item[1])[:12]
    return {
        "wall_us": wall_us,
        "busy_us": sum(spent.values()),
        "kernels": [[kind, us, launches[kind]] for kind, us in sorted(spent.items(), key=lambda i: -i[1])],
        "top": [[name[:120], us] for name, us in top],
    }


def _stepper(bundle: Path, rows: int, prompt: int, device: str) -> Any:
    """What computes the next token of `rows` sessions of `prompt` tokens, as a worker's step does."""
    import torch

    from keystage.bundle import store
    from keystage.models.base import Row
    from keystage.models.blocks import blocks_for
    from keystage.models.decoder import DecoderStage
    from keystage.models.loading import load_stage

    pipeline = store.load(bundle)
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    found = [load_stage(bundle, pipeline, s.index, device, check=False) for s in pipeline.stages]
    stages = [stage for stage in found if isinstance(stage, DecoderStage)]
    most = prompt + 3 * STEPS
    lengths = [prompt] * rows
    ids = torch.randint(0, pipeline.vocab_size, (prompt,))
    if not device.startswith("cuda"):
        torch.set_num_threads(1)

        def through(x: torch.Tensor, wave: list[Row]) -> None:
            for stage in stages:
                x = stage.forward(x, wave, range(len(wave)))

        for slot in range(rows):
            for stage in stages:
                stage.open(slot, most)
            through(ids, [Row(slot, 0, prompt)])

        def eager() -> None:
            through(torch.ones(rows, dtype=torch.int64), [Row(i, n, 1) for i, n in enumerate(lengths)])
            lengths[:] = [n + 1 for n in lengths]

        return eager
    from keystage.models.cuda_span import CudaSpan

    span = CudaSpan(stages, rows * blocks_for(most))
    for slot in range(rows):
        span.open(slot, most)
        span.forward(ids, [Row(slot, 0, prompt)], [0])
    ones = [1] * rows

    def replayed() -> None:
        wave = [Row(i, n, 1) for i, n in enumerate(lengths)]
        graph = span.graph_for(wave)
        assert graph is not None
        span.start(graph, ones, (rows,), wave)
        graph.greedy(rows)
        lengths[:] = [n + 1 for n in lengths]

    return replayed


def _wait(device: str) -> None:
    import torch

    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
