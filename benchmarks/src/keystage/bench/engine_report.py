"""`benchmarks/results/engine.md`: the one table of `keystage bench engine`, made from measured documents.

Every machine's run leaves `engine-SECTION.json` (section: `cpu`, or what names the GPUs) beside it; the
page is made anew from all that lie there, so that a CPU's run keeps what a GPU's run has measured.
`python -m keystage.bench.engine_report FOLDER` makes it from documents that were copied from elsewhere.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keystage.bench.frame import BenchError

PAGE = "engine.md"
FOLDER = Path("benchmarks/results")

TARGETS = {
    "ms_per_token_b1": "",
    "vs_own_one_stage_b1": "at most 1.15 (8 stages on one GPU)",
    "vs_limit_b1": "at most 1.6",
    "vs_transformers_b1": "at least 3 (GPU), 1 (CPU)",
    "vs_device_map_b1": "at least 4",
    "tokens_per_s_b32_ratio": "at least 2.5",
    "cpu_ratio_b1": "at least 1",
    "cpu_ratio_b8": "at least 1",
    "cpu_ratio_b8_sequential": "at least 3",
    "cpu_vs_own_one_stage_b1": "",
    "cpu_ratio_b1_all_cores": "",
    "cpu_ratio_b8_all_cores": "",
}
"""The figures, by name, and what they should be."""


def write(folder: Path, section: str, document: Mapping[str, Any]) -> Path:
    """Adds a document to the folder and makes the page anew.

    Args:
        folder: made if missing.
        section: name of the machine's section: lower-case letters, digits and dashes.
        document: as `frame.document` makes it.

    Returns:
        The page.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"engine-{section}.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return render(folder)


def render(folder: Path) -> Path:
    """Makes the page from the documents in the folder.

    Raises:
        BenchError: there are none, or one is garbled.
    """
    found = sorted(folder.glob("engine-*.json"))
    if not found:
        raise BenchError(f"{folder} holds no engine-*.json")
    parts = [_HEAD]
    for path in found:
        try:
            parts.append(_section(path.stem.removeprefix("engine-"), json.loads(path.read_bytes())))
        except (ValueError, KeyError, TypeError) as error:
            raise BenchError(f"{path} is no document of bench engine: {error}") from error
    page = folder / PAGE
    page.write_text("\n".join(parts), encoding="utf-8")
    return page


_HEAD = """# The stage engine, measured

Written by `keystage bench engine` from the `engine-*.json` beside this page; not edited by hand. Every row
was measured in the same run as its rivals, in rounds that alternate; figures are medians over the rounds.
"""


def _section(name: str, document: Mapping[str, Any]) -> str:
    machine = document["machine"]
    device = machine["torch_device"]
    place = machine["cpu_model"] if device in ("", "cpu") else device
    software = f"{machine['system']}, Python {machine['python']}, torch {machine['torch']}"
    facts = f"{machine['cpu_model']}, {machine['cores']} cores, {software}.{_doubts(document)}"
    lines = [f"## {name}: {place}", "", facts, ""]
    rows = document["rows"]
    if rows:
        columns = list(rows[0])
        lines += [_line(columns), _line(["---"] * len(columns))]
        lines += [_line([_shown(row.get(column, "")) for column in columns]) for row in rows]
        lines.append("")
    lines += [_line(["figure", "median", "quartiles", "rounds", "target"]), _line(["---"] * 5)]
    for key, value in document["figures"].items():
        spread = document["spread"][key]
        low, high = spread["quartiles"]
        quartiles = f"{_shown(low)} .. {_shown(high)}"
        lines.append(_line([f"`{key}`", _shown(value), quartiles, spread["rounds"], TARGETS.get(key, "")]))
    lines.append("")
    lines += [f"- {note}" for note in document["notes"]]
    return "\n".join(lines) + "\n"


def _doubts(document: Mapping[str, Any]) -> str:
    if document["is_result"]:
        return ""
    reasons = [f"{', '.join(document['noisy'])} spread too widely"] if document["noisy"] else []
    reasons += [document["disturbance"]] if document["disturbance"] else []
    return f" **Not a result: {'; '.join(reasons)}.**"


def _line(cells: list[Any]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "/") for cell in cells) + " |"


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    print(render(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER))
