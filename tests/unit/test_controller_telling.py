"""Telling what the loop does: the newest report soon, none twice, and steering as if nobody listened."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from keystage.controller.audience import Unheard
from keystage.controller.decisions import DecisionLog
from keystage.controller.domain.decision import Action, SetReplicas
from keystage.controller.domain.platform import PlatformError
from keystage.controller.domain.snapshot import FunctionView, Snapshot
from keystage.controller.loop import Loop
from keystage.controller.policy.settings import PolicySettings
from keystage.controller.telling import MOST_TICKS, Telling
from keystage.observability.api import Report

WAIT_S = 30.0


class World:
    """A platform with one function, which can be cut off."""

    def __init__(self) -> None:
        self.desired: int | None = None
        self.at_s = 100.0
        self.is_blind = self.is_deaf = False
        self.least = 1

    def observe(self) -> Snapshot:
        if self.is_blind:
            raise PlatformError("no answer")
        self.at_s += 0.25
        scale = FunctionView(function="f", desired=self.desired, min_replicas=self.least)
        return Snapshot(at_s=self.at_s, functions=(scale,))

    def apply(self, actions: Sequence[Action]) -> None:
        if self.is_deaf:
            raise PlatformError("no answer")
        for action in actions:
            assert isinstance(action, SetReplicas)
            self.desired = action.replicas


class Listener:
    """An audience that keeps what it is told; it can hang, or fail."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.fault: Exception | None = None
        self.go_on = threading.Event()
        self.go_on.set()
        self.is_closed = False

    def tell(self, report: bytes) -> None:
        assert self.go_on.wait(WAIT_S)
        if self.fault is not None:
            raise self.fault
        self.bodies.append(report)

    def close(self) -> None:
        self.is_closed = True

    @property
    def last(self) -> Report:
        return msgspec.json.decode(self.bodies[-1], type=Report)

    def until(self, condition: Callable[[], bool]) -> None:
        end_s = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < end_s, self.bodies[-1:]
            time.sleep(0.005)


class Steered:
    """A loop with an audience."""

    def __init__(self, folder: Path, every_s: float = 0.0) -> None:
        self.world, self.listener = World(), Listener()
        self.telling = Telling("c", self.listener, every_s=every_s)
        log = DecisionLog(folder / "d.jsonl", 1 << 20)
        self.loop = Loop(self.world, PolicySettings(), log, tick_s=0.25, telling=self.telling)


@pytest.fixture
def steered(tmp_path: Path) -> Steered:
    return Steered(tmp_path)


def test_a_decision_is_told_and_repeated_until_it_is_old(steered: Steered) -> None:
    steered.telling.start()
    steered.loop.tick()
    listener = steered.listener
    listener.until(lambda: bool(listener.bodies))
    first = listener.last
    assert [function.function for function in first.functions] == ["f"]
    assert first.decisions[-1].text == "f: 1 replica at first"
    assert (first.controller, first.number, first.at_s) == ("c", 1, 100.25)
    steered.world.least = 3
    steered.loop.tick()
    listener.until(lambda: len(listener.bodies) == 2)
    assert listener.last.decisions[-1].text.startswith("f: 1 -> 3")
    assert listener.last.decisions[0] == first.decisions[0]
    steered.telling.stop()
    assert listener.is_closed
    steered.loop.tick()  # nobody hears it
    assert len(listener.bodies) == 2


def test_trouble_is_told_with_what_was_known_last(steered: Steered) -> None:
    steered.telling.start()
    listener, world = steered.listener, steered.world
    steered.loop.tick()
    listener.until(lambda: bool(listener.bodies))
    world.is_blind = True
    assert steered.loop.tick() is None
    listener.until(lambda: len(listener.bodies) == 2)
    assert listener.last.trouble == "cannot observe: no answer"
    assert listener.last.functions
    assert listener.last.at_s == pytest.approx(time.time(), abs=WAIT_S)
    world.is_blind, world.is_deaf, world.least = False, True, 2
    assert steered.loop.tick() is None
    listener.until(lambda: len(listener.bodies) == 3)
    assert listener.last.trouble == "cannot apply: no answer"
    world.is_deaf = False
    assert steered.loop.tick() is not None
    listener.until(lambda: len(listener.bodies) == 4)
    assert listener.last.trouble == ""
    changes = [entry.after for entry in listener.last.decisions]
    assert changes == [1, 2]  # the second was stated twice, and is one change
    steered.telling.stop()


