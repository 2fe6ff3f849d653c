"""The program of docs/quickstart.md that holds a local world runs as it is printed."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import msgspec

from keystage.bundle.api import emulated
from keystage.bundle.store import write

PAGE = Path(__file__).parents[2] / "docs" / "quickstart.md"
DEVICE = "emulated:alpha=0.0001,beta=0.0001"


def test_the_program_answers(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    source = next(block for block in blocks if "LocalWorld" in block)
    names: dict[str, Any] = {"__name__": "quickstart"}
    exec(compile(source, "quickstart", "exec"), names)
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    write(bundle, emulated("tiny", 2, execution="looping", context_length=64))
    body = b'{"prompt":"ab","max_tokens":3}'
    answer = asyncio.run(names["main"](bundle, tmp_path / "state", body, device=DEVICE))
    assert msgspec.json.decode(answer)["tokens"] == 3
