"""`benchmarks/results/NAME.md` and `.json` of a benchmark that was run whole: its rows, figures and notes.

Before it: a benchmark's `BenchResult`. After it: people, and whoever compares two versions. `--quick` runs
write nothing here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from keystage.bench.frame import BenchResult, document

FOLDER = Path("benchmarks/results")


def write_page(
    name: str,
    title: str,
    result: BenchResult,
    *,
    tables: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
    pictures: Sequence[str] = (),
    folder: Path = FOLDER,
) -> Path:
    """Writes the page and its document.

    Args:
        name: of the benchmark; with `-cuda` behind it where it ran on a GPU.
        title: of the page.
        result: what it found.
        tables: rows by heading, where the result's own rows are not one table.
        pictures: file names beside the page.
        folder: made if missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    made = document(name, result)
    (folder / f"{name}.json").write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    machine = made["machine"]
    command = f"{name.removesuffix('-cuda')} --device cuda" if name.endswith("-cuda") else name
    parts = [f"# {title}\n", f"Written by `keystage bench {command}`; not edited by hand.\n"]
    parts.append("Machine: " + ", ".join(f"{key} {value}" for key, value in machine.items() if value) + ".\n")
    parts += [f"![{picture}]({picture})\n" for picture in pictures]
    for heading, rows in (tables or {"": result.rows}).items():
        if heading:
            parts.append(f"## {heading}\n")
        parts.append(_table(rows))
    parts.append("## Figures\n")
    figures = [
        {
            "figure": key,
            "median": _shown(figure.median),
            "quartiles": " .. ".join(_shown(value) for value in figure.quartiles),
            "runs": len(figure.samples),
            "meaning": figure.meaning,
            "target": figure.target,
        }
        for key, figure in result.figures.items()
    ]
    parts.append(_table(figures))
    parts += [f"- {note}" for note in result.notes]
    if not made["is_result"]:
        parts.append(f"\nNot a result: {made['disturbance'] or ', '.join(made['noisy'])}.")
    page = folder / f"{name}.md"
    page.write_text("\n".join(parts) + "\n", encoding="utf-8")
    return page


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as a Markdown table."""
    if not rows:
        return ""
    keys = list(rows[0])
    lines = ["| " + " | ".join(keys) + " |", "|" + "---|" * len(keys)]
    lines += ["| " + " | ".join(_shown(row.get(key, "")) for key in keys) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value)
