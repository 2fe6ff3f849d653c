"""What would fail later, in some process's log or under load, is refused by the command that was typed."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

WAIT_S = 60.0


def keystage(*arguments: str, **env: str) -> tuple[int, str]:
    """A command's exit code and what it wrote to standard error."""
    done = subprocess.run(
        [sys.executable, "-m", "keystage.cli.main", *arguments],
        env={**os.environ, **env}, capture_output=True, text=True, timeout=WAIT_S, check=False,
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command", ["up", "run"])
def test_a_setting_of_the_controller(command: str, tmp_path: Path) -> None:
    home = str(tmp_path / "home")
    code, said = keystage(command, "--home", home, "--port", "0", KEYSTAGE_POLICY='{"nope":1}')
    assert code == 2
    assert "KEYSTAGE_POLICY has no setting nope" in said
    assert not (tmp_path / "home").exists()


@pytest.mark.slow
@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a GPU")
@pytest.mark.parametrize("command", ["up", "run"])
def test_a_device_that_is_not_there(command: str, tmp_path: Path) -> None:
    code, said = keystage(command, "--home", str(tmp_path / "home"), "--port", "0", "--device", "cuda:0")
    assert code == 2
    assert "--device cuda:0: this machine shows no GPU" in said
    assert not (tmp_path / "home").exists()


@pytest.mark.slow
def test_a_bundle_that_is_served_is_not_replaced(tmp_path: Path) -> None:
    home = tmp_path / "home"
    emulate = ("emulate", "llm", "--out", str(home / "bundles" / "llm"))
    assert keystage(*emulate)[0] == 0
    before = (home / "bundles" / "llm" / "pipeline.json").read_bytes()
    with (home / "lock").open("w") as lock:
        lock.write("4711\n")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, said = keystage(*emulate, "--stages", "2")
        assert code == 2
        assert "process 4711 serves from this state folder" in said
        assert (home / "bundles" / "llm" / "pipeline.json").read_bytes() == before
        assert keystage("emulate", "other", "--out", str(home / "bundles" / "other"))[0] == 0
    assert keystage(*emulate, "--stages", "2")[0] == 0
    assert (home / "bundles" / "llm" / "pipeline.json").read_bytes() != before
