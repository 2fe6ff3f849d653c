"""The example of docs/streams.md runs as it is printed."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from keystage.streams.graph_checks import Fault

DOC = Path(__file__).parents[2] / "docs" / "streams.md"


def _blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", DOC.read_text(), re.DOTALL)


def test_the_example_runs_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    handler, caller = _blocks()[:2]
    (tmp_path / "handler.py").write_text(handler)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "handler", raising=False)
    names: dict[str, object] = {}
    exec(compile(caller, "caller", "exec"), names)
    run = names["run"]
    answers = run.answers  # type: ignore[attr-defined]
    assert [sorted(msgspec.json.decode(answer.body)) for answer in answers] == [["label"], ["label"]]
    printed = capsys.readouterr().out
    assert f"```\n{printed}```" in DOC.read_text()
    monkeypatch.delitem(sys.modules, "handler")


def test_every_fault_is_described() -> None:
    text = DOC.read_text()
    assert [fault for fault in get_args(Fault) if fault not in text and fault != "no modules"] == []
