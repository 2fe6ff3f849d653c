"""`keystage bench engine`: the stage engine beside what people use instead, on a CPU or on GPUs.

On a CPU `engine_cpu` measures, on GPUs `engine_gpu`; here is the choice, and where the page with the
results goes. A quick run is a look, not a result: it goes to the output folder.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

from keystage.bench import engine_report
from keystage.bench.frame import BenchError, BenchResult, document
from keystage.loadgen.machine import facts


def run(
    *,
    quick: bool = False,
    full: bool = False,
    cpu: bool = False,
    out: Path = Path("out"),
    parts: str = "",
    seconds: float = 0.0,
    dry: bool = False,
    gpus: int = 0,
) -> BenchResult:
    """Measures, and writes `engine-SECTION.json` and `engine.md`.

    Args:
        quick: few rounds and few tokens, into the output folder.
        full: also what takes long.
        cpu: on the CPU even where there is a GPU.
        out: folder for what is no result, and for everything outside a checkout.
        parts: on GPUs: which parts, by commas; empty for all (`engine_gpu_parts.PARTS`).
        seconds: on GPUs: nothing new is begun after so many; 0 for no bound.
        gpus: use at most so many GPUs, 0: all that are there.
        dry: what runs on GPUs, with tiny shapes on the CPU, into the output folder.

    Raises:
        BenchError: what is needed is not there.
    """
    is_gpu = dry or not (cpu or not _has_gpu())
    section, module = ("gpu", "engine_gpu") if is_gpu else ("cpu", "engine_cpu")
    if not is_gpu and (parts or seconds or gpus):
        raise BenchError("--gpus, --parts and --seconds are for GPUs (none is used here), and --dry")
    if importlib.util.find_spec(f"keystage.bench.{module}") is None:
        raise BenchError(f"keystage.bench.{module} is not installed; --cpu measures on the CPU")
    options: dict[str, Any] = {}
    if is_gpu:
        chosen = [name for name in parts.split(",") if name]
        options = {"parts": chosen, "dry": dry, "gpus": gpus} | ({"seconds": seconds} if seconds else {})
    result: BenchResult = importlib.import_module(f"keystage.bench.{module}").run(
        quick=quick, full=full, out=out, **options
    )
    is_checkout = engine_report.FOLDER.parent.is_dir()
    folder = engine_report.FOLDER if is_checkout and not quick and not dry else out
    engine_report.write(folder, section, document("engine", result))
    return result


def _has_gpu() -> bool:
    return facts().torch_device not in ("", "cpu")
