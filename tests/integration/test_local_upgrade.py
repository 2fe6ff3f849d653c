"""A supervisor that becomes its successor by `exec`: what goes on, what is refused, and what ends with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
from support.local_function import function
from support.upgrade_world import Up, until

from keystage.bundle.api import emulated
from keystage.bundle.store import write
from keystage.controller.domain.platform import PlatformError
from keystage.local.api import Deployment, UpgradeRequest
from keystage.local.client import begin_upgrade, upgrade_status
from keystage.local.errors import LocalError, NotUpgraded
from keystage.local.pipeline import deployments_for

NAME = "demo"
PATH = os.environ.get("PYTHONPATH", "")


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    """Without a KeysManager; a router, a stage and a program of somebody else's."""
    started = Up(tmp_path / "home", Path(PATH), KEYSTAGE_KEYSMANAGER_OFF="1")
    try:
        started.deploy(*pipeline(tmp_path), function())
        until(lambda: all(started.ready(name) for name in (NAME, f"{NAME}-stage-0", "echo")), "all is ready")
        yield started
    finally:
        started.stop()


def pipeline(folder: Path) -> list[Deployment]:
    bundle = folder / "bundle"
    bundle.mkdir()
    described = emulated(NAME, 1, execution="single-pass")
    write(bundle, described)
    return deployments_for(bundle, described, device="emulated:alpha=0,beta=0")


def upgraded(up: Up, path: str = PATH) -> None:
    """Lets it become itself once more."""
    incarnation = up.view().incarnation
    begin_upgrade(up.home, UpgradeRequest(sys.executable, path))

    def is_over() -> bool:
        try:
            return up.view().incarnation != incarnation and upgrade_status(up.home).is_over
        except (LocalError, PlatformError):
            return False  # it does not listen yet

    until(is_over, f"the upgrade is over: {up.log()}")
    assert upgrade_status(up.home).error == ""


def pids(up: Up) -> dict[str, int]:
    return {r.replica: r.pid for r in up.view().replicas if r.state == "ready"}


@pytest.mark.slow
def test_what_runs_goes_on_and_our_own_parts_are_renewed(up: Up) -> None:
    parts, replicas = up.parts(), pids(up)
    gateway = up.gateway
    upgraded(up)
    assert up.process.poll() is None
    after = pids(up)
    assert after["echo-0"] == replicas["echo-0"]  # somebody else's program is not touched
    assert len(after) == 3
    assert not set(after) & {f"{NAME}-0", f"{NAME}-stage-0-0"}
    assert not set(up.parts().values()) & set(parts.values())
    with urllib.request.urlopen(f"{gateway}/function/echo/x", timeout=30) as answer:
        assert answer.status == 200
    # What was handed over is followed as before: a death is seen, and the next one has the next number.
    os.kill(after["echo-0"], signal.SIGKILL)
    until(lambda: "echo-1" in pids(up), "the program is started again")
    assert not [p for p in psutil.Process(up.process.pid).children() if p.status() == psutil.STATUS_ZOMBIE]


@pytest.mark.slow
def test_it_can_be_done_again_and_its_end_ends_everything(up: Up) -> None:
    upgraded(up)
    upgraded(up)
    family = psutil.Process(up.process.pid).children(recursive=True)
    run = Path((up.home / "run").read_text().strip())
    assert len(family) >= 6
    up.process.kill()
    up.process.wait()
    until(lambda: not any(is_alive(p) for p in family), "nothing outlives it")
    until(lambda: not run.exists(), "its sockets are removed")


def is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


@pytest.mark.slow
def test_an_orderly_end_after_it_leaves_nothing(up: Up) -> None:
    upgraded(up)
    family = psutil.Process(up.process.pid).children(recursive=True)
    up.stop()
    assert up.process.returncode == 0, up.log()
    assert not any(is_alive(p) for p in family)
    assert not (up.home / "run").exists()
    deployed = msgspec.json.decode((up.home / "functions.json").read_bytes())
    assert len(deployed) == 3


@pytest.mark.slow
def test_what_cannot_take_over_is_refused_and_nothing_is_touched(up: Up, tmp_path: Path) -> None:
    parts, replicas = up.parts(), pids(up)
    broken = tmp_path / "broken"
    (broken / "keystage" / "local").mkdir(parents=True)
    (broken / "keystage" / "local" / "resume.py").write_text("raise SystemExit('this one is broken')\n")
    for python, path, reason in (
        ("/nowhere/python", "", "/nowhere/python cannot be executed: No such file or directory"),
        ("/bin/true", "", "/bin/true holds no Keystage that can take over: exit code 0"),
        (sys.executable, str(broken), "holds no Keystage that can take over: this one is broken"),
    ):
        with pytest.raises(NotUpgraded, match=reason):
            begin_upgrade(up.home, UpgradeRequest(python, path))
    assert upgrade_status(up.home).is_over
    assert (up.parts(), pids(up)) == (parts, replicas)


def test_the_command_says_that_nothing_runs(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "keystage.cli.main", "upgrade", "--home", str(tmp_path)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    assert "nothing runs on state folder" in done.stderr
