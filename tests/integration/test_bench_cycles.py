"""`keystage bench cycles` on the real platform, tens of cycles; and what it calls a leak."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from keystage.bench import cycles
from keystage.bench.cycles_watch import PARTS

PLACES = ("files", "threads", "anonymous MiB", "PSS MiB")


def seen(cycles_: int, **readings: list[float]) -> cycles.Seen:
    made = cycles.Seen(cycles=list(range(0, cycles_, 10)), requests=2, wall_s=1.0)
    made.readings = {"zombies": [0.0] * len(made.cycles), **readings}
    return made


def test_what_leaks_rises_and_what_does_not_holds_0() -> None:
    at = np.arange(0.0, 1000.0, 10.0)
    noise = np.random.default_rng(1).normal(0, 1, len(at))
    found = cycles.trends_of(seen(1000, leak=list(20 + at / 10), flat=list(20 + noise), full=[5.0] * len(at)))
    assert cycles.rising(found) == cycles.rising(found, alone=True) == ["leak"]
    assert found["leak"].slope == pytest.approx(0.1, rel=0.01)
    assert found["full"].low == found["full"].high == 0.0


def test_what_fills_at_the_begin_is_no_leak() -> None:
    at = np.arange(0.0, 1000.0, 10.0)
    assert not cycles.rising(cycles.trends_of(seen(1000, table=list(np.minimum(at, 200.0)))), alone=True)


def test_of_many_slopes_that_are_none_some_rise_alone_and_none_among_all() -> None:
    rng = np.random.default_rng(7)
    readings = {f"noise {k}": list(rng.normal(100, 1, 100)) for k in range(200)}
    found = cycles.trends_of(seen(1000, **readings))
    assert 0 < len(cycles.rising(found, alone=True)) < 15
    assert not cycles.rising(found)


@pytest.mark.slow
def test_cycles_of_the_real_platform_leave_nothing_behind(tmp_path: Path) -> None:
    result = cycles.run(quick=True, out=tmp_path)
    levels = {row["what"]: row["level"] for row in result.rows}
    assert {f"{part}: {place}" for part in PARTS for place in PLACES} <= levels.keys()
    assert result.figures["cycles"].median == cycles.QUICK
    assert result.figures["parts_ended"].median == result.figures["zombies"].median == 0
    assert levels["router: workers known"] == 2
    # Numbers, unlike memory, are the same after every turn whatever the machine does meanwhile.
    rising = result.figures["rising"].meaning
    for what in ("router: files", "workers: files", "holders: files", "threads", "memfds", "run folder"):
        assert what not in rising, rising
    assert (tmp_path / "cycles" / cycles.PICTURE).read_bytes().startswith(b"\x89PNG")
