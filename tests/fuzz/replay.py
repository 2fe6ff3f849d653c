"""Every target once, with its seeds and regressions, in one process: `python -m fuzz.replay [TARGET...]`.

Quick enough for each run of the tests. A target of which no seed is taken tests nothing, and fails too.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import traceback
from pathlib import Path

from fuzz.child import Watch
from fuzz.target import Target
from fuzz.targets import TARGETS


def replay(target: Target, folder: Path) -> list[str]:
    """What went wrong, in words."""
    scratch = folder / "scratch"
    scratch.mkdir(parents=True)
    wrong: list[str] = []
    ready = target.ready(scratch)
    watch = Watch(target, ready, folder)
    inputs = {f"seed {number}": seed for number, seed in enumerate(ready.seeds)}
    for name, data in inputs.items():
        wrong += _one(watch, target, name, data)
    if not watch.taken:
        wrong.append(f"{target.name}: none of {len(inputs)} seeds is taken")
    for name, data in target.regressions().items():
        wrong += _one(watch, target, name, data)
    print(f"{target.name}: {watch.executions} inputs, {watch.taken} taken", flush=True)
    return wrong


def _one(watch: Watch, target: Target, name: str, data: bytes) -> list[str]:
    try:
        watch.run(data)
    except BaseException:  # noqa: BLE001  # whatever it is, the others are looked at too
        return [f"{target.name}, {name}: {data[:300]!r}\n{traceback.format_exc()}"]
    return []


def main() -> int:
    """Replays what is named, or everything."""
    logging.disable(logging.CRITICAL)
    asked = set(sys.argv[1:])
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(prefix="keystage-fuzz-") as place:
        for target in TARGETS:
            if not asked or target.name in asked:
                wrong += replay(target, Path(place) / target.name)
    print("\n\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # modules under test may hold threads
