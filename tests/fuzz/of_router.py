"""Targets of the router: whole requests against its HTTP face, and the parsers of bodies below it."""

from __future__ import annotations

import asyncio
import io
import json
import struct
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import msgspec

from fuzz.target import FuzzError, Ready

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
_WIDTH = 6


class Asked:
    """Requests against an ASGI application, on one event loop that stays.

    Args:
        application: what answers.
        paths: an input that names another path asks for the first of these.
    """

    def __init__(self, application: Callable[..., Any], paths: tuple[str, ...]) -> None:
        self._application, self._paths = application, paths
        self._loop = asyncio.new_event_loop()

    def run(self, data: bytes) -> None:
        """One request: `{"path", "method", "headers", "body"}`, a body that is no text being sent as JSON.

        Raises:
            FuzzError: a server error, no whole answer, or JSON that is none.
        """
        try:
            given = json.loads(data.decode("utf-8", "surrogatepass"))
        except (ValueError, RecursionError):
            return
        if not isinstance(given, dict):
            return
        headers = given.get("headers")
        named = headers.items() if isinstance(headers, dict) else ()
        raw = [(_bytes(name).lower(), _line(_bytes(value))) for name, value in named if _is_name(name)]
        path = given.get("path") if isinstance(given.get("path"), str) else self._paths[0]
        method = given.get("method")
        method = method if isinstance(method, str) and method.isascii() and method.isalpha() else "POST"
        self.ask(method, _decoded(str(path)), raw, _bytes(given.get("body", b"")))

    def ask(self, method: str, path: str, headers: list[tuple[bytes, bytes]], body: bytes) -> int:
        """Asks, and checks the answer; its status."""
        sent: list[MutableMapping[str, Any]] = []
        incoming: list[MutableMapping[str, Any]] = [
            {"type": "http.request", "body": body, "more_body": False}
        ]
        gone = self._loop.create_future()

        async def receive() -> MutableMapping[str, Any]:
            if incoming:
                return incoming.pop()
            await gone
            return {"type": "http.disconnect"}

        async def send(message: MutableMapping[str, Any]) -> None:
            sent.append(message)

        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "path": path,
            "raw_path": path.encode("utf-8", "replace"), "query_string": b"", "headers": headers,
            "scheme": "http",
            "server": ("127.0.0.1", 80), "client": ("127.0.0.1", 9), "root_path": "",
        }  # fmt: skip
        self._loop.run_until_complete(self._application(scope, receive, send))
        gone.cancel()
        return _checked(sent, method)


def _checked(sent: list[MutableMapping[str, Any]], method: str) -> int:
    if len(sent) < 2 or sent[0]["type"] != "http.response.start" or sent[-1].get("more_body"):
        raise FuzzError(f"no whole answer: {sent!r:.500}")
    status = int(sent[0]["status"])
    whole = b"".join(message.get("body", b"") for message in sent[1:])
    if status >= 500 and status != 504:
        raise FuzzError(f"{status}: {whole[:1000]!r}")
    kinds = [value for name, value in sent[0]["headers"] if bytes(name).lower() == b"content-type"]
    if method != "HEAD" and kinds and kinds[0].startswith(b"application/json"):
        found = json.loads(whole)
        if status >= 400 and not found["error"]["message"]:
            raise FuzzError(f"{status} without words")
    for name, value in sent[0]["headers"]:
        if b"\r" in name + value or b"\n" in name + value:
            raise FuzzError(f"a header of two lines: {name!r}: {value!r}")
    return status


def _bytes(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    try:
        return json.dumps(value).encode()
    except (ValueError, RecursionError):
        return b"9" * 5000


def _is_name(name: str) -> bool:
    return (
        bool(name) and name.isascii() and name.replace("-", "").isalnum() and name.lower() != "content-length"
    )


def _line(value: bytes) -> bytes:
    """What a server lets through as the value of a header."""
    return bytes(byte for byte in value[:8000] if byte >= 0x20 and byte != 0x7F).strip()


def _decoded(path: str) -> str:
    return path.encode("utf-8", "replace").decode("utf-8", "replace")


def _request(path: str, body: Any, **headers: str) -> bytes:
    return json.dumps({"path": path, "method": "POST", "headers": headers, "body": body}).encode()


def generation(scratch: Path) -> Ready:
    """Plain calls, completions and chat: fields, messages, stop strings, keys, deadlines, priorities."""
    from keystage.bundle.api import emulated
    from keystage.router.engine import Limits
    from keystage.router.face import Face
    from keystage.router.face_probe import HashEngine
    from keystage.router.text import ByteText

    limits = Limits(looping=True, context_length=64, vocab_size=256, max_body_bytes=20_000)
    pipeline = msgspec.structs.replace(
        emulated("tiny", 2, execution="looping", context_length=64), chat_template=TEMPLATE
    )
    face = Face(HashEngine(limits), pipeline, ByteText(), lambda: b"{}", lambda: True, lambda: True)
    asked = Asked(face, ("/", "/v1/completions", "/v1/chat/completions", "/v1/models", "/metrics"))
    chat = {
        "model": "tiny",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "\ud83d a"}]}],
    }
    seeds = (
        _request("/", {"prompt": "ab", "max_tokens": 4, "seed": 7, "temperature": 1.5, "top_p": 0.5}),
        _request(
            "/",
            {"prompt": [1, 2, 255], "stream": True, "stop": ["a", "\n"]},
            **{"X-Keystage-Deadline-S": "9"},
        ),
        _request(
            "/v1/completions", {"model": "tiny", "prompt": ["ab"], "echo": True, "n": 1, "logprobs": None}
        ),
        _request(
            "/v1/completions",
            {"prompt": "q", "stream": True, "stream_options": {"include_usage": True}},
            **{"Idempotency-Key": "k1", "Last-Event-ID": "2", "X-Keystage-Priority": "high"},
        ),
        _request("/v1/chat/completions", chat, traceparent="00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"),
        _request(
            "/v1/chat/completions", {**chat, "stream": True, "tools": [], "response_format": {"type": "text"}}
        ),
        _request("/v1/embeddings", {"input": "a"}),
        _request("/v1/models/tiny", None, Accept="application/openmetrics-text"),
    )
    return Ready(asked.run, (), seeds)


