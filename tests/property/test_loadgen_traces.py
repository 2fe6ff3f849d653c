"""Whatever is in a trace file: rows in order, or a TraceError; counts are kept; streams are independent."""

import gzip
import itertools
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.traces import COUNTS_2019, DURATIONS_2019, GOOD, MEMORY_2019, minute_counts

from keystage.loadgen.traces import KINDS, Selection, TraceError, open_trace
from keystage.loadgen.traces.counts import CountStore
from keystage.loadgen.traces.moments import Bins, Digest, Moments
from keystage.loadgen.traces.survey import survey


@contextmanager
def written(data: bytes) -> Iterator[Path]:
    """A file, in a folder of the example."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace"
        path.write_bytes(data)
        yield path


NUMBERS = st.one_of(
    st.sampled_from(
        ["", "nan", "-1", "1e999", "9" * 40, "0x1", "1_0", "1 2", "٣", "\0", '"', "-0.0", "1e-320"]
    ),
    st.floats().map(str),
    st.integers().map(str),
    st.text(max_size=8),
)
STAMPS = st.one_of(
    st.sampled_from(["0001-01-01 00:00:00+23:59", "9999-12-31T23:59:59-23:59", "2023-02-30 00:00:00"]),
    st.datetimes().map(str),
    NUMBERS,
)


@st.composite
def spoiled(draw: st.DrawFn, text: str) -> bytes:
    """A good file with some fields replaced, lines moved, bytes changed, the end cut, packed or not."""
    lines = [line.split(",") for line in text.splitlines()]
    for _ in range(draw(st.integers(0, 3))):
        line = draw(st.sampled_from(lines))
        at = draw(st.integers(0, len(line) - 1))
        line[at] = draw(st.one_of(NUMBERS, STAMPS))
    if draw(st.booleans()):
        lines = draw(st.permutations(lines))
    data = bytearray("\n".join(",".join(line) for line in lines).encode("utf-8", "surrogatepass"))
    if draw(st.booleans()):
        data = bytearray(gzip.compress(bytes(data)))
    for _ in range(draw(st.integers(0, 2))):
        if data:
            data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return bytes(data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data)


@settings(deadline=None, max_examples=300)
@given(data=st.data(), kind=st.sampled_from(KINDS), is_told=st.booleans())
def test_a_parser_gives_rows_in_order_or_a_trace_error(data: st.DataObject, kind: str, is_told: bool) -> None:
    with written(data.draw(spoiled(GOOD[kind]))) as path:
        try:
            trace = open_trace(path, kind=kind if is_told else None)
            last_s = 0.0
            for one in trace.invocations():
                assert last_s <= one.at_s < float("inf")
                assert one.duration_s is None or one.duration_s >= 0
                last_s = one.at_s
            survey(trace).document()
        except TraceError as error:
            assert error.line >= 0  # noqa: PT017
            assert "\n" not in str(error)  # noqa: PT017


@settings(deadline=None, max_examples=100)
@given(data=st.data(), text=st.sampled_from([DURATIONS_2019, MEMORY_2019]))
def test_a_joined_file_is_read_or_a_trace_error(data: st.DataObject, text: str) -> None:
    with written(data.draw(spoiled(text))) as joined, written(COUNTS_2019.encode()) as path:
        name = "durations" if text is DURATIONS_2019 else "memory"
        try:
            list(open_trace(path, **{name: joined}).invocations())
        except TraceError as error:
            assert error.path == joined  # noqa: PT017


@settings(deadline=None, max_examples=100)
@given(data=st.binary(max_size=300), kind=st.sampled_from([None, *KINDS]))
def test_any_bytes_are_a_trace_or_a_trace_error(data: bytes, kind: str | None) -> None:
    with written(data) as path:
        try:
            list(open_trace(path, kind=kind).invocations())
        except TraceError:
            return


COUNTS = st.lists(st.lists(st.integers(0, 60), min_size=4, max_size=4), min_size=1, max_size=6)
WITHIN = st.one_of(st.sampled_from(["poisson", "uniform"]), st.floats(0, 100).map("gamma:{!r}".format))


def counts_file(counts: list[list[int]], first: int) -> bytes:
    header = "HashOwner,HashApp,HashFunction,Trigger," + ",".join(str(first + k) for k in range(4))
    rows = [f"o,a,f{k},http," + ",".join(map(str, row)) for k, row in enumerate(counts)]
    return "\n".join((header, *rows)).encode()


@settings(deadline=None)
@given(counts=COUNTS, within=WITHIN, seed=st.integers(0, 2**70), first=st.integers(1, 1437))
def test_counts_are_kept_whatever_the_way_within_the_minute(
    counts: list[list[int]], within: str, seed: int, first: int
) -> None:
    with written(counts_file(counts, first)) as path:
        trace = open_trace(path)
        whole = list(trace.invocations(within=within, seed=seed))
        expected = {(f"a/f{f}", first + m): n for f, row in enumerate(counts) for m, n in enumerate(row) if n}
        assert minute_counts(whole, first) == Counter(expected)
        alone = list(trace.invocations(Selection(functions=("a/f0",)), within=within, seed=seed))
        assert alone == [one for one in whole if one.function == "a/f0"]
        part = list(trace.invocations(Selection(from_s=60, to_s=180), within=within, seed=seed))
        assert [one.at_s for one in part] == [one.at_s - 60 for one in whole if 60 <= one.at_s < 180]


@given(
    counts=st.lists(st.lists(st.integers(0, 9), min_size=7, max_size=7), max_size=12),
    buffered=st.integers(1, 40),
)
def test_counts_come_back_by_minute_from_memory_and_file(counts: list[list[int]], buffered: int) -> None:
    with CountStore(7, buffered) as store:
        for row, own in enumerate(counts):
            store.add(row, np.array(own, np.int64))
        found = [(m, rows.tolist(), n.tolist()) for m, rows, n in store.by_minute()]
    columns = [[(row, own[m]) for row, own in enumerate(counts) if own[m]] for m in range(7)]
    assert found == [(m, [r for r, _ in c], [n for _, n in c]) for m, c in enumerate(columns) if c]


@given(
    times=st.lists(st.floats(0, 500), min_size=1, max_size=80).map(sorted),
    cuts=st.sets(st.integers(1, 79)),
    width_s=st.sampled_from([1.0, 7.5, 60.0]),
    extra_s=st.floats(0, 200),
)
def test_bins_are_the_same_however_times_are_cut_into_blocks(
    times: list[float], cuts: set[int], width_s: float, extra_s: float
) -> None:
    bins = Bins(width_s, 0.0)
    edges = [0, *sorted(cut for cut in cuts if cut < len(times)), len(times)]
    for low, high in itertools.pairwise(edges):
        bins.add(np.array(times[low:high]))
    end_s = times[-1] + extra_s
    bins.close(end_s)
    whole = int(end_s / width_s)
    counts = np.bincount((np.array(times) / width_s).astype(int), minlength=whole)
    assert bins.peak == counts.max()
    assert bins.moments.count == whole
    if whole:
        assert np.isclose(bins.moments.mean, counts[:whole].mean())
        assert np.isclose(bins.moments.squares, whole * counts[:whole].var(), atol=1e-9)


@given(values=st.lists(st.floats(0, 1e12), min_size=1, max_size=60), cut=st.integers(0, 60))
def test_digests_keep_three_digits(values: list[float], cut: int) -> None:
    digest = Digest()
    digest.add(np.array(values[:cut]))
    digest.add(np.array(values[cut:]))
    ordered = sorted(values)
    probabilities = (0.0, 0.1, 0.5, 0.9, 1.0)
    for p, got in zip(probabilities, digest.quantiles(probabilities), strict=True):
        exact = ordered[max(int(np.ceil(p * len(values))) - 1, 0)]
        near = [v for v in ordered if np.isclose(v, got, rtol=0.0051, atol=1e-12)]
        assert near, (p, got, exact)
        assert np.isclose(got, exact, rtol=0.0102, atol=1e-11)
    assert np.isclose(digest.mean, np.mean(values))


@given(values=st.lists(st.floats(0, 1e6), max_size=30), zeros=st.integers(0, 30), cut=st.integers(0, 30))
def test_moments_merge(values: list[float], zeros: int, cut: int) -> None:
    moments = Moments()
    moments.add(np.array(values[:cut]))
    moments.add_zeros(zeros)
    moments.add(np.array(values[cut:]))
    whole = np.array(values + [0.0] * zeros)
    assert moments.count == len(whole)
    if len(whole) > 1 and whole.mean() > 1e-6:
        assert moments.cv is not None
        assert np.isclose(moments.cv, whole.std() / whole.mean(), atol=1e-6)
