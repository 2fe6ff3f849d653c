"""Files of results, whole or not there: a run that is ended while it writes leaves no half of one.

Beside `report`, `html`, `plots` and `search`, which write through here. Rows are another matter
(`requestlog`): they are written while the run goes, and a half of them is worth having.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A path beside this one to write to; it takes this one's place when all is written, and goes if not.

    Raises:
        OSError: the folder cannot be written.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        yield part
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def remove(folder: Path, names: Iterable[str]) -> None:
    """Takes away what an earlier run left under these names: it would be read as this run's.

    Raises:
        OSError: one cannot be taken away.
    """
    for name in names:
        (folder / name).unlink(missing_ok=True)
