"""Fuzzing works: every target takes a seed, old findings stay fixed, and what is wrong is noticed.

In processes of their own, as `make fuzz` has them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.packages import need_package

TESTS = Path(__file__).resolve().parents[1]
BUDGET_S = 20


def fuzz(*arguments: str, module: str = "fuzz", timeout_s: float = 150.0) -> subprocess.CompletedProcess[str]:
    """Runs a command of the fuzzer."""
    env = {**os.environ, "PYTHONPATH": str(TESTS)}
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(
        command, cwd=TESTS, env=env, capture_output=True, text=True, timeout=timeout_s, check=False
    )


@pytest.mark.slow
def test_seeds_are_taken_and_old_findings_stay_fixed() -> None:
    need_package("gguf")
    said = fuzz(module="fuzz.replay")
    assert said.returncode == 0, said.stdout[-8000:] + said.stderr[-2000:]
    assert len(re.findall(r"inputs, [1-9]\d* taken", said.stdout)) >= 54


@pytest.mark.slow
@pytest.mark.timeout(330)  # ten seconds where there is room
def test_crashes_hangs_and_memory_are_noticed_and_their_inputs_kept(tmp_path: Path) -> None:
    said = fuzz(
        "--only", "itself", "--seconds", "120", "--seed", "1", "--corpus", str(tmp_path), timeout_s=300
    )
    assert said.returncode == 1, said.stdout + said.stderr
    assert "4 crashes" in said.stdout
    for name, kind, word in (
        ("itself-crash", "crash", "KeyError"),
        ("itself-hang", "hang", "more than 2 s"),
        ("itself-memory", "memory", "MiB more than at the start"),
        ("itself-claim", "memory", "MemoryError"),
    ):
        (why,) = (tmp_path / name).glob(f"{kind}-*.txt")
        assert word in why.read_text()
        assert why.with_suffix("").is_file()
    again = fuzz("--again", "itself-crash", str(next((tmp_path / "itself-crash").glob("crash-*[0-9a-f]"))))
    assert again.returncode != 0
    assert "KeyError: 'found'" in again.stderr


@pytest.mark.slow
@pytest.mark.flaky(reruns=0)  # what it finds is there, whether or not a second run finds it
@pytest.mark.timeout(600)  # its seconds where there is room, and the imports of 54 processes
def test_a_short_run_of_fuzzing_finds_nothing(tmp_path: Path) -> None:
    need_package("gguf")
    # One seed, so that the gate says the same twice; `make fuzz` takes another each time.
    said = fuzz(
        "--seconds", str(BUDGET_S), "--seed", "1", "--no-http", "--corpus", str(tmp_path), timeout_s=570
    )
    assert said.returncode == 0, said.stdout[-12000:] + said.stderr[-2000:]
    rows = re.findall(r"^[a-z0-9-]+ +(\d+) +(\d+) ", said.stdout, re.MULTILINE)
    assert len(rows) >= 54
    assert all(int(executions) > 0 for executions, _ in rows)
