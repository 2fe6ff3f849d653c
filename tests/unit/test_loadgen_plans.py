"""Plans: traces of every kind, minutes that stay the file's, mapping, lazy bodies, and what they take."""

import csv
import dataclasses
import gzip
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keystage.loadgen import arrivals, lengths
from keystage.loadgen.lengths import Length
from keystage.loadgen.option_checks import check
from keystage.loadgen.options import LoadOptions, OptionError, TooFewArrivalsError
from keystage.loadgen.plan import Bodies, Plan, plan
from keystage.loadgen.target import Target
from keystage.loadgen.traces import TraceError

NAMES = ("HashOwner", "HashApp", "HashFunction", "Trigger")
COUNTS = {"f1": [0, 0, 3, 0, 5], "f2": [0, 0, 10, 1, 0], "f3": [0, 0, 0, 700, 2]}
TOKENS = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:17:{s:02d}.0000000,{160 * (s + 1)},32\n" for s in (0, 1, 3, 10)
)


@pytest.fixture
def counted(tmp_path: Path) -> Path:
    path = tmp_path / "counts.csv.gz"
    with gzip.open(path, "wt", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*NAMES, *range(1, 6)])
        for name, minutes in COUNTS.items():
            writer.writerow(["o", "a", name, "http", *minutes])
    return path


def made(path: Path | None, **changes: Any) -> Plan:
    given: dict[str, Any] = {"url": "http://g:1/function/p", "target": "raw", "trace": path} | changes
    options = LoadOptions(**given)
    check(options)
    return plan(options, Target(options.target, options.url))


