"""`benchmarks/results/neustream.md`: what `keystage bench neustream` found, as a page beside its JSON.

Before: `neustream.run`. After: readers. The JSON holds every score.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from keystage.bench.batching_report import table

FOLDER = Path("benchmarks/results")

_HEAD = """# Stream programs on emulated devices

Written by `keystage bench neustream`; not edited by hand. NeuStream's sections 6.2 to 6.5, remade: the
product's scheduling on profiles that the paper's authors published, beside rivals tuned with equal effort.
Shares are requests in time of those offered; ratios are ours over the rival's, with 95 % intervals.
"""


def write(
    folder: Path, document: Mapping[str, Any], tables: Mapping[str, Sequence[Mapping[str, Any]]]
) -> Path:
    """Writes `neustream.json` and `neustream.md`.

    Args:
        folder: made if missing.
        document: of `frame.document`, with the scores.
        tables: rows by title.

    Returns:
        The page.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "neustream.json").write_text(json.dumps(document) + "\n", encoding="utf-8")
    machine = document["machine"]
    lines = [_HEAD, f"Machine: {machine['cpu_model']}, {machine['cores']} cores, {machine['system']}.", ""]
    for title, rows in tables.items():
        lines += [f"## {title}", "", *table(rows), ""]
    lines += ["## Figures", "", *table(_figures(document)), ""]
    lines += ["## How", "", *(f"- {note}" for note in document["notes"])]
    page = folder / "neustream.md"
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return page


def _figures(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = []
    for name, value in document["figures"].items():
        low, high = document["spread"][name]["quartiles"]
        found.append(
            {
                "figure": f"`{name}`",
                "median": f"{value:.4g}",
                "quartiles": f"{low:.4g} .. {high:.4g}",
                "rounds": document["spread"][name]["rounds"],
            }
        )
    return found
