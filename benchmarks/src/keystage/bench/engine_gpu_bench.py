"""What the parts of `keystage bench engine` on GPUs share: sizes, bundles, and how one way is measured.

Ours and its rival run in rounds, in turn, what is up idling meanwhile; every sample is a line of the record.
Without a GPU (`--dry`) everything runs with tiny shapes on the CPU: the same code, no results.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keystage.bench import engine_gpu_rivals
from keystage.bench.engine_client import complete, steady_tokens_per_s, steady_window
from keystage.bench.engine_gpu_process import OrderError, Orders
from keystage.bench.engine_gpu_record import Record
from keystage.bench.engine_gpu_world import (
    WARM_PROMPT,
    WARM_TOKENS,
    Setup,
    Up,
    prompts_of,
    serving,
)
from keystage.bench.frame import BenchError
from keystage.bundle.errors import SplitError
from keystage.bundle.split import split


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large everything is.

    Attributes:
        decoder: shape of the decoder that is cut.
        large: shape of the larger one.
        huge: shape of one that takes several GPUs' memory.
        others: shapes of other families, with stages and requests at once.
        batches: requests at once.
        wide: more requests at once, for several GPUs.
        prompt: tokens of each.
        firsts: lengths of prompts whose first token is timed.
        tokens: new tokens.
        rounds: how often.
        many: stages of the sweep over workers.
        kv_bytes: of a pipeline.
        rate_s: seconds of a throughput.
        rival_tokens: tokens of an eager rival.
    """

    decoder: str = "llama-7b"
    large: str = "opt-13b"
    huge: str = "opt-66b"
    others: Mapping[str, tuple[str, int, int]] = field(
        default_factory=lambda: {
            "bert": ("bert-large", 4, 64),
            "whisper": ("whisper-tiny", 4, 16),  # a recording is 448 tokens, whatever is said: seconds
            "wide_resnet": ("wide_resnet50_2", 4, 64),
        }
    )
    batches: Sequence[int] = (1, 8, 32)
    wide: int = 128
    prompt: int = 512
    firsts: Sequence[int] = (512, 4096)
    tokens: int = 96
    rounds: int = 3
    many: int = 16
    kv_bytes: int = 12 << 30
    rate_s: float = 6.0
    rival_tokens: int = 64


DRY = Sizes(
    decoder="llama-tiny", large="opt-tiny", huge="opt-tiny",
    others={
        "bert": ("bert-tiny", 2, 4),
        "whisper": ("whisper-mini", 2, 2),
        "wide_resnet": ("wide_resnet-tiny", 2, 2),
    },
    batches=(1, 2), wide=3, prompt=20, firsts=(20, 40), tokens=12, rounds=1, many=4, kv_bytes=64 << 20,
    rate_s=0.5, rival_tokens=3,
)  # fmt: skip
STAGES, DRY_STAGES = 8, 4
RIVAL_S = 240.0
EVENTS_S = 1.5
"""After so long workers have written down their last waves."""
SPARE_BYTES = 30_000_000_000
"""What the disk must have left for the largest bundle, 13 B parameters in two bytes."""
LOG_TEXT = 24_000
"""Of what the workers said where something went wrong: sixteen of them must have their turn."""


