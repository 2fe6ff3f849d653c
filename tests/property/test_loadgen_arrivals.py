"""Properties of arrival processes, whatever is asked for."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from keystage.loadgen.arrivals import ArrivalError
from keystage.loadgen.arrivals_intensity import Bursts, Intensity, Modulation, Ramp, Steps
from keystage.loadgen.arrivals_spec import parse

RATES = st.floats(0, 50).map(lambda rate: round(rate, 3))
TIMES = st.floats(0.1, 40).map(lambda time: round(time, 3))
CVS = st.floats(0, 8).map(lambda cv: round(cv, 3))
SEEDS = st.integers(0, 2**64 - 1)

processes = st.one_of(st.just("constant"), st.just("poisson"), CVS.map(lambda cv: f"gamma:cv={cv}"))
profiles = st.one_of(
    st.builds(lambda a, b, over: f"ramp:from={a},to={b},over={over}", RATES, RATES, TIMES),
    st.builds(lambda a, b, at: f"step:rates={a}/{b},at={at}", RATES, RATES, TIMES),
    st.builds(
        lambda base, more, length, rest: (
            f"burst:base={base},height={base + more + 1},length={length},every={length + rest}"
        ),
        RATES, RATES, TIMES, TIMES,
    ),
)  # fmt: skip
pieces = st.one_of(
    st.builds(lambda name, rate: f"{name}{',' if ':' in name else ':'}rate={rate + 0.1}", processes, RATES),
    st.builds(lambda name, profile: f"{name}@{profile}", processes, profiles),
    st.builds(lambda a, b, d, e: f"mmpp:rates={a}/{b + 1},dwell={d}/{e}", RATES, RATES, TIMES, TIMES),
)


@given(text=st.lists(pieces, min_size=1, max_size=3).map("+".join), duration=TIMES, seed=SEEDS)
def test_times_are_ascending_and_within_the_run(text: str, duration: float, seed: int) -> None:
    try:
        times = parse(text).times(None, duration, seed)
    except ArrivalError as error:
        assert "piece" in str(error) or "no arrival" in str(error)  # noqa: PT017
        return
    assert np.all(np.diff(times) >= 0)
    assert times[0] >= 0
    assert times[-1] <= duration
    assert np.array_equal(times, parse(text).times(None, duration, seed))


@given(
    edges=st.lists(st.floats(0.01, 100), min_size=1, max_size=8),
    rates=st.lists(st.tuples(st.floats(0, 1e4), st.floats(0, 1e4)), min_size=8, max_size=8),
    shares=st.lists(st.floats(0, 1), min_size=1, max_size=30),
)
def test_place_is_the_inverse_of_the_integral(
    edges: list[float], rates: list[tuple[float, float]], shares: list[float]
) -> None:
    begin, end = np.array(rates[: len(edges)]).T
    shape = Intensity(np.concatenate(([0.0], np.cumsum(edges))), begin, end)
    if shape.total < 1e-6:
        return
    asked = np.sort(shares) * shape.total
    placed = shape.place(asked)
    assert np.all(np.diff(placed) >= 0)
    assert placed[0] >= 0
    assert placed[-1] <= shape.edges_s[-1]
    assert np.allclose([integral(shape, at_s) for at_s in placed], asked, rtol=1e-6, atol=1e-6 * shape.total)


def integral(shape: Intensity, at_s: float) -> float:
    """By the trapezoidal rule over the pieces, up to a moment."""
    total = 0.0
    pieces_of = zip(shape.edges_s[:-1], shape.edges_s[1:], shape.begin_rps, shape.end_rps, strict=True)
    for begin_s, end_s, begin, end in pieces_of:
        covered = min(max(at_s - begin_s, 0.0), end_s - begin_s)
        there = begin + (end - begin) * covered / (end_s - begin_s)
        total += (begin + there) / 2 * covered
    return total


@given(
    a=RATES, b=RATES, length=TIMES, rest=TIMES, duration=st.floats(41, 400),
    profile=st.sampled_from(["ramp", "step", "burst"]),
)  # fmt: skip
def test_profiles_cover_the_run_within_their_rates(
    a: float, b: float, length: float, rest: float, duration: float, profile: str
) -> None:
    made = {
        "ramp": Ramp(a, b, length),
        "step": Steps((a, b), (length,)),
        "burst": Bursts(min(a, b), max(a, b), length, length + rest),
    }[profile]
    shape = made.over(duration)
    assert (shape.edges_s[0], shape.edges_s[-1]) == (0.0, duration)
    assert np.all(np.diff(shape.edges_s) > 0)
    assert shape.peak_rps <= made.peak_rps
    assert min(a, b) * duration * (1 - 1e-9) <= shape.total <= max(a, b) * duration * (1 + 1e-9)


@given(
    rates=st.lists(RATES, min_size=2, max_size=5), dwell=st.lists(TIMES, min_size=5, max_size=5),
    duration=TIMES, seed=SEEDS,
)  # fmt: skip
def test_states_cover_the_run(rates: list[float], dwell: list[float], duration: float, seed: int) -> None:
    shape = Modulation(tuple(rates), tuple(dwell[: len(rates)])).drawn(duration, seed, 7)
    assert (shape.edges_s[0], shape.edges_s[-1]) == (0.0, duration)
    assert np.all(np.diff(shape.edges_s) >= 0)
    assert set(shape.begin_rps.tolist()) <= set(rates)
