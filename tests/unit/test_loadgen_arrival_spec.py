"""The language of --arrivals: what it reads, and how it refuses."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from keystage.loadgen.arrivals import ArrivalError
from keystage.loadgen.arrivals_files import read_gaps, with_files
from keystage.loadgen.arrivals_intensity import Bursts, Modulation, Ramp, Steps
from keystage.loadgen.arrivals_spec import MAX_PIECES, parse, resolved


def test_every_kind_and_profile_is_read() -> None:
    text = (
        "constant:rate=1 + poisson:share=2 + gamma:cv=4 + mmpp:rates=0/20/3,dwell=5/1/2,rate=6 "
        "+ replay:gaps.txt,loop + poisson@ramp:from=0,to=9,over=30 + poisson@step:rates=1/2/3,at=10/20 "
        "+ gamma:cv=2@burst:base=5,height=50,length=2,every=30,first=1"
    )
    pieces = parse(text).pieces
    assert [piece.kind for piece in pieces] == [
        "constant", "poisson", "gamma", "mmpp", "replay", "poisson", "poisson", "gamma",
    ]  # fmt: skip
    assert [piece.cv for piece in pieces] == [0.0, 1.0, 4.0, None, None, 1.0, 1.0, 2.0]
    assert (pieces[0].rate_rps, pieces[1].share, pieces[3].rate_rps) == (1.0, 2.0, 6.0)
    assert pieces[3].modulation == Modulation((0.0, 20.0, 3.0), (5.0, 1.0, 2.0))
    assert (pieces[4].path, pieces[4].looped) == (Path("gaps.txt"), True)
    assert pieces[5].profile == Ramp(0.0, 9.0, 30.0)
    assert pieces[6].profile == Steps((1.0, 2.0, 3.0), (10.0, 20.0))
    assert pieces[7].profile == Bursts(5.0, 50.0, 2.0, 30.0, 1.0)


def test_quotes_keep_a_path_whole() -> None:
    (piece,) = parse('replay:"a+b@c,d.txt",rate=3').pieces
    assert (piece.path, piece.rate_rps) == (Path("a+b@c,d.txt"), 3.0)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "piece 1 '': is empty; give one of constant, poisson, gamma, mmpp, replay"),
        ("poisson+", "piece 2 '': is empty"),
        ("poison:rate=1", "piece 1 'poison:rate=1': process must be one of constant, poisson, gamma"),
        ("poisson+gamma", "piece 2 'gamma': cv= is needed"),
        ("gamma:cv=-1", "cv must be finite and at least 0, got -1"),
        ("gamma:cv=nan", "cv must be finite and at least 0, got nan"),
        ("gamma:cv=x", "cv must be a number at least 0, got 'x'"),
        ("gamma:cv=1,cv=2", "cv is given twice: '1' and '2'"),
        ("poisson:rate=0", "rate must be finite and above 0, got 0"),
        ("poisson:rate=1e+3", "piece 1 'poisson:rate=1e': rate must be a number above 0, got '1e'"),
        ("poisson:cv=2", "poisson takes rate=, share=; got 'cv=2'"),
        ("constant:5", "constant takes rate=, share=; got '5'"),
        ("poisson:share=2,rate=3", "share and a rate of its own contradict each other"),
        ("mmpp:rates=1,dwell=2", "rates must be of 2 to 64 states, got 1"),
        ("mmpp:rates=1/2,dwell=3", "dwell must have a mean time for each of 2 rates, got 1"),
        ("mmpp:rates=1/2,dwell=3/0", "dwell must be finite and above 0, got 0"),
        ("mmpp:rates=0/0,dwell=3/1", "one of rates must be above 0"),
        ("mmpp:dwell=3/1", "rates= is needed, a list as in rates=1/10"),
        ("mmpp:rates=1/2,dwell=3/1@ramp:from=1,to=2", "an mmpp takes no profile"),
        ("replay:", "a file is needed, as in replay:gaps.txt, got ''"),
        ("replay:rate=2", "a file is needed, as in replay:gaps.txt, got 'rate=2'"),
        ("replay:f,loop=maybe", "loop must be yes or no, got 'maybe'"),
        ('replay:"f', "has a quote that is not closed"),
        ("poisson@bump:a=1", "profile must be one of ramp, step, burst, got 'bump'"),
        ("poisson@ramp:from=1,to=2@ramp:from=1,to=2", "one profile at most, got 2"),
        ("poisson@ramp:from=1", "profile 'ramp:from=1': to= is needed"),
        ("poisson@ramp:from=0,to=0", "one of its rates must be above 0, all are 0"),
        ("poisson@ramp:from=1,to=2,over=0", "over must be finite and above 0, got 0"),
        ("poisson@step:rates=1/2,at=1/2", "at must hold 1 times for 2 rates (the first holds from 0), got 2"),
        ("poisson@step:rates=1/2/3,at=2/1", "at must be ascending, got 2/1"),
        ("poisson@burst:base=1,height=9,length=3,every=2", "length must be below every (2 s), got 3"),
        ("poisson@burst:base=9,height=9,length=1,every=2", "must be above base (9/s), got 9"),
        ("+".join(["poisson"] * (MAX_PIECES + 1)), "at most 64 pieces, got 65"),
    ],
)
def test_refusals_name_piece_bound_and_value(text: str, told: str) -> None:
    with pytest.raises(ArrivalError) as caught:
        parse(text)
    assert told in str(caught.value)


def test_rates_that_nobody_takes_or_that_are_missing() -> None:
    with pytest.raises(ArrivalError, match=r"piece 2 'poisson': names no rate"):
        resolved("constant:rate=2+poisson", None)
    with pytest.raises(ArrivalError, match=r"--rate 5 contradicts 'poisson:rate=2': each of its pieces"):
        resolved("poisson:rate=2", 5.0)
    with pytest.raises(ArrivalError, match=r"--rate 5 contradicts"):
        resolved("poisson@ramp:from=1,to=2", 5.0)
    with pytest.raises(ArrivalError, match=r"either every piece names a rate of its own, or none does"):
        resolved("poisson:rate=2+poisson", 5.0, is_search=True)
    assert resolved("replay:f", None).takes_rate
    assert not resolved("poisson:rate=2", None, is_search=True).takes_rate


@pytest.mark.parametrize(
    "text", ["mmpp:rates=1e308/1e308,dwell=1/1e308", "poisson:rate=1e308+poisson:rate=1"]
)
def test_numbers_that_overflow_are_refused(text: str) -> None:
    with pytest.raises(ArrivalError, match=r"must be at most 1e\+12, got 1e308"):
        parse(text)


@pytest.mark.parametrize("text", ["poisson:rate=1e12", "poisson:rate=1e12+mmpp:rates=1e12/0,dwell=1e8/1e8"])
def test_more_than_a_schedule_holds_is_refused(text: str) -> None:
    with pytest.raises(ArrivalError, match=r"gives \S+ arrivals, at most 20000000"):
        parse(text).times(None, 1e9, 0)


def test_files_of_gaps(tmp_path: Path) -> None:
    plain, packed = tmp_path / "gaps.txt", tmp_path / "gaps.txt.gz"
    text = "\ufeff# seconds\n0.5\n\n1e-3\n 2 \n"
    plain.write_text(text, encoding="utf-8")
    packed.write_bytes(gzip.compress(text.encode()))
    for path in (plain, packed):
        assert read_gaps(path).tolist() == [0.5, 0.001, 2.0]
    times = with_files(parse(f"replay:{plain}")).times(None, 60.0, 1)
    assert times.tolist() == np.cumsum([0.5, 0.001, 2.0]).tolist()


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"1\n-0.5\n", "line 2: an inter-arrival time is a number of seconds, at least 0, got '-0.5'"),
        (b"1\nnan\n", "line 2"),
        (b"inf\n", "line 1"),
        (b"1,2\n", "line 1: an inter-arrival time is a number of seconds, at least 0, got '1,2'"),
        (b"# nothing\n", "holds no inter-arrival time"),
        (b"0\n0\n", "its 2 gaps sum to 0 s"),
        (b"1e-310\n", "its 1 gaps sum to 1e-310 s"),
        (b"1e308\n1e308\n", "its 2 gaps sum to inf s"),
        (b"\xff\xfe\x00", "is not text"),
    ],
)
def test_files_that_hold_no_gaps_are_refused(content: bytes, told: str, tmp_path: Path) -> None:
    path = tmp_path / "gaps.txt"
    path.write_bytes(content)
    with pytest.raises(ArrivalError) as caught:
        with_files(parse(f"poisson:rate=1+replay:{path}"))
    assert str(caught.value).startswith("piece 2 ")
    assert str(path) in str(caught.value)
    assert told in str(caught.value)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArrivalError, match=r"cannot be read: No such file"):
        read_gaps(tmp_path / "none")
    cut = tmp_path / "cut.gz"
    cut.write_bytes(gzip.compress(b"1\n" * 10_000)[:-9])
    with pytest.raises(ArrivalError, match="is no whole gzip file"):
        read_gaps(cut)
    cut.write_bytes(b"1\n2\n")
    with pytest.raises(ArrivalError, match="is no whole gzip file"):
        read_gaps(cut)
