"""`benchmarks/results/batching.md`: what `keystage bench batching` found, as a page beside its JSON.

Before: `batching.run`. After: readers. The JSON holds every sample; the page is made from it alone, so
`python -m keystage.bench.batching_report FOLDER` makes it anew from a copied file.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from keystage.bench.frame import BenchError

FOLDER = Path("benchmarks/results")
DOCUMENT = "batching.json"
PAGE = "batching.md"


def write(folder: Path, document: Mapping[str, Any]) -> Path:
    """Writes document and page.

    Args:
        folder: made if missing.
        document: of `frame.document`, with `tables` (title to rows) added.

    Returns:
        The page.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / DOCUMENT).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return render(folder)


def render(folder: Path) -> Path:
    """Makes the page from the document in the folder.

    Raises:
        BenchError: there is none, or it is garbled.
    """
    path = folder / DOCUMENT
    try:
        text = _text(json.loads(path.read_bytes()))
    except FileNotFoundError as error:
        raise BenchError(f"{folder} holds no {DOCUMENT}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BenchError(f"{path} is no document of bench batching: {error}") from error
    page = folder / PAGE
    page.write_text(text, encoding="utf-8")
    return page


def _text(document: Mapping[str, Any]) -> str:
    machine = document["machine"]
    lines = [
        "# Batch scheduling on emulated GPUs",
        "",
        "Written by `keystage bench batching` from `batching.json` beside this page; not edited by hand.",
        "Time is emulated: no figure depends on the machine that it ran on.",
        "",
        f"{machine['system']}, Python {machine['python']}.",
        "",
        *table(
            [
                {
                    "figure": f"`{name}`",
                    "median": value,
                    "quartiles": " .. ".join(f"{at:.6g}" for at in document["spread"][name]["quartiles"]),
                    "samples": document["spread"][name]["rounds"],
                }
                for name, value in document["figures"].items()
            ]
        ),
    ]
    for title, rows in document["tables"].items():
        lines += ["", f"## {title}", "", *(table(rows) if rows else ["None."])]
    lines += ["", "## How it was measured", "", *(f"- {note}" for note in document["notes"])]
    return "\n".join(lines) + "\n"


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Rows of equal keys as a table of Markdown."""
    columns = list(rows[0])
    return [
        _line(columns),
        _line(["---"] * len(columns)),
        *(_line([_shown(row.get(column, "")) for column in columns]) for row in rows),
    ]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


def _shown(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    print(render(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER))
