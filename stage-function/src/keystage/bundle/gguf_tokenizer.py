"""The tokenizer inside a GGUF file as a `tokenizer.json`.

Byte-level BPE vocabularies (`gpt2`) whose pre-tokeniser is known are converted directly, which
takes under a second; every other kind goes through transformers' own conversion.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keystage.bundle.errors import SplitError
from keystage.bundle.tokenizer_faults import refusing

if TYPE_CHECKING:
    import tokenizers

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def write_tokenizer(path: Path, field: Callable[[str, type], Any], folder: Path) -> None:
    """Writes `tokenizer.json`.

    Args:
        path: the GGUF file.
        field: its metadata by key and type, None where there is none.
        folder: where to write.

    Raises:
        SplitError: the tokenizer cannot be converted.
    """
    kind, split = field("tokenizer.ggml.model", str), field("tokenizer.ggml.pre", str)
    if kind == "gpt2" and split in ("smollm", "gpt-2", "llama-bpe"):
        with refusing(lambda why: SplitError(f"{path}: the tokenizer cannot be converted: {why}")):
            made = _byte_level(field, split)
        made.save(str(folder / "tokenizer.json"))
    else:
        _through_transformers(path, folder)


def _byte_level(field: Callable[[str, type], Any], split: str) -> tokenizers.Tokenizer:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    tokens: list[str] = field("tokenizer.ggml.tokens", list)
    kinds: list[int] = field("tokenizer.ggml.token_type", list) or [_NORMAL] * len(tokens)
    merges = [(left, right) for left, _, right in map(_halves, field("tokenizer.ggml.merges", list) or [])]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    # llama-bpe vocabularies hold whole words that no chain of merges reaches.
    bpe = models.BPE(vocab=vocabulary, merges=merges, fuse_unk=False, ignore_merges=split == "llama-bpe")
    tokenizer = tokenizers.Tokenizer(bpe)
    if split == "llama-bpe":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(tokenizers.Regex(_LLAMA3_PATTERN), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    elif split == "smollm":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    marked = [
        tokenizers.AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens(marked)
    return tokenizer


def _halves(merge: str) -> tuple[str, str, str]:
    return merge.partition(" ")


def _through_transformers(path: Path, folder: Path) -> None:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise SplitError(f"{path}: this kind of tokenizer needs: pip install transformers") from error
    with refusing(lambda why: SplitError(f"{path}: the tokenizer cannot be converted: {why}")):
        tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise SplitError(f"{path}: the tokenizer has no form that fits tokenizer.json")
    backend.save(str(folder / "tokenizer.json"))
