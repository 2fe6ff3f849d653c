"""The API server's clock as it is heard, whatever this machine's clock says."""

from __future__ import annotations

import email.utils
import itertools
import time

import pytest
from support.kube.cluster import Kube
from support.kube.fixtures import kube  # noqa: F401  (a pytest fixture)

from keystage.kubernetes.client import NODES, Cluster
from keystage.kubernetes.cluster_clock import ClusterClock


def date(at_s: float) -> str:
    return email.utils.formatdate(at_s, usegmt=True)


def off_s(clock: ClusterClock, server_offset_s: float) -> float:
    """Seconds that it is ahead of a server whose clock is `time.monotonic` and so much."""
    return clock.now_s() - (time.monotonic() + server_offset_s)


@pytest.mark.parametrize("wrong_s", [-3 * 3600.0, -0.4, 0.0, 0.4, 3 * 3600.0])
def test_one_answer_tells_it_to_the_second(wrong_s: float) -> None:
    server_s = 1_800_000_000.0 - time.monotonic()
    clock = ClusterClock(time.monotonic() + server_s + wrong_s)
    assert off_s(clock, server_s) == pytest.approx(wrong_s, abs=0.1)
    sent_s = time.monotonic()
    clock.hear(date(int(sent_s + server_s)), sent_s, sent_s + 0.02)
    assert abs(off_s(clock, server_s)) <= 1.05
    if abs(wrong_s) < 0.5:
        assert off_s(clock, server_s) == pytest.approx(wrong_s, abs=0.5)


def test_many_answers_tell_it_better_and_never_swing() -> None:
    server_s = 1_800_000_000.0
    clock = ClusterClock(server_s + time.monotonic() + 3600)
    seen = []
    for k in range(40):
        sent_s = time.monotonic() + 0.23 * k  # as if time passed
        clock.hear(date(int(sent_s + server_s)), sent_s, sent_s + 0.01)
        seen.append(round(off_s(clock, server_s), 3))
    assert abs(seen[-1]) < 0.3
    assert all(after <= before + 0.002 for before, after in itertools.pairwise(seen))


def test_a_late_answer_and_one_without_a_date_say_little_or_nothing() -> None:
    clock = ClusterClock(1000.0 + time.monotonic())
    before_s = off_s(clock, 1000.0)
    now_s = time.monotonic()
    clock.hear(date(int(now_s + 1000.0)), now_s, now_s + 30.0)
    assert off_s(clock, 1000.0) == pytest.approx(before_s, abs=0.01)
    for text in (None, "", "yesterday", "Mon, 99 Foo 99999 99:99:99 GMT", "\x00" * 9):
        clock.hear(text, now_s, now_s)
    assert off_s(clock, 1000.0) == pytest.approx(before_s, abs=0.01)


@pytest.mark.parametrize("wrong_s", [-3 * 3600.0, 3 * 3600.0])
def test_every_exchange_is_heard_and_a_clock_that_is_set_afterwards_is_not(
    kube: Kube,  # noqa: F811
    wrong_s: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = ClusterClock(time.time() + wrong_s)
    cluster = Cluster(kube.api_client(), "default", clock=clock)
    other = cluster.within("elsewhere")
    other.list(NODES)
    now_s = time.time()
    assert clock.now_s() == pytest.approx(now_s, abs=2.0)
    assert other.clock is cluster.clock
    monkeypatch.setattr(time, "time", lambda: now_s + wrong_s)
    assert clock.now_s() == pytest.approx(now_s, abs=2.0)
