"""The files of `manifests/`: the chart with its default values, for people without helm.

`make manifests` writes them (`python -m support.manifests`, run in `tests/`); a test holds them against
the chart.
Secrets are no part of them, a key must not be public; the README there says how to make them.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from support.helm import ROOT, render_text

FOLDER = ROOT / "manifests"
SETS = ("wire.create=false", "basicAuth.create=false")
HEADER = "# Rendered from charts/keystage by `make manifests`; change it there.\n"
_SOURCE = re.compile(r"# Source: keystage/templates/(\S+)\n")


def manifests() -> dict[str, str]:
    """Text of each file, by name: one for each template of the chart that renders to something."""
    files: dict[str, str] = {}
    for document in re.split(r"^---\n", render_text(sets=SETS), flags=re.MULTILINE):
        source = _SOURCE.match(document)
        if source is None or not document[source.end() :].strip():
            continue
        body = "\n".join(line.rstrip() for line in document[source.end() :].strip().splitlines())
        before = files.get(source[1])
        files[source[1]] = f"{before}---\n{body}\n" if before else f"{HEADER}{body}\n"
    return files


def write(folder: Path = FOLDER) -> None:
    """Writes them; a file whose template is gone goes too."""
    folder.mkdir(exist_ok=True)
    files = manifests()
    for old in folder.glob("*.yaml"):
        if old.name not in files:
            old.unlink()
    for name, text in files.items():
        (folder / name).write_text(text)
    sys.stdout.write(f"{len(files)} files in {folder}\n")


if __name__ == "__main__":
    write()