def minutes(times_s: np.ndarray, length_s: float = 60.0) -> list[int]:
    return np.bincount((times_s // length_s).astype(int)).tolist()


@pytest.mark.parametrize("within", ["poisson", "uniform", "gamma:4"])
def test_counts_per_minute_are_the_files(counted: Path, within: str) -> None:
    total = np.sum(list(COUNTS.values()), axis=0).tolist()
    whole = made(counted, within=within, from_s=0.0)
    assert minutes(whole.times_s) == total
    # Two silent minutes at the start are left out, whole.
    short = made(counted, within=within)
    assert minutes(short.times_s) == total[2:]
    assert "2 silent minutes before them left out" in short.source
    fast = made(counted, within=within, speed=10.0)
    assert minutes(fast.times_s, 6.0) == total[2:]
    assert fast.times_s * 10 == pytest.approx(short.times_s)


def test_a_trace_too_short_for_its_rate_is_told_and_ends_a_search(counted: Path) -> None:
    short = made(counted, rate_rps=100.0, duration_s=10.0)
    assert (len(short.times_s), short.duration_s) == (721, pytest.approx(7.21))
    assert "trace: its 721 invocations last 7.21 s at this rate, not --duration" in short.notes
    assert not made(counted, rate_rps=72.1, duration_s=10.0).notes
    with pytest.raises(TooFewArrivalsError, match="a window of 10 s at 100/s takes 1000") as caught:
        made(counted, rate_rps=100.0, duration_s=10.0, search_rate=True, slo_latency_s=1.0)
    assert caught.value.count == 721


def test_a_trace_that_ends_before_the_run_is_told(counted: Path) -> None:
    """Three minutes with arrivals at 10x speed last 18 s; the rest of a minute is silent."""
    long = made(counted, speed=10.0, duration_s=60.0)
    [note] = long.notes
    assert note == (
        f"trace: its last invocation is at {long.times_s[-1]:.4g} s at 10x speed; "
        "nothing is sent from there to --duration (60 s)"
    )
    assert long.duration_s == 60.0
    assert made(counted, speed=10.0, duration_s=6.0).notes == (), "the trace goes on"
    assert made(counted, speed=10.0).notes == (), "the trace says how long the run is"


def test_a_search_needs_a_replay_that_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "gaps.txt"
    path.write_text("0.1\n0.2\n")
    with pytest.raises(OptionError, match="add ,loop to search"):
        made(None, arrivals=f"replay:{path}", search_rate=True, slo_latency_s=1.0)
    options = {"search_rate": True, "slo_latency_s": 1.0, "rate_rps": 20.0, "duration_s": 3.0}
    assert len(made(None, arrivals=f"replay:{path},loop", **options).times_s) == 60


def test_selection_window_and_cut(counted: Path) -> None:
    assert len(made(counted, functions=("f1", "f2")).times_s) == 19
    assert len(made(counted, top=1).times_s) == 702
    assert minutes(made(counted, from_s=180.0, to_s=240.0).times_s) == [701]
    assert minutes(made(counted, duration_s=60.0).times_s) == [13]
    first = made(counted, rate_rps=2.0, duration_s=10.0)
    assert (len(first.times_s), first.duration_s, float(first.times_s[-1])) == (20, 10.0, 10.0)
    with pytest.raises(TraceError, match="f9"):
        made(counted, functions=("f9",))
    with pytest.raises(OptionError, match="no invocation is selected"):
        made(counted, from_s=0.0, to_s=60.0)


def test_a_rate_keeps_the_shape(counted: Path) -> None:
    own, rescaled = made(counted), made(counted, rate_rps=50.0)
    assert rescaled.asked_rate_rps == 50.0
    assert len(rescaled.times_s) / rescaled.duration_s == pytest.approx(50.0)
    shape = own.times_s - own.times_s[0]
    assert rescaled.times_s / rescaled.times_s[-1] == pytest.approx(shape / shape[-1])


def test_functions_go_to_their_pipelines(counted: Path) -> None:
    found = made(counted, url="http://g:1", mapping=("a/f1=chat", "a/f3=embed", "hash:spare"))
    assert found.addresses == (
        "http://g:1/function/chat",
        "http://g:1/function/embed",
        "http://g:1/function/spare",
    )
    assert np.bincount(np.asarray(found.targets)).tolist() == [8, 702, 11]
    assert "functions mapped to 3 pipelines" in found.source
    # Each function's minutes are its own still.
    assert minutes(found.times_s[np.asarray(found.targets) == 0]) == COUNTS["f1"][2:]
    told = made(counted, url="http://g:1", functions=("f1",), mapping=("a/f1=chat", "a/f2=x"))
    assert told.notes == ("--map names functions without an arrival: a/f2",)
    with pytest.raises(OptionError, match="--map strict: function 'a/f2' of the trace is not among the 1"):
        made(counted, url="http://g:1", mapping=("a/f1=chat", "strict"))


def test_mapping_needs_functions_and_a_gateway(counted: Path, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(TOKENS)
    with pytest.raises(OptionError, match="--map needs a trace of functions, got one of kind azure-llm"):
        made(path, url="http://g:1", mapping=("hash:a",))
    with pytest.raises(
        OptionError, match=r"URL must be the gateway's alone \(http://g:1\), got http://g:1/function/p"
    ):
        made(counted, mapping=("hash:a",))


def test_choices_that_a_kind_of_trace_does_not_have_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(TOKENS)
    with pytest.raises(
        OptionError, match=r"--within uniform turns counts per minute into arrivals; t\.csv is of kind"
    ):
        made(path, within="uniform")
    for changes in ({"functions": ("a/f",)}, {"apps": ("a",)}, {"triggers": ("http",)}, {"top": 3}):
        with pytest.raises(TraceError, match=str(path)):
            made(path, **changes)
    with pytest.raises(TraceError, match=str(path)):
        made(path, trace_kind="mooncake")


def test_lengths_are_the_traces_where_it_has_any(counted: Path, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(TOKENS)
    own = made(path, target="openai")
    assert [size.prompt_tokens for size in own.lengths] == [10, 20, 40, 110]
    assert "token lengths / 16" in own.source
    drawn = made(counted, target="openai", seed=3)
    assert drawn.lengths == lengths.drawn(721, seed=3, divisor=16, bound_tokens=2048)
    assert "Azure LLM 2023 conversation" in drawn.source


def test_a_seed_is_a_plan_whatever_the_speed(counted: Path) -> None:
    one, same, other = (made(counted, seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(one.times_s, same.times_s)
    assert not np.array_equal(one.times_s, other.times_s)
    assert list(one.bodies[:5]) == list(same.bodies[:5]) != list(other.bodies[:5])


def test_bodies_are_made_when_asked_for() -> None:
    asked: list[int] = []

    class Asked(Target):
        def body(self, length: Length, seed: int, index: int) -> bytes:
            asked.append(index)
            return super().body(length, seed, index)

    target = Asked("openai", "http://h/function/p")
    sizes = lengths.drawn(1000, seed=1, divisor=16, bound_tokens=2048)
    bodies = Bodies(target, sizes, 1)
    part = bodies[100:110][::3]
    assert (len(bodies), len(part), asked) == (1000, 4, [])
    assert list(part) == [target.body(sizes[i], 1, i) for i in (100, 103, 106, 109)]
    assert bodies[-1] == target.body(sizes[999], 1, 999)
    with pytest.raises(IndexError):
        bodies[1000]


def test_plans_travel_to_other_processes() -> None:
    whole = made(None, rate_rps=20.0, duration_s=5.0, target="openai")
    there = pickle.loads(pickle.dumps(whole))
    assert np.array_equal(there.times_s, whole.times_s)
    assert list(there.bodies) == list(whole.bodies)
    assert list(there.targets) == [0] * 100
    assert there.addresses == ("http://g:1/function/p",)


def test_a_planned_request_takes_21_bytes() -> None:
    """Times, lengths, targets; bodies nothing. 300,000 requests, so that what is fixed does not count."""
    whole = made(None, rate_rps=2000.0, duration_s=150.0, target="openai")
    assert len(pickle.dumps(whole)) / 300_000 == pytest.approx(21, abs=0.1)
    # Beyond the least length there is one column entry each, not one object each.
    assert isinstance(whole.lengths, lengths.Lengths)
    assert arrivals.MAX_ARRIVALS == 20_000_000


def test_arrivals_by_specification() -> None:
    bursts = made(None, arrivals="poisson@burst:base=2,height=100,length=3,every=20", duration_s=60.0)
    assert (len(bursts.times_s), bursts.asked_rate_rps, bursts.asked_cv) == (1002, 16.7, None)
    assert bursts.source.startswith("poisson@burst:base=2,height=100")
    gamma = made(None, arrivals="gamma:cv=4", rate_rps=10.0)
    assert np.array_equal(gamma.times_s, made(None, cv=4.0, rate_rps=10.0).times_s)
    assert (gamma.asked_cv, gamma.source) == (4.0, made(None, cv=4.0, rate_rps=10.0).source)


def test_a_replayed_file_lasts_as_long_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "gaps.txt"
    path.write_text("0.5\n" * 10)
    own = made(None, arrivals=f"replay:{path}")
    assert (len(own.times_s), own.duration_s, own.asked_rate_rps) == (10, 5.0, 2.0)
    fast = made(None, arrivals=f"replay:{path}", rate_rps=4.0)
    assert (len(fast.times_s), fast.duration_s) == (10, 2.5)
    assert own.notes == fast.notes == made(None, arrivals=f"replay:{path},loop", duration_s=9.0).notes == ()
    (told,) = made(None, arrivals=f"poisson:rate=1+replay:{path}", duration_s=9.0).notes
    assert told.startswith(
        f"piece 2 'replay:{path}': the file's 10 arrivals are used up before the run's end"
    )
    assert "its rate would have sent 18" in told


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"arrivals": "poisson", "cv": 2.0, "rate_rps": 1.0},
            "--cv and --arrivals contradict each other: write --arrivals gamma:cv=2",
        ),
        ({"arrivals": "poisson:rate=1", "rate_rps": 1.0}, "--arrivals --rate 1 contradicts 'poisson:rate=1'"),
        (
            {"arrivals": "poisson"},
            "--arrivals piece 1 'poisson': names no rate: give rate= in the piece, or --rate",
        ),
        ({"arrivals": "poisson", "speed": 2.0, "rate_rps": 1.0}, "--speed replays a trace faster"),
        (
            {"arrivals": "poisson:rate=3000", "max_rate_rps": 2e3},
            "piece 1 'poisson:rate=3000' has a rate of 3000/s, above --max-rate 2000",
        ),
        (
            {"arrivals": "poisson@burst:base=1,height=9e3,length=1,every=60", "max_rate_rps": 2e3},
            "a rate of 9000/s, above --max-rate 2000",
        ),
        ({"arrivals": "poisson", "trace": Path("t.csv")}, "--arrivals and --trace contradict each other"),
        (
            {"arrivals": "replay:/nowhere/gaps"},
            "--arrivals piece 1 'replay:/nowhere/gaps': /nowhere/gaps cannot be read",
        ),
        ({"rate_rps": 1.0, "top": 3}, "--top chooses from a trace; it needs --trace"),
        ({"rate_rps": 1.0, "mapping": ("hash:a",)}, "--map chooses from a trace; it needs --trace"),
        ({"rate_rps": 1.0, "from_s": 3.0}, "--from chooses from a trace"),
        ({"trace": Path("t"), "top": 0}, "--top must be at least 1, got 0"),
        ({"trace": Path("t"), "from_s": -1.0}, "--from must be finite and at least 0, got -1"),
        (
            {"trace": Path("t"), "from_s": 5.0, "to_s": 5.0},
            "--to must be finite and above --from (5 s), got 5",
        ),
        (
            {"trace": Path("t"), "within": "often"},
            "--within: arrivals within a minute are poisson, uniform or gamma:CV",
        ),
        ({"trace": Path("t"), "trace_kind": "azure"}, "--trace-kind must be one of azure-functions-2019"),
        (
            {"closed_loop": 4, "rate_rps": 1.0},
            "--closed-loop and --rate contradict each other: in a closed loop",
        ),
        ({"closed_loop": 4, "cv": 1.0}, "--closed-loop and --cv"),
        ({"closed_loop": 4, "arrivals": "poisson"}, "--closed-loop and --arrivals"),
        ({"closed_loop": 4, "trace": Path("t")}, "--closed-loop and --trace"),
        ({"closed_loop": 4, "speed": 2.0}, "--closed-loop and --speed"),
        ({"closed_loop": 4, "search_rate": True}, "--closed-loop and --search-rate"),
        ({"closed_loop": 4, "mapping": ("hash:a",)}, "--map chooses from a trace"),
        ({"closed_loop": 0}, "--closed-loop must be 1 to 100000 clients, got 0"),
        ({"closed_loop": 4, "think_s": -1.0}, "--think-s must be finite and at least 0"),
        ({"rate_rps": 1.0, "think_s": 1.0}, "--think-s is of a closed loop; it needs --closed-loop"),
        ({"search_rate": True}, "--search-rate looks for the highest rate that meets an SLO; it needs"),
        ({"rate_rps": 1.0, "search_repeats": 3}, "--search-repeats is of a search; it needs --search-rate"),
        (
            {"search_rate": True, "slo_latency_s": 1.0, "search_repeats": 2},
            "--search-repeats must be odd, 1 to 9",
        ),
        ({"search_rate": True, "slo_latency_s": 1.0, "search_attainment": 1.5}, "at most 1, got 1.5"),
        (
            {"search_rate": True, "slo_latency_s": 1.0, "search_precision": 0.0},
            "--search-precision must be 0.001 to 1",
        ),
        (
            {"search_rate": True, "slo_latency_s": 1.0, "trace": Path("t"), "speed": 2.0},
            "--speed and --search-rate",
        ),
        ({"rate_rps": 1.0, "processes": 0}, "--processes must be auto or 1 to 256, got 0"),
        ({"rate_rps": 1.0, "http": "3"}, "--http must be 1.1 or 2, got '3'"),
        ({"rate_rps": 1.0, "retries": 11}, "--retries must be 0 to 10, got 11"),
    ],
)
def test_contradictions_are_named(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(OptionError) as caught:
        made(None, **changes)
    assert told in str(caught.value)


def test_a_search_takes_any_process_at_any_rate() -> None:
    for text in ("poisson", "gamma:cv=4", "poisson:rate=1+constant:rate=1", "mmpp:rates=1/9,dwell=2/1"):
        found = made(None, arrivals=text, rate_rps=30.0, duration_s=20.0, search_rate=True, slo_latency_s=1.0)
        assert len(found.times_s) == pytest.approx(600, abs=1)


def test_plans_hold_as_many_of_everything() -> None:
    whole = made(None, rate_rps=20.0, duration_s=5.0)
    with pytest.raises(AssertionError):
        dataclasses.replace(whole, targets=[0])
