"""The real tokenizer and chat template: equal to `tokenizers` and `transformers`, token by token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer

from keystage.bundle.api import Pipeline
from keystage.router.text import HfText, PieceDecoder, load_text
from keystage.router.text_chat import ChatTemplate

TEXTS = [
    "The capital of France is Paris.\n\n  Indented\tand  spaced.",
    "Zürich, Łódź, naïve café — “quoted” … €5",
    "東京は日本の首都です。 Привет, мир! שלום مرحبا",
    "🙂🙃👩‍👩‍👧‍👦 flags 🇨🇭🇯🇵 and 𐍈𐍅𐍂 𒀀",
    'def f(x):\n    return {"a": [1, 2.5e-3]}  # ok\n',
]
CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "Hi"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi <b>&</b>"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Bye\n"},
    ],
]


@pytest.fixture(scope="module")
def pipeline(smollm2_bundle: Path) -> Pipeline:
    return msgspec.json.decode((smollm2_bundle / "pipeline.json").read_bytes(), type=Pipeline)


@pytest.fixture(scope="module")
def tokenizer(smollm2_bundle: Path) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2_bundle / "tokenizer.json"))


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_come_back_as_the_text(
    pipeline: Pipeline, smollm2_bundle: Path, tokenizer: Tokenizer, text: str
) -> None:
    codec = load_text(pipeline, smollm2_bundle)
    assert isinstance(codec, HfText)
    ids = codec.encode(text)
    assert ids == tokenizer.encode(text, add_special_tokens=False).ids
    decoder = codec.decoder(codec.encode("Say: "))
    assert isinstance(decoder, PieceDecoder)
    parts = [decoder.push([token]) for token in ids]
    assert "\ufffd" not in "".join(parts)
    assert "".join(parts) + decoder.flush() == text


def test_every_single_token_is_shown_as_the_tokenizer_shows_it(
    pipeline: Pipeline, smollm2_bundle: Path, tokenizer: Tokenizer
) -> None:
    codec = load_text(pipeline, smollm2_bundle)
    for token in range(tokenizer.get_vocab_size()):
        decoder = codec.decoder()
        assert decoder.push([token]) + decoder.flush() == tokenizer.decode([token]), token


@pytest.mark.parametrize("messages", CHATS)
def test_chat_template_is_transformers_own(
    pipeline: Pipeline, smollm2_hf: Path, messages: list[dict[str, str]]
) -> None:
    transformers = pytest.importorskip("transformers")
    reference: Any = transformers.AutoTokenizer.from_pretrained(str(smollm2_hf))
    expected = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ChatTemplate(pipeline.chat_template, pipeline.special_tokens).render(messages) == expected
