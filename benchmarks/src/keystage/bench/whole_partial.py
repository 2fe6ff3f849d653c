"""What a benchmark of the whole has found so far, kept on disk, so that a run cut short is no loss.

Before it: `e2e`, `mixed` and `soak` hand over a result after every cell. After it: `bench-NAME.partial.json`
in the output folder, of the form of `bench-NAME.json`, with what is missing in its notes. A cell that fails
is noted and does not end a run; a run with failed cells is no result.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from keystage.bench.frame import BenchResult, document
from keystage.loadgen import files


def keep(name: str, result: BenchResult, out: Path, missing: str) -> Path:
    """Writes what there is; a reader never sees half a file.

    Args:
        name: of the benchmark.
        result: of the cells so far.
        out: the folder, made if missing.
        missing: what has not run yet, in words.

    Raises:
        OSError: the folder cannot be written.
    """
    out.mkdir(parents=True, exist_ok=True)
    path = partial_path(name, out)
    made = document(name, dataclasses.replace(result, disturbance=f"not run to its end: {missing}"))
    with files.whole(path) as part:
        part.write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")
    return path


def partial_path(name: str, out: Path) -> Path:
    """Where `keep` writes."""
    return out / f"bench-{name}.partial.json"


def finished(name: str, result: BenchResult, out: Path, failed: Sequence[str]) -> BenchResult:
    """The result of a run that came to its end: failed cells make it none; the partial file goes.

    Args:
        name: of the benchmark.
        result: of all cells that did not fail.
        out: the folder of the partial file.
        failed: the failed cells with their reasons.
    """
    partial_path(name, out).unlink(missing_ok=True)
    if not failed:
        return result
    reasons = [result.disturbance] if result.disturbance else []
    return dataclasses.replace(
        result,
        notes=[*(f"FAILED: {text}" for text in failed), *result.notes],
        disturbance="; ".join([*reasons, f"{len(failed)} cells failed"]),
    )


def note_failure(failed: list[str], label: str, error: Exception) -> None:
    """Keeps and prints a cell's failure."""
    failed.append(f"{label}: {error}")
    print(f"FAILED: {failed[-1]}", file=sys.stderr)