def _items(**pipelines: tuple[Any, Callable[[bytes, str, tuple[int, ...]], bytes]]) -> dict[str, Asked]:
    from support.item_engine import ItemEngine, limits_for

    from keystage.router.face import Face
    from keystage.router.text import ByteText

    return {
        name: Asked(
            Face(
                ItemEngine(limits_for(pipeline, 400_000), answer), pipeline, ByteText(), lambda: b"{}",
                lambda: True, lambda: True,
            ),
            ("/",),
        )
        for name, (pipeline, answer) in pipelines.items()
    }  # fmt: skip


def items(scratch: Path) -> Ready:
    """Embeddings and masks."""
    import numpy as np
    from support.item_engine import embed, pipeline_for

    def masks(payload: bytes, dtype: str, shape: tuple[int, ...]) -> bytes:
        return np.zeros(0, "<f4").tobytes()

    asked = _items(
        embeddings=(pipeline_for("bert", "embeddings", architectures=["BertModel"]), embed),
        masks=(pipeline_for("bert", "masks", architectures=["BertForMaskedLM"]), masks),
    )

    def run(data: bytes) -> None:
        for one in asked.values():
            one.run(data)

    seeds = (
        _request(
            "/v1/embeddings", {"input": ["ab", "c"], "encoding_format": "base64", "model": "embeddings"}
        ),
        _request("/v1/embeddings", {"input": [[1, 2], [3]], "dimensions": 6}, **{"Idempotency-Key": "x"}),
        _request("/", {"input": "abc"}),
        _request("/", {"text": "a b", "top_k": 3}),
    )
    return Ready(run, (), seeds)


def pictures(scratch: Path) -> Ready:
    """Images and arrays, through the face of an image pipeline."""
    import numpy as np
    from PIL import Image
    from support.item_engine import pipeline_for

    sizes: Mapping[str, Any] = {"layers": [1, 1, 1, 1], "num_classes": 7, "image_size": 32, "resize": 36}
    pipeline = pipeline_for("wide_resnet", "images", **sizes)

    def classes(payload: bytes, dtype: str, shape: tuple[int, ...]) -> bytes:
        if len(payload) != np.dtype(dtype).itemsize * int(np.prod(shape)):
            raise FuzzError(f"{len(payload)} bytes for {dtype} {shape}")
        return np.arange(7, dtype="<f4").tobytes()

    asked = _items(images=(pipeline, classes))["images"]

    def run(data: bytes) -> None:
        asked.ask("POST", "/", [(b"accept", b"application/json")], data)

    seeds = []
    for kind in ("PNG", "JPEG"):
        for mode in ("RGB", "L", "P"):
            file = io.BytesIO()
            Image.new(mode, (40, 33), 5).save(file, kind) if (kind, mode) != ("JPEG", "P") else None
            seeds.append(file.getvalue())
    for array in (np.zeros((3, 32, 33), np.uint8), np.zeros((3, 32, 32), np.float32)):
        file = io.BytesIO()
        np.save(file, array)
        seeds.append(file.getvalue())
    head = json.dumps({"image": {"dtype": "U8", "shape": [3, 32, 32], "data_offsets": [0, 3072]}}).encode()
    seeds.append(len(head).to_bytes(8, "little") + head + bytes(3072))
    return Ready(run, (), tuple(seed for seed in seeds if seed))


