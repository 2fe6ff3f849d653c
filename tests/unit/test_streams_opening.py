"""From an import path to a program."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from keystage.streams.api import ProgramError
from keystage.streams.opening import open_program

PURE = ["graph", "graph_checks", "flow", "state"]
LIGHT = [*PURE, "api", "running", "runtime", "local", "opening"]
HANDLER = """
from keystage.streams.api import Message, Program, Stream, StreamModule

class Echo(StreamModule):
    def compute(self, messages):
        return messages

def program(name="echo"):
    text, out = Stream("text"), Stream("out")
    return Program(name, {"echo": Echo([text], [out])}, text, out,
                   lambda body, kind: Message({"text": body.decode()}),
                   lambda message: (message.header["text"].encode(), "text/plain"))

def number():
    return 7

broken = 3
"""


@pytest.fixture
def handler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = "streams_opening_handler"
    (tmp_path / f"{name}.py").write_text(HANDLER)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_a_users_program_is_made_with_its_options(handler: str) -> None:
    assert open_program(f"{handler}:program").name == "echo"
    assert open_program(f"{handler}:program", {"name": "other"}).name == "other"


@pytest.mark.parametrize(
    ("path", "options", "words"),
    [
        ("nothing", {}, "named package.module:function, got 'nothing'"),
        ("no_such_module_here:program", {}, "there is no module no_such_module_here"),
        ("{}:missing", {}, "has no function missing"),
        ("{}:broken", {}, "has no function broken"),
        ("{}:number", {}, "returned int, not a Program"),
        ("{}:program", {"size": 3}, r"options \['size'\]"),
    ],
)
def test_what_cannot_be_made_says_why(handler: str, path: str, options: dict[str, int], words: str) -> None:
    with pytest.raises(ProgramError, match=words):
        open_program(path.format(handler), options)


def test_a_program_that_lacks_a_package_says_so_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "streams_lacking.py").write_text("import no_such_package_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_package_at_all"):
        open_program("streams_lacking:program")


def test_graphs_and_modules_are_imported_without_torch() -> None:
    names = ", ".join(f"keystage.streams.{name}" for name in LIGHT)
    code = f"import sys, {names}; print('torch' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert found.stdout == "False\n"
