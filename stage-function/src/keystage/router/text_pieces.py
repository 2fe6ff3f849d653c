"""The bytes that each token id stands for, as a table, read from a `tokenizer.json`.

Byte-level BPE (GPT-2, Llama 3, SmolLM2) and SentencePiece-like BPE (Llama 2, Mistral) are
concatenations of per-token bytes; for them a table replaces decoding the whole sequence again
and again. Tokenizers of other kinds get no table (None) and `text.WindowDecoder` serves them.

Format: https://huggingface.co/docs/tokenizers (decoders); the byte alphabet is that of GPT-2:
printable Latin-1 characters stand for themselves, the other 68 bytes for U+0100 onwards.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping

import msgspec

_MOST_A_TOKEN, _MOST_BEYOND = 4, 1 << 16
"""Ids up to so many times the number of tokens, and so many more: vocabularies are padded, not sparse."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclasses.dataclass(frozen=True, slots=True)
class Pieces:
    """Bytes by token id.

    Attributes:
        bytes_of: bytes of each id, empty for special tokens and for ids without a token.
        strip: leading spaces that are dropped where a text begins.
    """

    bytes_of: list[bytes]
    strip: int = 0

    def of(self, token: int) -> bytes:
        """Bytes of one id; empty for an id beyond the table (padded vocabularies have such)."""
        return self.bytes_of[token] if token < len(self.bytes_of) else b""


class _Added(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _Decoder(msgspec.Struct):
    """Union of the fields of those decoders that are recognised."""

    type: str
    decoders: list[_Decoder] = []
    pattern: dict[str, str] = {}
    content: str = ""
    start: int = 0
    stop: int = 0
    replacement: str = "\u2581"
    prepend_scheme: str = "always"


class _File(msgspec.Struct):
    decoder: _Decoder | None = None
    added_tokens: list[_Added] = []


def _byte_alphabet() -> dict[str, int]:
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(b): b for b in shown}
    hidden = [b for b in range(256) if b not in set(shown)]
    alphabet.update({chr(0x100 + n): b for n, b in enumerate(hidden)})
    return alphabet


def _byte_level() -> Callable[[str], bytes]:
    alphabet = _byte_alphabet()

    def piece(token: str) -> bytes:
        try:
            return bytes([alphabet[c] for c in token])
        except KeyError:  # a token added as plain text
            return token.encode()

    return piece


def _joined(space: str, *, byte_fallback: bool) -> Callable[[str], bytes]:
    def piece(token: str) -> bytes:
        if byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return token.replace(space, " ").encode()

    return piece


def _reader(decoder: _Decoder) -> tuple[Callable[[str], bytes], int] | None:
    """How this decoder turns one token into bytes, and how many leading spaces it drops."""
    if decoder.type == "ByteLevel":
        return _byte_level(), 0
    if decoder.type == "Metaspace":
        return _joined(decoder.replacement, byte_fallback=False), int(decoder.prepend_scheme != "never")
    steps = {step.type: step for step in decoder.decoders}
    if decoder.type != "Sequence" or not steps.keys() <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        return None
    replace, strip = steps.get("Replace"), steps.get("Strip")
    if replace is None or replace.content != " " or "String" not in replace.pattern:
        return None
    if strip is not None and (strip.content != " " or strip.stop):
        return None
    piece = _joined(replace.pattern["String"], byte_fallback="ByteFallback" in steps)
    return piece, strip.start if strip else 0


def pieces_of(source: bytes, vocab: Mapping[str, int]) -> Pieces | None:
    """Builds the table.

    Args:
        source: content of `tokenizer.json`.
        vocab: token texts to ids, added tokens included.

    Returns:
        The table, or None when this kind of tokenizer is no concatenation of pieces.

    Raises:
        msgspec.DecodeError: the file is no tokenizer.
    """
    try:
        file = msgspec.json.decode(source, type=_File)
    except msgspec.ValidationError:  # a decoder of another kind, with fields of other types
        return None
    if file.decoder is None or (reader := _reader(file.decoder)) is None:
        return None
    piece, strip = reader
    largest = max(vocab.values(), default=-1)
    if largest >= _MOST_A_TOKEN * len(vocab) + _MOST_BEYOND:
        return None  # a table of ids that hardly any token has would be memory for nothing
    table = [b""] * (largest + 1)
    for token, token_id in vocab.items():
        table[token_id] = piece(token)
    for added in file.added_tokens:
        if 0 <= added.id < len(table):
            table[added.id] = b"" if added.special else added.content.encode()
    return Pieces(table, strip)
