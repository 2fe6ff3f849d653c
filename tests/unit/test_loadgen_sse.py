"""The completion stream reader."""

import pytest

from keystage.loadgen.sse import EventParser, StreamTally

TOKEN = b'data: {"id":"c","choices":[{"index":0,"text":" a","finish_reason":null}]}\n\n'
EMPTY = b'data: {"choices":[{"index":0,"text":"","finish_reason":null}]}\n\n'
FINISH = b'data: {"choices":[{"index":0,"text":"","finish_reason":"length"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":9,"total_tokens":16}}\n\n'
DONE = b"data: [DONE]\n\n"


def test_times_of_first_and_last_text() -> None:
    tally = StreamTally()
    for now_s, received in enumerate((EMPTY, TOKEN, TOKEN + TOKEN, FINISH, USAGE + DONE)):
        tally.feed(received, float(now_s))
    assert (tally.first_s, tally.last_s) == (1.0, 3.0)
    assert (tally.prompt_tokens, tally.output_tokens) == (7, 9)
    assert tally.verdict() == ""


def test_without_usage_chunks_are_counted() -> None:
    tally = StreamTally()
    tally.feed(TOKEN * 3 + DONE, 1.0)
    assert (tally.prompt_tokens, tally.output_tokens, tally.verdict()) == (None, 3, "")


@pytest.mark.parametrize(
    ("received", "verdict"),
    [
        (TOKEN, "truncated: the stream ended without [DONE] after 1 chunks"),
        (b"", "truncated: the stream ended without [DONE] after 0 chunks"),
        (TOKEN + b'data: {"error":{"message":"stage 2 died"}}\n\n' + DONE, "stream_error: "),
        (b"data: {nonsense\n\n" + DONE, "bad_answer: "),
        (b'data: {"choices":[{"text":5}]}\n\n' + DONE, "bad_answer: "),
    ],
)
def test_incomplete_answers_are_named(received: bytes, verdict: str) -> None:
    tally = StreamTally()
    tally.feed(received, 0.0)
    assert tally.verdict().startswith(verdict)


def test_error_event_text_is_kept() -> None:
    tally = StreamTally()
    tally.feed(b'data: {"error":{"message":"stage 2 died"}}\n\n', 0.0)
    assert "stage 2 died" in tally.error


def test_data_lines_of_one_event_are_joined_and_other_fields_ignored() -> None:
    parser = EventParser()
    assert parser.feed(b"event: x\nid: 4\ndata: a\ndata:b\n\n: comment\n\n") == [b"a\nb"]
    assert parser.is_clean
    assert parser.feed(b"data: half") == []
    assert not parser.is_clean
