"""However tokens are grouped, the text is the same; stop strings never show, in whole or in part."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.face_server import byte_level_tokenizer

from keystage.router.text import HfText, IncrementalDecoder, decode
from keystage.router.text_output import TextOutput
from keystage.router.text_stop import StopMatcher

TOKENIZER = byte_level_tokenizer(["stop and go and stop", "東京 Zürich"] * 10, ["<|end|>"])
TEXT = HfText(TOKENIZER.to_str().encode())
IDS = st.lists(st.integers(0, TOKENIZER.get_vocab_size() - 1), max_size=40)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4)


def grouped(ids: list[int], cuts: list[int]) -> list[list[int]]:
    """Splits a list at positions drawn at will; empty groups included."""
    edges = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    return [ids[a:b] for a, b in itertools.pairwise(edges)]


def run(output: TextOutput, groups: list[list[int]]) -> tuple[str, int, str]:
    shown = []
    for group in groups:
        shown.append(output.push(group))
        if output.is_cut:
            break
    tail, reason = output.finish()
    return "".join([*shown, tail]), output.tokens, reason


@given(IDS, st.lists(st.integers(0, 100), max_size=8))
def test_any_ids_in_any_groups_give_the_tokenizers_own_text(ids: list[int], cuts: list[int]) -> None:
    decoder = TEXT.decoder()
    shown = "".join([decoder.push(group) for group in grouped(ids, cuts)]) + decoder.flush()
    assert shown == TOKENIZER.decode(ids, skip_special_tokens=True)


@given(st.text(max_size=60))
def test_text_survives_the_round_trip(text: str) -> None:
    assert decode(TEXT, TEXT.encode(text)) == text


@given(st.text("ab", max_size=30), STOPS)
def test_stop_strings_by_character(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    for at, character in enumerate(text):
        shown += matcher.push(character)
        assert text.startswith(shown)
        assert not any(stop in shown for stop in stops)
        # All that can be shown is shown: what is held back is the start of a stop string.
        held = text[len(shown) : at + 1]
        assert matcher.matched is not None or not held or any(stop.startswith(held) for stop in stops)
        if matcher.matched is not None:
            assert text[: at + 1].endswith(matcher.matched)
            assert shown == text[: at + 1 - len(matcher.matched)]
            assert matcher.push("more") == ""
            return
    assert not any(stop in text for stop in stops)
    assert shown + matcher.flush() == text


@given(st.text("ab", max_size=30), STOPS, st.lists(st.integers(0, 100), max_size=8))
def test_answer_does_not_depend_on_how_tokens_come(text: str, stops: list[str], cuts: list[int]) -> None:
    ids = TEXT.encode(text)
    whole = run(TextOutput(TEXT.decoder(), stops, ()), [ids])
    assert run(TextOutput(TEXT.decoder(), stops, ()), grouped(ids, cuts)) == whole
    assert (whole[2] == "stop") == any(stop in text for stop in stops)


@given(IDS, st.lists(st.integers(0, 100), max_size=8), st.booleans())
def test_end_token_ends_unshown_and_counted(ids: list[int], cuts: list[int], with_stop: bool) -> None:
    end = TOKENIZER.get_vocab_size() - 1  # an ordinary token that the pipeline ends with
    ids = [i for i in ids if i != end]
    stops = ["never in the text: \x00"] if with_stop else []
    text, tokens, reason = run(TextOutput(TEXT.decoder(), stops, (end,)), [*grouped(ids, cuts), [end]])
    assert (text, tokens, reason) == (decode(TEXT, ids), len(ids) + 1, "stop")


def test_stop_string_across_tokens_is_never_leaked() -> None:
    matcher = StopMatcher(["STOP"])
    assert [matcher.push(part) for part in ("go S", "TO", "X ST", "O", "P!")] == ["go ", "", "STOX ", "", ""]
    assert matcher.matched == "STOP"


def test_first_to_begin_wins_within_one_text() -> None:
    matcher = StopMatcher(["bc", "abcd"])
    assert matcher.push("xabcd") == "x"
    assert matcher.matched == "abcd"


@pytest.mark.parametrize("stops", [[], ["zz"]])
def test_cut_by_length(stops: list[str]) -> None:
    decoder: IncrementalDecoder = TEXT.decoder()
    assert run(TextOutput(decoder, stops, ()), [TEXT.encode("go z")]) == (
        "go z",
        len(TEXT.encode("go z")),
        "length",
    )
