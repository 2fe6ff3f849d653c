"""The router's HTTP face: a bare ASGI application over the engine.

uvicorn speaks HTTP; this module routes, `router.openai` reads bodies, `router.engine` generates,
`router.face_text` answers; `router.idempotency_http` makes an answer once where a request has a key. No
framework stands on this path, and no task is made per token.

Every refusal is answered with its status and OpenAI's error object; in a stream that has begun,
with an error event. A client that goes away closes the engine's iterator at once.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Awaitable, Callable

import msgspec
from prometheus_client import REGISTRY
from prometheus_client.exposition import choose_encoder

from keystage.bundle.api import Pipeline
from keystage.router.api import STATS_PATH
from keystage.router.api_keys import ApiKeys, caller_of, on_behalf_of
from keystage.router.classes import Classifying
from keystage.router.embeddings import PATH as EMBEDDINGS
from keystage.router.embeddings import Embeddings
from keystage.router.engine import Engine, InvalidRequest, Refusal
from keystage.router.face_http import (
    BYTES,
    JSON,
    ClientGone,
    Receive,
    Scope,
    Send,
    deadline_s,
    header,
    read_body,
    send_refusal,
    send_whole,
    watched,
)
from keystage.router.face_text import TextAnswers
from keystage.router.idempotency import KeyBounds
from keystage.router.idempotency_http import Once
from keystage.router.idempotency_runs import KeyedRequests
from keystage.router.masks import MaskFilling
from keystage.router.openai import Call, CallReader, Dialect
from keystage.router.openai_errors import MethodNotAllowed, UnknownModel, UnknownPath
from keystage.router.openapi import PATH as OPENAPI_PATH
from keystage.router.openapi import document
from keystage.router.tasks import Task, task_of
from keystage.router.text import TextCodec
from keystage.router.traces import traced
from keystage.router.transcriptions import PATH as TRANSCRIPTIONS
from keystage.router.transcriptions import Transcriptions
from keystage.router.transcriptions_model import speech_model
from keystage.wire.tracing import Tracer

Handler = Callable[[Scope, Receive, Send], Awaitable[None]]

_MODELS = "/v1/models"


class Face:
    """ASGI application of one pipeline.

    Attributes:
        engine: the router's core.
        pipeline: what it serves.
        text: its tokenizer.
        stats: JSON bytes for `GET /_/stats`.
        ready: whether requests can be served now (`/_/ready`).
        healthy: whether the process is well (`/_/health`).
        tracer: sends the spans of requests, None: they are not traced.
        keyed: requests with an `Idempotency-Key`, None: kept in memory within the default bounds.
        keys: API keys, None: nobody needs one.
    """

    def __init__(
        self,
        engine: Engine,
        pipeline: Pipeline,
        text: TextCodec,
        stats: Callable[[], bytes],
        ready: Callable[[], bool],
        healthy: Callable[[], bool],
        tracer: Tracer | None = None,
        keyed: KeyedRequests | None = None,
        keys: ApiKeys | None = None,
    ) -> None:
        self._engine = engine
        self._tracer = tracer
        self._keys = keys
        self._pipeline = pipeline
        self._text = text
        self._stats = stats
        self._ready = ready
        self._healthy = healthy
        self._limits = engine.limits
        self._calls = CallReader(pipeline, self._limits, text)
        keyed = keyed or KeyedRequests(KeyBounds())
        self._answers = TextAnswers(engine, text, pipeline.name, keyed)
        once = Once(keyed, self._limits.max_body_bytes)
        speech = speech_model(pipeline, text)
        self._takes_sound = speech is not None
        self._transcriptions = Transcriptions(engine, speech, text, pipeline.name)
        self._embeddings = Embeddings(engine, pipeline, text)
        self._plain = self._plain_call(once)
        self._openapi = msgspec.json.encode(document(pipeline, self._limits))
        self._created_at_s = int(time.time())
        self._routes: dict[str, dict[str, Handler]] = {
            "/": {"POST": self._plain},
            "/v1/completions": {"POST": self._complete},
            "/v1/chat/completions": {"POST": self._chat},
            EMBEDDINGS: {"POST": once(self._embeddings.serve)},
            TRANSCRIPTIONS: {"POST": once(self._transcriptions.serve)},
            _MODELS: _get(self._list_models),
            "/_/health": _get(self._show_health),
            "/_/ready": _get(self._show_ready),
            STATS_PATH: _get(self._show_stats),
            "/metrics": _get(self._show_metrics),
            OPENAPI_PATH: _get(self._show_openapi),
        }

    @property
    def served(self) -> dict[str, set[str]]:
        """Methods by path, `{name}` standing for a model's name."""
        paths = {**self._routes, _MODELS + "/{name}": _get(self._show_model)}
        return {path: set(methods) for path, methods in paths.items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one HTTP request; other ASGI scopes are not for this application."""
        if scope["type"] != "http":
            raise NotImplementedError(f"ASGI scope {scope['type']!r} is not served")
        try:
            if self._keys is not None:
                self._keys.admit(scope)
            handler = self._route(scope)
            if self._tracer is not None and scope["method"] == "POST":
                await traced(self._tracer, handler, scope, receive, send)
            else:
                await handler(scope, receive, send)
        except Refusal as refusal:
            await send_refusal(send, refusal)
        except ClientGone:
            return

    def _route(self, scope: Scope) -> Handler:
        path, method = scope["path"], scope["method"]
        methods = self._routes.get(path)
        if methods is None and path.startswith(_MODELS + "/"):
            methods = _get(self._show_model)
        if methods is None:
            raise UnknownPath(f"no such path: {path[:200]}")
        handler = methods.get(method)
        if handler is None:
            allow = ", ".join(methods)
            raise MethodNotAllowed(f"{path} takes {allow}, not {method}", allow=allow)
        return handler

    # ------------------------------------------------------------ generation

    def _plain_call(self, once: Once) -> Handler:
        """What `POST /` does in this pipeline."""
        if self._takes_sound:
            return once(self._transcriptions.call)
        match task_of(self._pipeline):
            case None:
                return self._generate_plain
            case Task.EMBED:
                return once(self._embeddings.serve)
            case Task.FILL_MASK:
                return once(MaskFilling(self._engine, self._pipeline, self._text).call)
            case Task.CLASSIFY:
                return once(Classifying(self._engine, self._pipeline).call)
            case Task.BYTES:
                return once(self._pass_bytes)
            case Task.PROGRAM:
                return once(self._call_program)

    async def _generate_plain(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._generate(Dialect.PLAIN, scope, receive, send)

    async def _pass_bytes(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(scope, receive, self._limits.max_body_bytes)
        deadline = deadline_s(scope)
        with watched(receive):
            answer = await self._engine.run(body, deadline, caller=caller_of(scope))
        await send_whole(send, answer, BYTES)

    async def _call_program(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(scope, receive, self._limits.max_body_bytes)
        deadline = deadline_s(scope)
        content_type = (header(scope, b"content-type") or b"").decode("latin-1")
        with watched(receive):
            answer, made_type = await self._engine.call(body, content_type, deadline, caller_of(scope))
        await send_whole(send, answer, _safe(made_type))

    async def _complete(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._generate(Dialect.COMPLETION, scope, receive, send)

    async def _chat(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._generate(Dialect.CHAT, scope, receive, send)

    async def _generate(self, dialect: Dialect, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._limits.looping:
            raise InvalidRequest(
                f"pipeline {self._pipeline.name!r} is single-pass and generates no text; POST / takes items"
            )
        if self._takes_sound:
            raise InvalidRequest(f"pipeline {self._pipeline.name!r} takes sound: POST {TRANSCRIPTIONS}")
        body = await read_body(scope, receive, self._limits.max_body_bytes)
        call = await self._calls.read(dialect, body, deadline_s(scope))
        await self._answers.serve(self._on_behalf_of(scope, call), body, scope, receive, send)

    def _on_behalf_of(self, scope: Scope, call: Call) -> Call:
        """The call with what is known of its client: `Generation.tenant` and `Generation.priority`."""
        return dataclasses.replace(call, generation=on_behalf_of(scope, call.generation))

    # ------------------------------------------------------------ what it is and how it is

    def _model(self) -> dict[str, object]:
        return {
            "id": self._pipeline.name,
            "object": "model",
            "created": self._created_at_s,
            "owned_by": "keystage",
            "max_model_len": self._limits.context_length,
        }

    async def _list_models(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        await send_whole(send, msgspec.json.encode({"object": "list", "data": [self._model()]}))

    async def _show_model(self, scope: Scope, _receive: Receive, send: Send) -> None:
        name = scope["path"].removeprefix(_MODELS + "/")
        if name != self._pipeline.name:
            raise UnknownModel(f"model {name[:200]!r} is not served here; this is {self._pipeline.name!r}")
        await send_whole(send, msgspec.json.encode(self._model()))

    async def _show_health(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        await _send_state(send, self._healthy(), "healthy")

    async def _show_ready(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        await _send_state(send, self._ready(), "ready")

    async def _show_stats(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        await send_whole(send, self._stats())

    async def _show_openapi(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        await send_whole(send, self._openapi)

    async def _show_metrics(self, scope: Scope, _receive: Receive, send: Send) -> None:
        encode, content_type = choose_encoder((header(scope, b"accept") or b"").decode("latin-1"))
        await send_whole(send, encode(REGISTRY), content_type.encode())


def _get(handler: Handler) -> dict[str, Handler]:
    return {"GET": handler, "HEAD": handler}


async def _send_state(send: Send, holds: bool, word: str) -> None:
    await send_whole(send, msgspec.json.encode({word: holds}), JSON, 200 if holds else 503)


def _safe(content_type: str) -> bytes:
    """A program's content type as a header's value; one that can be none is given up."""
    value = content_type.encode("latin-1", "replace")
    return value if value and all(0x20 <= byte < 0x7F for byte in value) else BYTES
