"""Loop, decisions log, replay, settings: against a real (in-memory) platform, without clocks or sleeps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from pydantic import ValidationError
from support.controller_world import FluidStage, FluidWorld

from keystage.controller.app import replay_decisions
from keystage.controller.config import ControllerSettings
from keystage.controller.decisions import DecisionLog, Record, replay
from keystage.controller.domain.decision import Action, SetReplicas
from keystage.controller.domain.platform import PlatformError
from keystage.controller.domain.snapshot import FunctionView, Snapshot
from keystage.controller.domain.state import PolicyState
from keystage.controller.loop import Loop
from keystage.controller.policy.decide import decide
from keystage.controller.policy.settings import PolicySettings


class OneFunction:
    """A platform with one function, which can be cut off."""

    def __init__(self) -> None:
        self.desired: int | None = None
        self.at_s = 0.0
        self.is_blind = False
        self.is_deaf = False

    def observe(self) -> Snapshot:
        if self.is_blind:
            raise PlatformError("no answer")
        self.at_s += 1.0
        return Snapshot(at_s=self.at_s, functions=(FunctionView(function="f", desired=self.desired),))

    def apply(self, actions: Sequence[Action]) -> None:
        if self.is_deaf:
            raise PlatformError("no answer")
        for action in actions:
            assert isinstance(action, SetReplicas)
            self.desired = action.replicas


def loop_over(platform: OneFunction, path: Path, max_bytes: int = 1 << 20) -> Loop:
    return Loop(platform, PolicySettings(), DecisionLog(path, max_bytes), tick_s=0.25)


def test_a_tick_observes_decides_applies_and_logs(tmp_path: Path) -> None:
    platform = OneFunction()
    loop = loop_over(platform, tmp_path / "d.jsonl")
    decision = loop.tick()
    assert decision is not None
    assert platform.desired == 1
    assert loop.tick() is not None
    assert replay(tmp_path / "d.jsonl") == (2, [])


def test_a_failing_platform_is_held_and_asked_later_and_later(tmp_path: Path) -> None:
    platform = OneFunction()
    loop = loop_over(platform, tmp_path / "d.jsonl")
    loop.tick()
    platform.is_blind = True
    waits = []
    for _ in range(6):
        assert loop.tick() is None
        waits.append(loop.backoff_s)
    assert waits == [0.5, 1.0, 2.0, 4.0, 5.0, 5.0]
    assert platform.desired == 1
    platform.is_blind = False
    assert loop.tick() is not None
    platform.is_blind = True
    loop.tick()
    assert loop.backoff_s == 0.5


def test_an_action_that_did_not_arrive_is_stated_again(tmp_path: Path) -> None:
    platform = OneFunction()
    platform.is_deaf = True
    loop = loop_over(platform, tmp_path / "d.jsonl")
    assert loop.tick() is None
    platform.is_deaf = False
    loop.tick()
    assert platform.desired == 1


def test_a_log_that_cannot_be_written_does_not_stop_the_steering(tmp_path: Path) -> None:
    platform = OneFunction()
    loop = loop_over(platform, tmp_path / "missing-folder" / "d.jsonl")
    assert loop.tick() is not None
    assert platform.desired == 1


def test_a_bug_is_not_swallowed(tmp_path: Path) -> None:
    class Broken(OneFunction):
        def observe(self) -> Snapshot:
            raise KeyError("bug")

    with pytest.raises(KeyError):
        loop_over(Broken(), tmp_path / "d.jsonl").tick()


def test_the_log_is_bounded_and_every_part_of_it_replays(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    loop = loop_over(OneFunction(), path, max_bytes=2000)
    for _ in range(60):
        loop.tick()
    old = path.with_name("d.jsonl.1")
    assert path.stat().st_size <= 2000
    assert old.stat().st_size <= 2000
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d.jsonl", "d.jsonl.1"]
    assert replay(path)[1] == replay(old)[1] == []


def test_replay_names_garbled_and_changed_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "d.jsonl"
    log, platform = DecisionLog(path, 1 << 20), OneFunction()
    for _ in range(3):
        snapshot = platform.observe()
        log.append(Record(snapshot=snapshot, decision=decide(PolicySettings(), snapshot, PolicyState())))
    assert replay_decisions(path) == 0
    good, changed, rest = path.read_text().splitlines()
    changed = changed.replace('"replicas":1', '"replicas":7', 1)
    path.write_bytes(f"{good}\n{changed}\n{{garbage\n{rest}\n".encode() + b"\xff\n")
    assert replay_decisions(path) == 1
    out = capsys.readouterr().out
    assert f"{path}:2: actions: logged" in out
    assert '"replicas":7' in out
    assert f"{path}:3: not a decision:" in out
    assert f"{path}:5: not a decision:" in out
    assert "5 decisions, 3 differ" in out
    assert replay_decisions(tmp_path / "none") == 2


def test_replay_uses_the_settings_of_the_line(tmp_path: Path) -> None:
    path, settings = tmp_path / "d.jsonl", PolicySettings(hold_s=99.0)
    snapshot = OneFunction().observe()
    record = Record(settings=settings, snapshot=snapshot, decision=decide(settings, snapshot, PolicyState()))
    DecisionLog(path, 1 << 20).append(record)
    assert json.loads(path.read_text())["settings"]["hold_s"] == 99.0
    assert replay(path) == (1, [])


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEYSTAGE_CONTROL", "/run/up.sock")
    monkeypatch.setenv("KEYSTAGE_TICK_S", "0.1")
    monkeypatch.setenv("KEYSTAGE_POLICY", '{"hold_s": 2.5, "gains": {"limit": 0}}')
    settings = ControllerSettings()
    assert (settings.tick_s, settings.lifeline_fd) == (0.1, None)
    assert settings.policy_settings().hold_s == 2.5
    assert settings.policy_settings().gains.limit == 0
    assert settings.policy_settings().drain_s == PolicySettings().drain_s


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("KEYSTAGE_TICK_S", "0", "greater than 0"),
        ("KEYSTAGE_TICK_S", "nan", "finite number"),
        ("KEYSTAGE_BUDGET_REPLICAS", "0", "greater than or equal to 1"),
        ("KEYSTAGE_POLICY", '{"hold": 1}', "no setting hold"),
        ("KEYSTAGE_POLICY", '{"hold_s": "x"}', "hold_s"),
        ("KEYSTAGE_POLICY", "[1]", "JSON object"),
        ("KEYSTAGE_POLICY", "{", "JSON object"),
    ],
)
def test_bad_settings_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, words: str
) -> None:
    monkeypatch.setenv("KEYSTAGE_CONTROL", "/run/up.sock")
    monkeypatch.setenv(name, value)
    with pytest.raises(ValidationError, match=words):
        ControllerSettings()


def test_whole_numbers_and_missing_queues_replay_alike(tmp_path: Path) -> None:
    world = FluidWorld([FluidStage(0.01), FluidStage(0.005)])
    log = DecisionLog(tmp_path / "d.jsonl", 1 << 20)
    for rate in (0, 40, 40, 40, 0, 0, 300, 300, 300):
        before = world.state
        decision = world.step(rate)
        log.append(Record(settings=world.settings, before=before, snapshot=world.seen, decision=decision))
    assert replay(tmp_path / "d.jsonl") == (9, [])
