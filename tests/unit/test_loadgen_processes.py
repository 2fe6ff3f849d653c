"""Arrival processes over time: rates where they were asked for, exact counts, seeds, sums.

Statistical bounds are at 5 standard deviations (6e-7 a comparison, two-sided), seeds are fixed.
"""

import math
from pathlib import Path

import numpy as np
import pytest

from keystage.loadgen import arrivals
from keystage.loadgen.arrivals import ArrivalError, Floats
from keystage.loadgen.arrivals_files import with_files
from keystage.loadgen.arrivals_intensity import Bursts, Intensity, Modulation, Ramp, Steps, flat
from keystage.loadgen.arrivals_spec import parse

WIDE = 5.0


def times(text: str, rate: float | None = None, duration_s: float = 600.0, seed: int = 1) -> Floats:
    return with_files(parse(text)).times(rate, duration_s, seed)


def between(found: Floats, from_s: float, to_s: float) -> int:
    return int(np.sum((found >= from_s) & (found < to_s)))


def poisson_like(count: int, expected: float) -> bool:
    return abs(count - expected) <= WIDE * math.sqrt(expected)


def test_place_inverts_the_integral_by_hand() -> None:
    shape = Intensity(np.array([0.0, 4.0, 6.0, 7.0]), np.array([0.0, 0.0, 2.0]), np.array([4.0, 0.0, 2.0]))
    assert (shape.total, shape.peak_rps) == (10.0, 4.0)
    # t^2 / 2 up to 4 s, nothing up to 6 s, then 2 (t - 6).
    placed = shape.place(np.array([0.0, 0.5, 2.0, 8.0, 9.0, 10.0]))
    assert placed == pytest.approx([0.0, 1.0, 2.0, 4.0, 6.5, 7.0])


def test_profiles_by_hand() -> None:
    assert flat(3.0, 2.0).total == 6.0
    assert Ramp(1.0, 5.0).over(10.0).total == 30.0
    assert Ramp(1.0, 5.0, 4.0).over(10.0).total == 12.0 + 30.0
    assert Ramp(0.0, 10.0, 20.0).over(10.0).total == 25.0, "a ramp longer than the run is cut"
    assert Steps((1.0, 4.0, 2.0), (5.0, 6.0)).over(10.0).total == 5.0 + 4.0 + 8.0
    bursts = Bursts(1.0, 11.0, 2.0, 10.0).over(30.0)
    assert (bursts.total, bursts.mean_rps) == (30.0 + 3 * 2 * 10.0, 3.0)
    assert bursts.edges_s.tolist() == [0.0, 4.0, 6.0, 14.0, 16.0, 24.0, 26.0, 30.0]
    at_once = Bursts(1.0, 11.0, 2.0, 10.0, 0.0).over(11.0)
    assert (at_once.edges_s.tolist(), at_once.begin_rps.tolist()) == (
        [0.0, 2.0, 10.0, 11.0],
        [11.0, 1.0, 11.0],
    )


@pytest.mark.parametrize("process", ["constant", "poisson", "gamma:cv=0.5"])
def test_arrivals_follow_a_profile(process: str) -> None:
    ramped = times(f"{process}@ramp:from=0,to=20")
    assert len(ramped) == 6000
    assert all(poisson_like(between(ramped, 60 * m, 60 * m + 60), 60 * (2 * m + 1)) for m in range(10))
    stepped = times(f"{process}@step:rates=5/0/20,at=200/300")
    assert len(stepped) == 5 * 200 + 20 * 300
    assert between(stepped, 200.000001, 300) == 0
    assert poisson_like(between(stepped, 300, 450), 3000)
    burst = times(f"{process}@burst:base=2,height=100,length=3,every=60")
    assert len(burst) == 2 * 570 + 100 * 30
    assert poisson_like(sum(between(burst, 60 * k + 28.5, 60 * k + 31.5) for k in range(10)), 3000)


def test_a_constant_process_keeps_its_spacing_within_a_rate() -> None:
    gaps = np.diff(times("constant@step:rates=10/2,at=300"))
    assert gaps[:2999] == pytest.approx(0.1)
    assert gaps[3001:] == pytest.approx(0.5)


@pytest.mark.parametrize("cv", [0.5, 4.0])
def test_a_cv_survives_a_slow_ramp_in_the_time_of_its_rate(cv: float) -> None:
    """Gaps counted in expected arrivals are gamma gaps again."""
    found = times(f"gamma:cv={cv}@ramp:from=50,to=150", None, 600.0, 3)
    counted = 50 * found + (100 / 600) * found**2 / 2
    low, high = arrivals.cv_interval(cv, len(found) - 1, 0.9999)
    read = np.diff(counted)
    assert low <= read.std() / read.mean() <= high


