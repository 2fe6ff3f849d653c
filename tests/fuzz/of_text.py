"""Targets of what a router makes of texts: tokenizers and chat templates that came with a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from fuzz.target import Ready

_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def tokenizer(scratch: Path) -> Ready:
    """`tokenizer.json` of a bundle, as a router loads it, with a text through it."""
    from keystage.bundle.api import emulated
    from keystage.bundle.errors import BundleError
    from keystage.router.engine import InvalidRequest
    from keystage.router.text import decode, load_text

    pipeline = msgspec.structs.replace(emulated("a", 1, execution="looping"), tokenizer="tokenizer.json")
    file = scratch / "tokenizer.json"

    def run(data: bytes) -> None:
        file.write_bytes(data)
        text = load_text(pipeline, scratch)
        ids = text.encode("ab a\u00e9 c")
        text.encode_whole("ab")
        decode(text, [*ids, 0, 1, 2, 5])
        text.token_id("a")

    base: dict[str, Any] = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "pre_tokenizer": _BYTES,
        "post_processor": None, "decoder": _BYTES,
        "added_tokens": [
            {"id": 3, "content": "<e>", "special": True, "single_word": False, "lstrip": False, "rstrip":
            False,
             "normalized": False}
        ],
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, "<e>": 3}, "merges": ["a b"]},
    }  # fmt: skip
    word = {**base, "model": {"type": "WordLevel", "vocab": {"a": 0, "[UNK]": 1}, "unk_token": "[UNK]"}}
    joined = {
        **base,
        "pre_tokenizer": {"type": "Metaspace", "replacement": "_", "prepend_scheme": "first", "split": True},
        "decoder": {"type": "Metaspace", "replacement": "_", "prepend_scheme": "first", "split": True},
    }  # fmt: skip
    steps = [
        {"type": "Replace", "pattern": {"String": "_"}, "content": " "}, {"type": "ByteFallback"}, {"type":
        "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]  # fmt: skip
    sequence = {**base, "decoder": {"type": "Sequence", "decoders": steps}}
    seeds = tuple(json.dumps(found).encode() for found in (base, word, joined, sequence))
    return Ready(run, (BundleError, InvalidRequest), seeds)


def chat_templates(scratch: Path) -> Ready:
    """A chat template that came with a model, and messages through it."""
    from keystage.bundle.errors import BundleError
    from keystage.router.engine import InvalidRequest
    from keystage.router.text_chat import ChatTemplate

    def run(data: bytes) -> None:
        source = data.decode("utf-8", "replace")
        if source.count("{%") + source.count("range") > 12:
            return  # loops in loops take as long as they say
        template = ChatTemplate(source, {"bos_token": "<s>"})
        template.render([{"role": "user", "content": "hello {{ 7 }}"}, {"role": "assistant", "content": ""}])

    seeds = (
        b"{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m['content'] | trim }}\n{% endfor %}",
        b"{% if messages[0].role != 'system' %}{{ raise_exception('no') }}{% endif %}",
        b"{{ messages | tojson(indent=2) }}",
        b"{{ strftime_now('%d %b %Y') }}{% set n = namespace(x=1) %}",
        b"{% if add_generation_prompt %}A{% endif %}",
        b"{{ 1 / 0 }}{{ 'a' * 3 }}{{ messages[5].content }}{{ messages.x.y }}",
    )
    return Ready(run, (InvalidRequest, BundleError), seeds)
