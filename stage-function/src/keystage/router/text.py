"""Text in, token ids out, and back: what the HTTP face knows of tokenizers.

Before it: `router.openai` has a prompt as text. After it: the engine works on ids, and
`text_output` turns new ids into text as they come. Decoding is a table look-up per id plus an
incremental UTF-8 decoder (`text_pieces`), so a stream costs O(1) per token however long it is.

This module must not know HTTP, and must not add tokens to a prompt (the caller adds `bos`).
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer

from keystage.bundle.api import Pipeline
from keystage.bundle.errors import BundleError
from keystage.bundle.tokenizer_faults import refusing
from keystage.router.engine import InvalidRequest
from keystage.router.text_pieces import Pieces, pieces_of

_CONTEXT_IDS = 6
"""Ids of left context that a decoder without a piece table decodes again at every push."""
_HELD_IDS = 16
"""Ids held back at most while their text ends in a broken character (a character has 4 bytes)."""


class IncrementalDecoder(Protocol):
    """Text of one session's new tokens, as they come."""

    def push(self, ids: Sequence[int]) -> str:
        """Takes new ids and returns the text that is complete; a cut character is held back."""

    def flush(self) -> str:
        """Returns what was held back: replacement characters for a character never finished."""


class TextCodec(Protocol):
    """Translates between text and the pipeline's token ids."""

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without tokens added before or after it."""

    def encode_whole(self, text: str) -> list[int]:
        """Token ids of `text` as one input of an encoder, with what its tokenizer puts around it."""

    def token_id(self, token: str) -> int | None:
        """Id of a token by its name, None: there is none."""

    def decoder(self, prompt: Sequence[int] = ()) -> IncrementalDecoder:
        """A decoder for tokens that follow `prompt` (no `prompt`: the text starts here)."""


def decode(codec: TextCodec, ids: Sequence[int]) -> str:
    """Text of a whole token sequence, special tokens left out."""
    decoder = codec.decoder()
    return decoder.push(ids) + decoder.flush()


class PieceDecoder:
    """Joins pieces of bytes and lets whole characters out.

    Attributes:
        pieces: bytes per token id.
        strip: leading spaces to drop (SentencePiece puts one before the first word of a text).
    """

    __slots__ = ("_bytes", "_strip", "_utf8")

    def __init__(self, pieces: Pieces, prompt: Sequence[int]) -> None:
        self._bytes = pieces.bytes_of
        self._strip = 0 if prompt else pieces.strip
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        if prompt:  # a prompt given as ids may end inside a character, which the next id goes on with
            self._utf8.decode(b"".join([pieces.of(i) for i in prompt[-4:]]))

    def push(self, ids: Sequence[int]) -> str:
        """See `IncrementalDecoder`."""
        table = self._bytes
        known = len(table)
        raw = b"".join([table[i] for i in ids if i < known])
        if self._strip and raw:
            dropped = min(self._strip, len(raw) - len(raw.lstrip(b" ")))
            raw = raw[dropped:]
            self._strip = 0 if raw else self._strip - dropped
        return self._utf8.decode(raw)

    def flush(self) -> str:
        """See `IncrementalDecoder`."""
        return self._utf8.decode(b"", True)


class WindowDecoder:
    """For tokenizers whose pieces do not simply join (WordPiece and others).

    Decodes a window of the last ids again and returns what grew, so the cost per push is bounded.
    """

    __slots__ = ("_decode", "_held", "_ids", "_shown")

    def __init__(self, decode_ids: Callable[[list[int]], str], prompt: Sequence[int]) -> None:
        self._decode = decode_ids
        self._ids = list(prompt[-_CONTEXT_IDS:])
        self._shown = decode_ids(self._ids) if self._ids else ""
        self._held = 0

    def push(self, ids: Sequence[int]) -> str:
        """See `IncrementalDecoder`."""
        self._ids.extend(ids)
        self._held += len(ids)
        text = self._decode(self._ids)
        if text.endswith("\ufffd") and self._held < _HELD_IDS:
            return ""
        return self._release(text)

    def flush(self) -> str:
        """See `IncrementalDecoder`."""
        return self._release(self._decode(self._ids)) if self._held else ""

    def _release(self, text: str) -> str:
        new = text[len(self._shown) :]
        self._ids = self._ids[-_CONTEXT_IDS:]
        self._shown = self._decode(self._ids)
        self._held = 0
        return new


class HfText:
    """A `tokenizer.json` of a bundle."""

    def __init__(self, source: bytes) -> None:
        self._tokenizer = Tokenizer.from_buffer(source)
        # Files may ask for both: a text would silently lose its end, or gain tokens that nobody masks.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._pieces = pieces_of(source, self._tokenizer.get_vocab(with_added_tokens=True))

    def encode(self, text: str) -> list[int]:
        """See `TextCodec`. Safe to call from a thread."""
        return self._encoded(text, whole=False)

    def encode_whole(self, text: str) -> list[int]:
        """See `TextCodec`. Safe to call from a thread."""
        return self._encoded(text, whole=True)

    def _encoded(self, text: str, *, whole: bool) -> list[int]:
        with refusing(lambda why: InvalidRequest(f"the tokenizer has no tokens for the text: {why}")):
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=whole).ids
        return ids

    def token_id(self, token: str) -> int | None:
        """See `TextCodec`."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def decoder(self, prompt: Sequence[int] = ()) -> IncrementalDecoder:
        """See `TextCodec`."""
        if self._pieces is None:
            return WindowDecoder(self._decode, prompt)
        return PieceDecoder(self._pieces, prompt)

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text


class ByteText:
    """Pipelines without a tokenizer: ids are bytes. Text goes in as UTF-8 and comes out as
    Latin-1, so that every id shows as exactly one character, whatever its neighbours are.
    """  # noqa: D205

    def encode(self, text: str) -> list[int]:
        """See `TextCodec`."""
        return list(text.encode())

    def encode_whole(self, text: str) -> list[int]:
        """See `TextCodec`."""
        return self.encode(text)

    def token_id(self, token: str) -> int | None:
        """See `TextCodec`; bytes have no names."""
        return None

    def decoder(self, prompt: Sequence[int] = ()) -> IncrementalDecoder:
        """See `TextCodec`."""
        return _LATIN1


class _Latin1:
    """Stateless: one decoder serves every session."""

    def push(self, ids: Sequence[int]) -> str:
        return bytes([i & 0xFF for i in ids]).decode("latin-1")

    def flush(self) -> str:
        return ""


_LATIN1 = _Latin1()


def load_text(pipeline: Pipeline, bundle: Path | None) -> TextCodec:
    """The codec that a pipeline asks for.

    Args:
        pipeline: content of `pipeline.json`.
        bundle: its folder, None for a pipeline without files.

    Raises:
        BundleError: the pipeline names a tokenizer, and the file is not there or is none.
    """
    if not pipeline.tokenizer:
        return ByteText()
    if bundle is None:
        raise BundleError(f"pipeline {pipeline.name!r} names {pipeline.tokenizer!r} but has no folder")
    path = bundle / pipeline.tokenizer
    try:
        source = path.read_bytes()
    except OSError as error:
        raise BundleError(f"{path}: {error.strerror or error}") from error
    with refusing(lambda why: BundleError(f"{path}: no tokenizer: {why}")):
        return HfText(source)
