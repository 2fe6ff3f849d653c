"""What is called, and with what body.

Eight kinds: `openai` streams `/v1/completions`, `embeddings` posts texts to `/v1/embeddings`,
`transcriptions` posts recordings to `/v1/audio/transcriptions`; to the function itself `masks` posts texts
with a word missing, `images` pictures, `function` prompts, `bodies` what a file holds, and `raw` bytes. All
but the first wait for the whole answer. Pure: no IO here.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import re
from collections.abc import Mapping
from typing import Literal, get_args
from urllib.parse import urlsplit

import msgspec

from keystage.loadgen import clips, prompts
from keystage.loadgen.lengths import Length

TargetKind = Literal["openai", "function", "raw", "embeddings", "masks", "transcriptions", "images", "bodies"]
KINDS: tuple[TargetKind, ...] = get_args(TargetKind)

_PATHS: Mapping[TargetKind, str] = {
    "openai": "/v1/completions",
    "embeddings": "/v1/embeddings",
    "transcriptions": "/v1/audio/transcriptions",
}
"""Where the others are: `/`."""

_BOUNDARY = "keystage-7f3a9c51e2d84b06"
_TYPES: Mapping[TargetKind, str] = {
    "raw": "application/octet-stream",
    "images": "application/x-npy",
    "transcriptions": f"multipart/form-data; boundary={_BOUNDARY}",
}
"""Content types of the others: JSON."""

_FUNCTION = re.compile(r"(?P<gateway>.*)/function/(?P<name>[^/]+)/?.*")


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """An address and how to talk to it.

    Attributes:
        kind: see module.
        base_url: the pipeline's address, without trailing slash.
        model: name sent in the body's `model` field, None to leave it out.
        temperature: sampling temperature; 0 is greedy.
        body_bytes: size of a `raw` body.
        byte_tokens: whether a token is a byte, as in pipelines without a tokenizer.
        mask: what stands for the missing word.
        bodies: JSON bodies that are drawn from, for `bodies`.
    """

    kind: TargetKind
    base_url: str
    model: str | None = None
    temperature: float = 0.0
    body_bytes: int = 4096
    byte_tokens: bool = False
    mask: str = "[MASK]"
    bodies: tuple[bytes, ...] = ()

    @property
    def url(self) -> str:
        """Where requests are posted."""
        return self.base_url + _PATHS.get(self.kind, "/")

    @property
    def stats_url(self) -> str:
        """Where the router tells its counters."""
        return f"{self.base_url}/_/stats"

    @property
    def is_streaming(self) -> bool:
        """Whether the answer comes token by token."""
        return self.kind == "openai"

    @property
    def has_lengths(self) -> bool:
        """Whether requests are sized in tokens."""
        return self.kind in ("openai", "function", "embeddings", "masks")

    @property
    def sends(self) -> str:
        """What its requests hold, in words, where they are not sized in tokens."""
        shortest, longest = clips.CLIP_S
        words: Mapping[TargetKind, str] = {
            "raw": f"bodies of {self.body_bytes} bytes",
            "bodies": f"{len(self.bodies)} different bodies",
            "images": f"pictures of {clips.IMAGE_SIZE} x {clips.IMAGE_SIZE} pixels",
            "transcriptions": f"recordings of {shortest:g} to {longest:g} s",
        }
        return words.get(self.kind, "")

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every request."""
        headers = {"Content-Type": _TYPES.get(self.kind, "application/json")}
        if self.kind == "bodies":
            headers["Accept"] = "*/*"
        elif self.kind != "raw":
            headers["Accept"] = "text/event-stream" if self.is_streaming else "application/json"
        return headers

    def body(self, length: Length, seed: int, index: int) -> bytes:
        """The body of request `index` of a run with this seed."""
        match self.kind:
            case "raw":
                return prompts.payload(self.body_bytes, seed, index)
            case "bodies":
                return self.bodies[random.Random(f"{seed}/{index}").randrange(len(self.bodies))]
            case "images":
                return clips.image(seed, index % clips.VARIETY)
            case "transcriptions":
                return _form(self.model, seed, index % clips.VARIETY)
            case "embeddings":
                return self._json({"input": self._text(length, seed, index)})
            case "masks":
                words = self._text(length, seed, index).split()
                words[len(words) // 2] = self.mask
                return self._json({"text": " ".join(words)})
            case "function" | "openai":
                return self._json(self._generation(length, seed, index))

    def _generation(self, length: Length, seed: int, index: int) -> dict[str, object]:
        fields: dict[str, object] = {
            "prompt": self._text(length, seed, index),
            "max_tokens": length.output_tokens,
            "temperature": self.temperature,
            "seed": (seed * 1_000_003 + index) & 0x7FFFFFFF,
        }
        if self.kind == "openai":
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        return fields

    def _json(self, fields: dict[str, object]) -> bytes:
        if self.model is not None and self.kind != "function":
            fields["model"] = self.model
        return msgspec.json.encode(fields)

    def _text(self, length: Length, seed: int, index: int) -> str:
        words = prompts.text(length.prompt_tokens, seed, index)
        return words[: length.prompt_tokens] if self.byte_tokens else words


@functools.lru_cache(maxsize=2 * clips.VARIETY)
def _form(model: str | None, seed: int, clip: int) -> bytes:
    """A multipart body: the model's name where there is one, the wish to be told the tokens, a recording."""
    start = f"--{_BOUNDARY}\r\nContent-Disposition: form-data; name="
    fields = {"response_format": "verbose_json", **({} if model is None else {"model": model})}
    texts = "".join(f'{start}"{name}"\r\n\r\n{value}\r\n' for name, value in fields.items())
    head = f'{texts}{start}"file"; filename="clip.wav"\r\nContent-Type: audio/wav\r\n\r\n'
    return head.encode() + clips.recording(seed, clip) + f"\r\n--{_BOUNDARY}--\r\n".encode()


def gateway_of(url: str) -> tuple[str, str] | None:
    """Splits `<gateway>/function/<name>` into gateway address and function name, None for others."""
    match = _FUNCTION.fullmatch(url)
    return (match["gateway"], match["name"]) if match else None


def is_http_url(url: str) -> bool:
    """Whether the text is an http(s) address with a host."""
    parts = urlsplit(url)
    return parts.scheme in {"http", "https"} and bool(parts.hostname)
