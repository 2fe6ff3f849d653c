"""What is called, and with what body.

Three kinds: `openai` streams `/v1/completions`, `function` posts JSON to the function itself and
waits for the answer, `raw` posts bytes (single-pass pipelines). Pure: no IO here.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Literal
from urllib.parse import urlsplit

import msgspec

from keystage.loadgen import prompts
from keystage.loadgen.lengths import Length

TargetKind = Literal["openai", "function", "raw"]

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
    """

    kind: TargetKind
    base_url: str
    model: str | None = None
    temperature: float = 0.0
    body_bytes: int = 4096

    @property
    def url(self) -> str:
        """Where requests are posted."""
        return f"{self.base_url}/v1/completions" if self.kind == "openai" else f"{self.base_url}/"

    @property
    def stats_url(self) -> str:
        """Where the router tells its counters."""
        return f"{self.base_url}/_/stats"

    @property
    def is_streaming(self) -> bool:
        """Whether the answer comes token by token."""
        return self.kind == "openai"

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every request."""
        if self.kind == "raw":
            return {"Content-Type": "application/octet-stream"}
        accept = "text/event-stream" if self.is_streaming else "application/json"
        return {"Content-Type": "application/json", "Accept": accept}

    def body(self, length: Length, seed: int, index: int) -> bytes:
        """The body of request `index` of a run with this seed."""
        if self.kind == "raw":
            return prompts.payload(self.body_bytes, seed, index)
        fields: dict[str, object] = {
            "prompt": prompts.text(length.prompt_tokens, seed, index),
            "max_tokens": length.output_tokens,
            "temperature": self.temperature,
            "seed": (seed * 1_000_003 + index) & 0x7FFFFFFF,
        }
        if self.kind == "openai":
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
            if self.model is not None:
                fields["model"] = self.model
        return msgspec.json.encode(fields)


def gateway_of(url: str) -> tuple[str, str] | None:
    """Splits `<gateway>/function/<name>` into gateway address and function name, None for others."""
    match = _FUNCTION.fullmatch(url)
    return (match["gateway"], match["name"]) if match else None


def is_http_url(url: str) -> bool:
    """Whether the text is an http(s) address with a host."""
    parts = urlsplit(url)
    return parts.scheme in {"http", "https"} and bool(parts.hostname)