def test_nothing_is_seen_from_the_start(steered: Steered) -> None:
    steered.telling.start()
    steered.world.is_blind = True
    steered.loop.tick()
    steered.listener.until(lambda: bool(steered.listener.bodies))
    assert steered.listener.last.trouble == "cannot observe: no answer"
    assert steered.listener.last.pipelines == ()
    steered.telling.stop()


def test_an_audience_that_hangs_holds_up_no_tick_and_hears_the_newest_later(steered: Steered) -> None:
    listener = steered.listener
    listener.go_on.clear()
    steered.telling.start()
    for least in range(1, MOST_TICKS // 2):
        steered.world.least = least
        assert steered.loop.tick() is not None
    assert steered.world.desired == MOST_TICKS // 2 - 1
    assert listener.bodies == []
    listener.go_on.set()
    listener.until(
        lambda: bool(listener.bodies) and listener.last.functions[0].desired == MOST_TICKS // 2 - 1
    )
    assert [entry.after for entry in listener.last.decisions] == list(range(1, MOST_TICKS // 2))
    assert len(listener.bodies) <= 3
    steered.telling.stop()


def test_ticks_that_nobody_takes_are_bounded(tmp_path: Path) -> None:
    steered = Steered(tmp_path)
    for _ in range(3 * MOST_TICKS):  # its thread does not run at all
        assert steered.loop.tick() is not None
    assert len(steered.telling._ticks) == MOST_TICKS
    steered.telling.stop()


@pytest.mark.parametrize("fault", [Unheard("the socket is gone"), RuntimeError("a bug")])
def test_a_fault_is_said_once_and_the_next_report_holds_everything(
    steered: Steered, fault: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    listener = steered.listener
    listener.fault = fault
    steered.telling.start()
    with caplog.at_level(logging.INFO, "keystage.controller.telling"):
        for least in (1, 2, 3):
            steered.world.least = least
            assert steered.loop.tick() is not None
            listener.until(lambda: not steered.telling._ticks)
        listener.until(lambda: any("the steering goes on" in r.getMessage() for r in caplog.records))
        listener.fault = None
        steered.loop.tick()
        listener.until(lambda: bool(listener.bodies))
        listener.until(lambda: any("arrive again" in r.getMessage() for r in caplog.records))
    said = [r for r in caplog.records if "the steering goes on" in r.getMessage()]
    assert len(said) == 1
    assert str(fault) in caplog.text
    assert [entry.after for entry in listener.last.decisions] == [1, 2, 3]
    steered.telling.stop()


def test_reports_keep_their_distance_and_the_last_one_is_of_the_last_tick(tmp_path: Path) -> None:
    steered = Steered(tmp_path, every_s=0.5)
    listener = steered.listener
    steered.telling.start()
    began_s = time.monotonic()
    ticks = 0
    while time.monotonic() - began_s < 1.6:
        steered.loop.tick()
        ticks += 1
        time.sleep(0.01)
    lasted_s = time.monotonic() - began_s
    last_s = steered.world.at_s
    listener.until(lambda: listener.last.at_s == pytest.approx(last_s, abs=1e-3))
    assert 1 <= len(listener.bodies) <= lasted_s / 0.5 + 2 < ticks
    assert [msgspec.json.decode(b, type=Report).number for b in listener.bodies] == list(
        range(1, len(listener.bodies) + 1)
    )
    steered.telling.stop()
