"""A language model as a stream program: prefill, then decode in a loop (NeuStream, figure 6).

`{"prompt": "...", "max_tokens": 16, "temperature": 0, "top_p": 1, "seed": 0}` in, text and token ids out. The
looping stages of `keystage split` serve the same models with waves, streaming and moves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from keystage.streams.api import Message, Program, ProgramError, Stream
from keystage.streams.programs import fields
from keystage.streams.programs.decoding import Decode, Prefill, cached_model

PROMPT = Stream("prompt", "prompt")
PREFIX = Stream("prefix", "prefix")
OUTPUT = Stream("output", "text")

SAMPLING = ("max_tokens", "temperature", "top_p", "seed")
"""Fields of a request that say how tokens are chosen."""
_SEEDS = 2**64 - 1


def program(
    name: str = "language",
    source: str = "random:llama-tiny",
    dtype: str = "float32",
    most_tokens: int = 256,
    *,
    is_exact: bool = True,
    partial_slos_s: Mapping[str, float] | None = None,
) -> Program:
    """Makes the program.

    Args:
        name: pipeline name.
        source: the model; see `LanguageModel`.
        dtype: of parameters, activations and KV state.
        most_tokens: tokens that a request may ask for.
        is_exact: see `programs.decoding`; off, prompts and larger batches are computed together.
        partial_slos_s: see `Program`: that of `prefill` is a TTFT, that of `decode` a TPOT.

    Raises:
        SplitError, ProgramError: see `LanguageModel`.
    """
    model = cached_model(source, dtype)

    def parse(body: bytes, content_type: str) -> Message:
        import torch

        found = fields.json_object(body, content_type, ("prompt", *SAMPLING))
        header = sampling_header(found, most_tokens)
        ids = [*([] if model.bos is None else [model.bos]), *model.encode(fields.text(found, "prompt"))]
        longest = model.shape.context_length - header["max_tokens"]
        if not 1 <= len(ids) <= longest:
            raise ProgramError(
                f"prompt has {len(ids)} tokens, 1 to {longest} leave room for max_tokens = "
                f"{header['max_tokens']} in a context of {model.shape.context_length}"
            )
        return Message(header, {"ids": torch.tensor(ids)})

    def render(message: Message) -> tuple[bytes, str]:
        tokens = message.header["tokens"]
        answer = {
            "text": model.decode(tokens),
            "tokens": tokens,
            "prompt_tokens": message.header["prompt_tokens"],
        }
        return msgspec.json.encode(answer), "application/json"

    modules = {
        "prefill": Prefill([PROMPT], [PREFIX, OUTPUT], model, is_exact=is_exact),
        "decode": Decode([PREFIX], [PREFIX, OUTPUT], model, is_exact=is_exact),
    }
    return Program(name, modules, PROMPT, OUTPUT, parse, render, most_tokens + 1, partial_slos_s)


def sampling_header(found: dict[str, Any], most_tokens: int) -> dict[str, Any]:
    """The header fields that say how tokens are chosen.

    Raises:
        ProgramError: a field is out of bounds.
    """
    return {
        "max_tokens": fields.whole(found, "max_tokens", min(16, most_tokens), 1, most_tokens),
        "temperature": fields.number(found, "temperature", 0.0, 0.0, 100.0),
        "top_p": fields.number(found, "top_p", 1.0, 1e-6, 1.0),
        "seed": fields.whole(found, "seed", 0, 0, _SEEDS),
    }


def request(prompt: str, max_tokens: int, *, temperature: float = 0.0, seed: int = 0) -> bytes:
    """The body of a request."""
    return msgspec.json.encode(
        {"prompt": prompt, "max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    )
