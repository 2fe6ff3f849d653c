"""Ids to text as they come: byte-level, SentencePiece-like and other tokenizers."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from support.face_server import byte_level_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models

from keystage.bundle.api import emulated
from keystage.bundle.errors import BundleError
from keystage.router.text import ByteText, HfText, PieceDecoder, WindowDecoder, decode, load_text

CORPUS = ["the quick brown fox jumps over the lazy dog", "Zürich, Łódź, 東京, 🙂🙃 and ñandú"] * 20


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    tokenizer = byte_level_tokenizer(CORPUS, ["<|end|>"])
    tokenizer.add_tokens([AddedToken("ünplain word", normalized=False)])
    return tokenizer


@pytest.fixture(scope="module")
def sentencepiece() -> Tokenizer:
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{b:02X}>" for b in range(256)),
        "▁",
        "▁Paris",
        "▁is",
        "Par",
        "is",
        "a",
    ]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={p: i for i, p in enumerate(pieces)}, merges=[], byte_fallback=True, unk_token="<unk>"
        )
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def id_of(tokenizer: Tokenizer, token: str) -> int:
    found = tokenizer.token_to_id(token)
    assert found is not None, token
    return found


def codec(tokenizer: Tokenizer) -> HfText:
    return HfText(tokenizer.to_str().encode())


def test_character_of_four_bytes_comes_out_whole(byte_level: Tokenizer) -> None:
    text = codec(byte_level)
    decoder = text.decoder()
    assert isinstance(decoder, PieceDecoder)
    ids = byte_level.encode("𐍈").ids  # not in the corpus: one token per byte
    assert len(ids) == 4
    assert [decoder.push([i]) for i in ids] == ["", "", "", "𐍈"]
    assert decoder.flush() == ""


def test_unfinished_character_is_flushed_as_replacement(byte_level: Tokenizer) -> None:
    decoder = codec(byte_level).decoder()
    first = byte_level.encode("𐍈").ids[0]
    assert decoder.push([first]) == ""
    assert decoder.flush() == "\ufffd"


def test_broken_character_does_not_hold_what_follows(byte_level: Tokenizer) -> None:
    decoder = codec(byte_level).decoder()
    first = byte_level.encode("𐍈").ids[0]
    assert decoder.push([first]) == ""
    assert decoder.push(byte_level.encode("fox").ids) == "\ufffdfox"


def test_special_tokens_are_not_shown_and_added_ones_are(byte_level: Tokenizer) -> None:
    text = codec(byte_level)
    end = id_of(byte_level, "<|end|>")
    assert decode(text, [end, *text.encode("the fox"), end]) == "the fox"
    assert decode(text, text.encode("an ünplain word")) == "an ünplain word"


def test_ids_beyond_the_vocabulary_show_nothing(byte_level: Tokenizer) -> None:
    assert decode(codec(byte_level), [10**6]) == ""


def test_continuing_a_prompt_keeps_the_space_that_a_new_text_drops(sentencepiece: Tokenizer) -> None:
    text = codec(sentencepiece)
    paris, is_ = id_of(sentencepiece, "▁Paris"), id_of(sentencepiece, "▁is")
    assert decode(text, [paris, is_]) == "Paris is" == sentencepiece.decode([paris, is_])
    continued = text.decoder([is_])
    assert continued.push([paris]) + continued.push([is_]) == " Paris is"


def test_lone_spaces_at_the_start_drop_one_only(sentencepiece: Tokenizer) -> None:
    space, a = id_of(sentencepiece, "▁"), id_of(sentencepiece, "a")
    decoder = codec(sentencepiece).decoder()
    shown = [decoder.push([i]) for i in (space, space, a)]
    assert shown == ["", " ", "a"]
    assert "".join(shown) == sentencepiece.decode([space, space, a])


def test_byte_fallback_joins_to_characters(sentencepiece: Tokenizer) -> None:
    decoder = codec(sentencepiece).decoder([1])
    ids = [id_of(sentencepiece, f"<0x{b:02X}>") for b in "é".encode()]
    assert [decoder.push([i]) for i in ids] == ["", "é"]


def test_prompt_of_ids_that_ends_inside_a_character(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("𐍈").ids
    decoder = codec(byte_level).decoder(ids[:2])
    assert decoder.push(ids[2:]) == "𐍈"


def test_other_tokenizers_are_served_by_a_window() -> None:
    vocab = {w: i for i, w in enumerate(["[UNK]", "play", "##ing", "##er", "chess", "all", "day"])}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    text = codec(tokenizer)
    decoder = text.decoder()
    assert isinstance(decoder, WindowDecoder)
    ids = [vocab[w] for w in ("play", "##ing", "chess", "all", "day", "play", "##er", "all", "day", "chess")]
    assert [decoder.push([i]) for i in ids[:3]] == ["play", "ing", " chess"]
    assert "playing chess" + "".join(decoder.push([i]) for i in ids[3:]) == tokenizer.decode(ids)
    assert decoder.flush() == ""


def test_window_lets_broken_text_out_at_last() -> None:
    pushed: list[int] = []

    def broken(ids: list[int]) -> str:
        pushed.append(len(ids))
        return "\ufffd" * len(ids)

    decoder = WindowDecoder(broken, ())
    shown = [decoder.push([0]) for _ in range(100)]
    assert sum(map(len, shown)) + len(decoder.flush()) == 100
    assert max(pushed) < 30  # the cost of a push does not grow with the text


def test_byte_text_shows_every_id_as_one_character() -> None:
    text = ByteText()
    assert text.encode("é") == [0xC3, 0xA9]
    assert len(decode(text, list(range(256)))) == 256
    assert text.decoder().flush() == ""


def test_pipeline_says_which_codec(tmp_path: Path, byte_level: Tokenizer) -> None:
    pipeline = emulated("p", 2, execution="looping")
    assert isinstance(load_text(pipeline, None), ByteText)
    byte_level.save(str(tmp_path / "tokenizer.json"))
    with_file = msgspec.structs.replace(pipeline, tokenizer="tokenizer.json")
    assert isinstance(load_text(with_file, tmp_path), HfText)
    with pytest.raises(BundleError, match="tokenizer"):
        load_text(with_file, None)


def test_metaspace_tokenizer() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"▁a": 0, "b": 1, "▁": 2}, merges=[]))
    tokenizer.decoder = decoders.Metaspace()
    assert json.loads(tokenizer.to_str())["decoder"]["type"] == "Metaspace"
    text = codec(tokenizer)
    assert decode(text, [0, 1, 0]) == "ab a" == tokenizer.decode([0, 1, 0])
    assert text.decoder([1]).push([0]) == " a"
