"""The GPU rows of `keystage bench engine`: a 7B Llama shape in eight stages beside what else runs it.

Chooses the parts (`engine_gpu_parts`), runs them into a record of lines, and makes rows and figures of all
lines that are there (`engine_gpu_table`): `--parts` measures some of them, and a later run others.
`python -m keystage.bench.engine_gpu_table FOLDER LINES...` makes the page from records of elsewhere.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from keystage.bench import engine_gpu_rivals
from keystage.bench.engine_gpu_bench import DRY, Bench, Sizes
from keystage.bench.engine_gpu_parts import PARTS, measure
from keystage.bench.engine_gpu_process import Orders
from keystage.bench.engine_gpu_record import Record, read
from keystage.bench.engine_gpu_table import result
from keystage.bench.frame import BenchError, BenchResult
from keystage.loadgen.machine import facts

QUICK_SHAPE = "opt-125m"
DRY_GPUS = 2
TOTAL_S = 3600.0
LINES = "engine-gpu.jsonl"


def run(
    *,
    quick: bool = False,
    full: bool = False,
    out: Path = Path("out"),
    parts: Sequence[str] = (),
    seconds: float = TOTAL_S,
    dry: bool = False,
    gpus: int = 0,
) -> BenchResult:
    """Measures on the GPUs that are there.

    Args:
        quick: a small decoder, one round.
        full: twice as many rounds.
        out: folder of the record and of the split models.
        parts: which, in their order; none: all.
        seconds: after which nothing new is begun.
        dry: tiny shapes on the CPU: a rehearsal.
        gpus: at most so many of them, 0: all.

    Raises:
        BenchError: unknown part; fewer GPUs than asked for; nothing was measured.
    """
    unknown = [name for name in parts if name not in PARTS]
    if unknown:
        raise BenchError(f"no parts {', '.join(unknown)}; there are {', '.join(PARTS)}")
    there = gpus or DRY_GPUS if dry else _gpus()
    if gpus > there:
        raise BenchError(f"--gpus {gpus}: this machine shows {there}")
    count = gpus or there
    sizes = DRY if dry else Sizes(decoder=QUICK_SHAPE, rounds=1) if quick else Sizes(rounds=3 * (1 + full))
    out.mkdir(parents=True, exist_ok=True)
    path = out / ("engine-dry.jsonl" if dry else LINES)
    record = Record(path)
    record.add("machine", **dataclasses.asdict(facts()))
    with Orders(engine_gpu_rivals.answer, "transformers") as rival:
        bench = Bench(record, sizes, count, dry, out.absolute() / "bundles", rival)
        try:
            asyncio.run(measure(bench, [name for name in PARTS if not parts or name in parts], seconds))
        finally:
            bench.rival.close()
    return result(read([path]))


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()