def test_states_are_kept_as_long_as_asked() -> None:
    """Time in a state is a sum of exponential stays: sd of a share over n cycles of two states."""
    duration_s, dwell = 40_000.0, (8.0, 2.0)
    shape = Modulation((1.0, 30.0), dwell).drawn(duration_s, 5, 7)
    stays = np.diff(shape.edges_s)
    cycles = duration_s / sum(dwell)
    share = float(stays[shape.begin_rps == 30.0].sum()) / duration_s
    assert abs(share - 0.2) <= WIDE * 0.8 * 0.2 * math.sqrt(2 / cycles)
    long = stays[shape.begin_rps == 1.0][1:-1]
    assert abs(long.mean() - 8.0) <= WIDE * 8.0 / math.sqrt(len(long))
    assert abs(long.std() / long.mean() - 1) <= WIDE / math.sqrt(len(long)) * 1.5
    assert np.all(shape.begin_rps[1:] != shape.begin_rps[:-1])


def test_three_states_are_followed_by_either_other_alike() -> None:
    shape = Modulation((1.0, 2.0, 3.0), (1.0, 1.0, 1.0)).drawn(30_000.0, 5, 7)
    order = shape.begin_rps.astype(int)
    after_one = order[1:][order[:-1] == 1]
    up = int(np.sum(after_one == 2))
    assert abs(up - len(after_one) / 2) <= WIDE * math.sqrt(len(after_one)) / 2
    assert not np.any(after_one == 1)


def test_modulated_arrivals_are_poisson_within_their_states() -> None:
    spec = parse("mmpp:rates=0/40,dwell=3/1")
    found = spec.times(None, 4000.0, 2)
    shape = Modulation((0.0, 40.0), (3.0, 1.0)).drawn(4000.0, 2, 0x8000_0002)
    assert len(found) == round(shape.total)
    piece = np.searchsorted(shape.edges_s, found, side="right") - 1
    assert np.all(shape.begin_rps[np.minimum(piece, len(shape.begin_rps) - 1)] == 40.0)
    inside = np.diff(found)[np.diff(piece) == 0]
    assert inside.std() / inside.mean() == pytest.approx(1.0, abs=0.05)
    overall = arrivals.spacing(found, 4000.0).cv
    assert overall is not None
    assert overall > 3
    assert spec.asked_rate_rps(None, 4000.0) == 10.0
    # A rate of its own rescales the states it drew: the count is exact.
    assert len(times("mmpp:rates=0/40,dwell=3/1,rate=7", None, 100.0)) == 700


def test_sums_share_a_rate_and_hold_every_piece() -> None:
    found = times("poisson:share=3+constant", 8.0, 600.0)
    assert len(found) == 4800
    assert np.all(np.diff(found) >= 0)
    fixed = times("constant:rate=2+poisson:rate=6", None, 600.0)
    assert len(fixed) == 4800
    assert np.isin(np.arange(1, 1201) / 2, np.round(fixed, 9)).all()
    mixed = times("constant:rate=2+poisson", 6.0, 600.0)
    assert len(mixed) == 4800
    # Poisson processes add up to one: CV 1 within 5 standard errors.
    summed = arrivals.spacing(times("poisson+poisson:share=4", 20.0), 600.0).cv
    assert summed is not None
    assert abs(summed - 1) <= WIDE / math.sqrt(12_000)


def test_pieces_that_are_alike_are_drawn_apart() -> None:
    found = times("poisson:rate=1+poisson:rate=1", None, 600.0)
    assert len(set(found.tolist())) == 1200


def test_a_rate_on_pieces_that_all_have_one_rescales_the_whole() -> None:
    spec = "poisson:rate=1+poisson@burst:base=0,height=30,length=1,every=10"
    found = times(spec, 40.0, 100.0)
    assert len(found) == 4000
    in_bursts = sum(between(found, 10 * k + 4.5, 10 * k + 5.5) for k in range(10))
    assert poisson_like(in_bursts, 3000 + 100)