def wav(scratch: Path) -> Ready:
    """WAV files: their samples at the model's rate, window by window."""
    from keystage.router.engine import Refusal
    from keystage.router.transcriptions_wav import read_wav

    def run(data: bytes) -> None:
        sound = read_wav(data)
        if sound.data.nbytes > len(data) or not sound.seconds >= 0:
            raise FuzzError(f"{sound.data.nbytes} bytes of samples in {len(data)}")
        for first in (0, 16_000):
            if len(sound.resampled(first, first + 800, 16_000)) != 800:
                raise FuzzError("another number of samples")

    seeds = [
        _wav(kind, channels, rate, bits)
        for kind, channels, rate, bits in (
            (1, 1, 16_000, 16),
            (1, 2, 8_000, 8),
            (3, 1, 44_100, 32),
            (1, 1, 48_000, 24),
        )
    ]
    return Ready(
        run, (Refusal,), (*seeds, _wav(0xFFFE, 1, 16_000, 16, struct.pack("<HHIH", 22, 16, 4, 1) + bytes(14)))
    )


def _wav(kind: int, channels: int, rate: int, bits: int, more: bytes = b"", samples: int = 40) -> bytes:
    width = channels * bits // 8
    head = struct.pack("<HHIIHH", kind, channels, rate, rate * width, width, bits) + more
    body = b"WAVEfmt " + struct.pack("<I", len(head)) + head + b"LIST" + struct.pack("<I", 3) + b"abc\0"
    body += (
        b"data"
        + struct.pack("<I", samples * width)
        + bytes(range(samples * width % 250))
        + bytes(samples * width - samples * width % 250)
    )
    return b"RIFF" + struct.pack("<I", len(body)) + body


def forms(scratch: Path) -> Ready:
    """Transcription requests: multipart forms, their fields and files, through a speech pipeline's face."""
    from keystage.bundle.api import emulated
    from keystage.router.engine import Limits
    from keystage.router.face import Face
    from keystage.router.face_probe import HashEngine
    from keystage.router.text import ByteText

    config = {"max_source_positions": 50, "max_target_positions": 20, "decoder_start_token_id": 3}
    pipeline = msgspec.structs.replace(
        emulated("heard", 2, execution="looping", context_length=70), family="whisper", config=config
    )
    limits = Limits(looping=True, context_length=70, vocab_size=256, max_body_bytes=1 << 20)
    face = Face(HashEngine(limits), pipeline, ByteText(), lambda: b"{}", lambda: True, lambda: True)
    asked = Asked(face, ("/v1/audio/transcriptions",))

    def run(data: bytes) -> None:
        head, _, body = data.partition(b"\n\n")
        asked.ask("POST", "/v1/audio/transcriptions", [(b"content-type", _line(head))], body)
        if data.startswith(b"RIFF"):
            asked.ask("POST", "/", [], data)

    def form(**fields: str) -> bytes:
        parts = [
            f'Content-Disposition: form-data; name="{name}"\r\n\r\n{value}' for name, value in fields.items()
        ]
        body = b"".join(b"--xyz\r\n" + part.encode() + b"\r\n" for part in parts)
        file = b'--xyz\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n'
        file += b"Content-Type: audio/wav\r\n\r\n"
        return body + file + _wav(1, 1, 16_000, 16) + b"\r\n--xyz--\r\n"

    kind = b"multipart/form-data; boundary=xyz\n\n"
    encoded = form().replace(b"Content-Type: audio/wav", b"Content-Transfer-Encoding: base64")
    seeds = (
        kind + form(model="heard", response_format="verbose_json", language="en"),
        kind + form(temperature="0.2", prompt="a b"),
        kind + encoded,
        kind.replace(b"xyz", b'"xyz"; charset=x') + form(),
        kind
        + b"--xyz\r\nContent-Type: multipart/mixed; boundary=in\r\n\r\n--in\r\n\r\na\r\n--in--\r\n--xyz--",
        _wav(1, 1, 16_000, 16),
    )
    return Ready(run, (), seeds)


def starting(scratch: Path) -> Ready:
    """What a router makes of a `pipeline.json` before it serves: core, face, OpenAPI document."""
    from support.item_engine import pipeline_for

    from keystage.bundle.api import emulated
    from keystage.bundle.errors import BundleError, SplitError
    from keystage.bundle.store import decode
    from keystage.router.engine import Limits
    from keystage.router.face import Face
    from keystage.router.face_probe import HashEngine
    from keystage.router.text import load_text

    def run(data: bytes) -> None:
        pipeline = decode(data, Path("pipeline.json"))
        limits = Limits(pipeline.execution == "looping", pipeline.context_length, pipeline.vocab_size, 1000)
        Face(
            HashEngine(limits), pipeline, load_text(pipeline, None), lambda: b"{}", lambda: True, lambda: True
        )

    looping = msgspec.structs.replace(
        emulated("a", 2, execution="looping", context_length=9), chat_template=TEMPLATE
    )
    seeds = (
        looping,
        msgspec.structs.replace(
            looping, family="whisper", config={"max_source_positions": 5, "vocab_size": 9}
        ),
        pipeline_for("wide_resnet", layers=[1, 1, 1, 1], num_classes=3, image_size=32, id2label={"0": "a"}),
        pipeline_for("bert", architectures=["BertForMaskedLM"]),
    )
    return Ready(run, (BundleError, SplitError), tuple(msgspec.json.encode(seed) for seed in seeds))
