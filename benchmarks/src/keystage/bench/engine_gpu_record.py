"""What `keystage bench engine` measures on GPUs, written down line by line as it comes.

A lease that ends in the middle loses nothing: the table is made of whatever lines there are, from one run
or from several (`engine_gpu_table.result`). A line is a JSON object with `kind`: `machine`, `limit`, `step`,
`first`, `rate`, `waves`, `timeline`, `note`, `error`, `log`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Line = dict[str, Any]


class Record:
    """Lines of one run, appended to a file.

    Args:
        path: made if missing.

    Attributes:
        lines: those of this run.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._begin_s = time.monotonic()
        self.lines: list[Line] = []

    def add(self, kind: str, **fields: Any) -> None:
        """Writes a line, and shows it."""
        line: Line = {"kind": kind, "at_s": round(time.monotonic() - self._begin_s, 1), **fields}
        self.lines.append(line)
        text = json.dumps(line)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(text + "\n")
        print(text[:600], file=sys.stderr, flush=True)


def read(paths: Iterable[Path]) -> list[Line]:
    """The lines of several files; a last one that was cut off is left out."""
    found: list[Line] = []
    for path in paths:
        for text in path.read_text(encoding="utf-8").splitlines():
            try:
                found.append(json.loads(text))
            except ValueError:
                continue
    return found