def test_replayed_gaps(tmp_path: Path) -> None:
    path = tmp_path / "gaps.txt"
    path.write_text("1\n0.25\n0.75\n")
    assert times(f"replay:{path}").tolist() == [1.0, 1.25, 2.0]
    assert times(f"replay:{path}", None, 1.5).tolist() == [1.0, 1.25]
    assert times(f"replay:{path}", 3.0, 60.0).tolist() == pytest.approx([0.5, 0.625, 1.0])
    assert times(f"replay:{path},rate=3", None, 60.0).tolist() == pytest.approx([0.5, 0.625, 1.0])
    assert times(f"replay:{path},loop", None, 4.0).tolist() == [1.0, 1.25, 2.0, 3.0, 3.25, 4.0]
    assert len(times(f"replay:{path},loop", 5.0, 100.0)) == 500
    read = with_files(parse(f"replay:{path}"))
    assert (read.own_duration_s(), read.own_duration_s(6.0), read.asked_rate_rps(None, 9.0)) == (
        2.0,
        0.5,
        1.5,
    )
    # Under a profile the gaps are counted in expected arrivals.
    warped = times(f"replay:{path},loop@step:rates=1/4,at=50", None, 100.0)
    assert len(warped) == 250
    assert abs(between(warped, 0, 50) - 50) <= 1


def test_a_seed_is_a_run_and_files_have_none(tmp_path: Path) -> None:
    for text in (
        "mmpp:rates=1/9,dwell=3/1",
        "gamma:cv=2@ramp:from=1,to=3",
        "poisson:rate=2+gamma:cv=3,rate=1",
    ):
        assert np.array_equal(times(text, seed=4), times(text, seed=4))
        assert not np.array_equal(times(text, seed=4)[:50], times(text, seed=5)[:50])
    path = tmp_path / "gaps.txt"
    path.write_text("1\n2\n")
    assert np.array_equal(times(f"replay:{path}", seed=4), times(f"replay:{path}", seed=5))


def test_known_runs_stay_the_same() -> None:
    """A seed means the same run with every version: first times of a few specifications."""
    known = {
        "gamma:cv=4,rate=5": KNOWN_GAMMA,
        "mmpp:rates=2/20,dwell=5/1": KNOWN_MMPP,
        "poisson@ramp:from=0,to=10": KNOWN_RAMP,
        "poisson:rate=3+gamma:cv=2,rate=3": KNOWN_SUM,
    }
    for text, first in known.items():
        assert times(text, None, 60.0, 1)[10:13].tolist() == pytest.approx(first, rel=1e-12), text


KNOWN_GAMMA = [1.4752295204394335, 1.4752295878386248, 1.4752304043888496]
KNOWN_MMPP = [4.718490371807987, 4.742120020530118, 4.801469064048881]
KNOWN_RAMP = [11.352945523100159, 11.595442170656508, 12.183238171974228]
KNOWN_SUM = [0.5075959856257474, 0.6618488941635515, 0.666034256732844]


@pytest.mark.parametrize(
    ("text", "rate", "duration_s", "told"),
    [
        ("poisson", None, 60.0, "piece 1 'poisson': names no rate"),
        ("poisson", 0.001, 60.0, "gives no arrival"),
        ("poisson:rate=0.001+constant:rate=0.001", None, 60.0, "gives no arrival in 60 s"),
        ("poisson", 1e6, 60.0, "piece 1 'poisson': gives 60000000 arrivals, at most 20000000"),
        ("poisson@ramp:from=1,to=1e7", None, 60.0, "at most 20000000"),
        ("poisson:rate=2e5+constant:rate=2e5", None, 60.0, "gives 24000000 arrivals, at most 20000000"),
        ("poisson@step:rates=1/2,at=60", None, 60.0, "at must lie before the run's end at 60 s, got 60"),
        ("poisson@burst:base=1,height=2,length=1,every=9,first=70", None, 60.0, "begins at 70 s"),
        (
            "poisson@burst:base=1,height=2,length=1e-9,every=1e-6",
            None,
            60.0,
            "bursts in 60 s, at most 500000",
        ),
        ("mmpp:rates=1/2,dwell=1e-6/1e-6", None, 60.0, "changes of state in 60 s, at most 500000"),
        ("mmpp:rates=0/1e-9,dwell=1e9/1e-3,rate=5", None, 60.0, "its rate is 0 throughout the 60 s"),
        ("poisson", 1.0, -1.0, "duration must be finite and above 0, got -1"),
    ],
)
def test_what_gives_no_schedule_is_refused(
    text: str, rate: float | None, duration_s: float, told: str
) -> None:
    with pytest.raises(ArrivalError) as caught:
        times(text, rate, duration_s)
    assert told in str(caught.value)
