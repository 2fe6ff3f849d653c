"""Who may read the state folder: environments, output and decisions are their owner's alone."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from keystage.controller.decisions import DecisionLog, Record
from keystage.controller.domain.snapshot import Snapshot
from keystage.controller.domain.state import PolicyState
from keystage.controller.policy.decide import decide
from keystage.controller.policy.settings import PolicySettings
from keystage.local import store
from keystage.local.home import Home
from keystage.local.logs import ReplicaLog


@pytest.fixture(autouse=True)
def _usual_mask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_state_folder_that_is_made_is_private_and_one_that_is_there_is_left(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir(mode=0o755)
    for folder, wanted in ((tmp_path / "made", 0o700), (there, 0o755)):
        home = Home(folder, tmp_path)
        home.open()
        home.close()
        assert mode(folder) == wanted


@pytest.mark.parametrize("was", [None, 0o644])
def test_functions_logs_and_decisions_are_private(tmp_path: Path, was: int | None) -> None:
    functions, log, decisions = (tmp_path / name for name in ("functions.json", "f-0.log", "decisions.jsonl"))
    if was is not None:
        for file in (functions, log, decisions):
            file.touch()
            file.chmod(was)
    store.save(functions, [], durable=False)
    replica = ReplicaLog(log, max_bytes=64)
    for at_s in range(4):
        replica.feed(b"x" * 30 + b"\n", float(at_s))
    replica.close(9.0)
    seen = Snapshot(at_s=0.0)
    record = Record(snapshot=seen, decision=decide(PolicySettings(), seen, PolicyState()))
    DecisionLog(decisions, 1 << 20).append(record)
    kept = {f.name: mode(f) for f in tmp_path.iterdir()}
    assert set(kept.values()) == {0o600}
    assert {"functions.json", "f-0.log", "f-0.log.1", "decisions.jsonl"} == set(kept)