@dataclass(slots=True)
class Bench:
    """What every part uses.

    Attributes:
        record: where lines go.
        sizes: see `Sizes`.
        gpus: how many are there; a dry run plays as many.
        is_dry: on the CPU.
        folder: of bundles.
        rival: unsplit models.
        until_s: end of the present part, `time.monotonic`.
    """

    record: Record
    sizes: Sizes
    gpus: int
    is_dry: bool
    folder: Path
    rival: Orders
    until_s: float = 0.0

    @property
    def stages(self) -> int:
        """Stages of the cut decoder."""
        return DRY_STAGES if self.is_dry else STAGES

    @property
    def left_s(self) -> float:
        """Seconds left to the part."""
        return self.until_s - time.monotonic()

    def device(self, index: int) -> str:
        """A device's name."""
        return "cpu" if self.is_dry else f"cuda:{index}"

    @property
    def several(self) -> list[int]:
        """Numbers of GPUs beyond one that are measured: powers of two up to all that are there."""
        return [count for count in (2, 4, 8) if count <= self.gpus]

    def devices(self, count: int) -> list[str]:
        """The first so many devices."""
        return [self.device(index) for index in range(count)]

    def bundle(self, shape: str, stages: int) -> Path:
        """A split model, made if need be.

        Raises:
            BenchError: it cannot be.
        """
        begin_s = time.monotonic()
        name = f"{shape.replace('_', '-')}-{stages}"
        dtype = "fp32" if self.is_dry else "bf16"
        try:
            made = split(f"random:{shape}", stages, "uniform", self.folder / name, name, dtype)
        except SplitError as error:
            raise BenchError(f"{shape} cannot be split into {stages}: {error}") from error
        self.record.add("note", text=f"{name} split in {time.monotonic() - begin_s:.1f} s")
        return made

    def check_room(self, nbytes: int, gpus: int) -> None:
        """Whether disk and devices can take a model of that size.

        Raises:
            BenchError: they cannot; names both sizes.
        """
        free = shutil.disk_usage(self.folder.parent).free
        if free < nbytes + SPARE_BYTES:
            raise BenchError(
                f"{nbytes / 1e9:.0f} GB of parameters on a disk with {free / 1e9:.0f} GB free, "
                f"of which {SPARE_BYTES / 1e9:.0f} are left alone"
            )
        if not self.is_dry:
            import torch

            memory = sum(torch.cuda.get_device_properties(i).total_memory for i in range(gpus))
            if memory < 1.2 * nbytes:
                sizes = f"{nbytes / 1e9:.0f} GB of parameters, {memory / 1e9:.0f} GB of memory"
                raise BenchError(f"{sizes} on {gpus} GPUs")

    def spare(self, bundle: Path) -> None:
        """Removes a bundle that no other part uses, where the disk is short: 64 GiB do not hold all."""
        if shutil.disk_usage(self.folder).free < SPARE_BYTES:
            shutil.rmtree(bundle, ignore_errors=True)

    def setup(self, bundle: Path, devices: Sequence[str], *, rows: int = 0, **more: Any) -> Setup:
        """How a decoder runs; `rows`: requests at once, the most of `Sizes.batches` where 0."""
        most = max(self.sizes.batches)
        rows = rows or most
        return Setup(bundle, devices, self.sizes.kv_bytes * max(1, rows // most), rows, **more)


async def way(
    bench: Bench,
    gpus: int,
    name: str,
    setup: Setup,
    *,
    rival: str = "",
    rounds: int = 0,
    at_once: int = 1,
    batches: Sequence[int] = (),
) -> None:
    """One of our ways: time per step and to the first token, beside a rival in turn.

    Args:
        bench: see there.
        gpus: how many it uses.
        name: of the row.
        setup: how it runs.
        rival: the eager rival's row, empty for none.
        rounds: how often, 0: `Sizes.rounds`.
        at_once: requests are so many times those of `batches`, for several replicas.
        batches: requests at once, none: `Sizes.batches`.
    """
    sizes, record = bench.sizes, bench.record
    batches = batches or sizes.batches
    windows: list[tuple[int, float, float]] = []
    begin_s = time.monotonic()

    def tell(text: str) -> None:
        record.add("log", system=name, text=text[-LOG_TEXT:])

    async with asyncio.timeout(max(5.0, bench.left_s)), serving(setup, tell) as up:
        record.add("note", text=f"{name} ready after {time.monotonic() - begin_s:.1f} s")
        config = up.pipeline.config
        warm = prompts_of(up.pipeline, max(batches) * at_once, WARM_PROMPT)
        await complete(up.session, up.url, warm, WARM_TOKENS)
        if rival:  # its first steps load kernels, as ours did
            for batch in batches:
                ask(bench, "step", **_eager(gpus, config, batch, sizes.prompt, sizes.rival_tokens))
        for number in range(rounds or sizes.rounds):
            for batch in batches:
                prompts = prompts_of(up.pipeline, batch * at_once, sizes.prompt)
                answers = (await complete(up.session, up.url, prompts, sizes.tokens)).answers
                seconds = batch * at_once / steady_tokens_per_s(answers)
                windows.append((batch * at_once, *steady_window(answers)))
                record.add(
                    "step", gpus=gpus, system=name, batch=batch * at_once, seconds=seconds, round=number
                )
                if rival:
                    rival_step(bench, rival, name, gpus, config, batch)
            for length in sizes.firsts:
                await _first(bench, up, name, gpus, length, rival)
            if bench.left_s < (time.monotonic() - begin_s) / (number + 2):
                record.add("note", text=f"{name}: no time for more than {number + 1} rounds")
                break
        await asyncio.sleep(EVENTS_S)
        for said in up.hand_offs():
            record.add("note", text=f"{name}: {said}")
        record.add("waves", gpus=gpus, system=name, seconds={str(k): v for k, v in up.waves_s().items()})
        for batch, begin_s, end_s in windows:
            record.add("idle", gpus=gpus, system=name, batch=batch, parts=up.idle_parts(begin_s, end_s))


async def _first(bench: Bench, up: Up, name: str, gpus: int, length: int, rival: str) -> None:
    if length + 1 > up.pipeline.context_length:
        return
    answers = (await complete(up.session, up.url, prompts_of(up.pipeline, 1, length), 1)).answers
    bench.record.add("first", gpus=gpus, system=name, prompt=length, seconds=answers[0].first_s)
    if rival:
        times = ask(bench, "step", **_eager(gpus, up.pipeline.config, 1, length, 1))
        if times:
            bench.record.add("first", gpus=gpus, system=rival, prompt=length, seconds=times["prefill_s"])


def rival_step(
    bench: Bench,
    rival: str,
    beside: str,
    gpus: int,
    config: Mapping[str, Any],
    batch: int,
    kind: str = "eager",
) -> None:
    """A rival's time per step; `beside`: the way of ours in whose round it is measured."""
    sizes = bench.sizes
    order = _eager(gpus, config, batch, sizes.prompt, sizes.rival_tokens)
    times = ask(bench, "step", **{**order, "way": kind})
    if times:
        bench.record.add(
            "step", gpus=gpus, system=rival, batch=batch, seconds=times["token_s"], beside=beside
        )


def _eager(gpus: int, config: Mapping[str, Any], batch: int, prompt: int, tokens: int) -> dict[str, Any]:
    return {
        "way": "eager", "gpus": gpus, "batch": batch, "prompt": prompt, "tokens": tokens,
        "config": dict(config),
    }  # fmt: skip


def ask(bench: Bench, do: str, **order: Any) -> Any:
    """What the rival answers, None (and a line that says why) where it cannot."""
    try:
        return bench.rival.ask(min(RIVAL_S, max(5.0, bench.left_s)), do=do, **order)
    except OrderError as error:
        bench.record.add("error", text=str(error))
    except BenchError as error:  # it hung, or is gone: another one goes on
        bench.record.add("error", text=str(error))
        bench.rival.close()
        bench.rival = Orders(engine_gpu_rivals.answer, "transformers")
    return None
