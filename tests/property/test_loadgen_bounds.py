"""Properties of the load generator's pure parts."""

import itertools
import math

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from keystage.loadgen import arrivals, lengths, measures
from keystage.loadgen.sender import Row
from keystage.loadgen.sse import EventParser, StreamTally


@given(
    context=st.integers(0, 10**6),
    generated=st.integers(0, 10**6),
    divisor=st.floats(0.1, 1000),
    bound=st.integers(2, 10**5),
)
def test_lengths_fit_the_model(context: int, generated: int, divisor: float, bound: int) -> None:
    size = lengths.fitted([context], [generated], divisor=divisor, bound_tokens=bound)[0]
    assert size.prompt_tokens >= 1
    assert size.output_tokens >= 1
    assert size.prompt_tokens + size.output_tokens <= bound


@given(
    rate=st.floats(0.5, 200), cv=st.floats(0, 8), duration=st.floats(2, 50), seed=st.integers(0, 2**64 - 1)
)
def test_schedules_are_ascending_and_span_the_duration(
    rate: float, cv: float, duration: float, seed: int
) -> None:
    try:
        times = arrivals.synthetic(rate, cv, duration, seed)
    except arrivals.ArrivalError as error:
        assert round(rate * duration) < 1 or "all" in str(error)  # noqa: PT017
        return
    assert len(times) == round(rate * duration)
    assert times[-1] == duration
    assert all(0 <= before <= after for before, after in itertools.pairwise(times))


@given(values=st.lists(st.floats(0, 1e6), max_size=200), failed=st.integers(0, 200))
def test_percentiles_are_ordered_and_failures_come_last(values: list[float], failed: int) -> None:
    got = measures.percentiles(values, failed)
    ranks = [math.inf if rank is None else rank for rank in (got.p50, got.p90, got.p95, got.p99)]
    assert ranks == sorted(ranks)
    assert got.count == len(values) + failed
    if failed > 0.01 * got.count + 1:
        assert got.p99 is None
    if failed == 0 and values:
        assert got.p99 is not None
        assert got.p99 <= max(values)


@given(
    lags=st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10), st.booleans()), min_size=1, max_size=60),
    bound=st.floats(0.01, 5),
)
def test_attainment_grows_with_the_scale(lags: list[tuple[float, float, bool]], bound: float) -> None:
    rows = [
        Row(i, 0.0, 0.0, first, first + rest, 200, 5, 5, "" if ok else "http_500: no")
        for i, (first, rest, ok) in enumerate(lags)
    ]
    lines = measures.attainments(rows, measures.Slo(ttft_s=bound, tpot_s=bound / 4), 1.0)
    met = [line.met for line in lines]
    assert met == sorted(met)
    assert met[-1] <= sum(ok for _, _, ok in lags)


@given(
    texts=st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=12),
    ends=st.sampled_from(["\n", "\r\n", "\r"]),
    cuts=st.lists(st.integers(0, 2000), max_size=20),
)
def test_streams_read_alike_however_they_are_cut(texts: list[str], ends: str, cuts: list[int]) -> None:
    chunks = [{"choices": [{"text": text, "finish_reason": None}]} for text in texts]
    chunks.append({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": len(texts)}})
    whole = (
        b"".join(b"data: " + msgspec.json.encode(chunk) + ends.encode() * 2 for chunk in chunks)
        + b"data: [DONE]"
        + ends.encode() * 2
        + b": a comment"
        + ends.encode() * 2
    )
    places = sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})
    tally, parser = StreamTally(), EventParser()
    events = []
    for number, (begin, end) in enumerate(itertools.pairwise(places)):
        tally.feed(whole[begin:end], float(number))
        events += parser.feed(whole[begin:end])
    assert tally.verdict() == ""
    assert (tally.prompt_tokens, tally.output_tokens) == (3, len(texts))
    assert len(events) == len(texts) + 2
