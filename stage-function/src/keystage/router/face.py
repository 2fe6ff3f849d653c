"""The router's HTTP face: a bare ASGI application over the engine.

uvicorn speaks HTTP; this module routes, `router.openai` reads bodies, `router.engine` generates,
`router.text_output` makes text and `router.openai_render` writes it. No framework stands on this
path, and no task is made per token.

Every refusal is answered with its status and OpenAI's error object; in a stream that has begun,
with an error event. A client that goes away closes the engine's iterator at once.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, cast

import msgspec
from prometheus_client import REGISTRY
from prometheus_client.exposition import choose_encoder

from keystage.bundle.api import Pipeline
from keystage.router.api import STATS_PATH
from keystage.router.classes import Classifying
from keystage.router.embeddings import PATH as EMBEDDINGS
from keystage.router.embeddings import Embeddings
from keystage.router.engine import Engine, Failure, InvalidRequest, Refusal
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
    start_events,
    watched,
)
from keystage.router.masks import MaskFilling
from keystage.router.openai import Call, CallReader, Dialect
from keystage.router.openai_errors import MethodNotAllowed, UnknownModel, UnknownPath, error_body
from keystage.router.openai_render import Events, event, whole
from keystage.router.openapi import PATH as OPENAPI_PATH
from keystage.router.openapi import document
from keystage.router.tasks import Task, task_of
from keystage.router.text import TextCodec
from keystage.router.text_output import FinishReason, TextOutput
from keystage.router.traces import traced
from keystage.router.transcriptions import PATH as TRANSCRIPTIONS
from keystage.router.transcriptions import Transcriptions
from keystage.router.transcriptions_model import speech_model
from keystage.wire.tracing import Tracer

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

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
    ) -> None:
        self._engine = engine
        self._tracer = tracer
        self._pipeline = pipeline
        self._text = text
        self._stats = stats
        self._ready = ready
        self._healthy = healthy
        self._limits = engine.limits
        self._calls = CallReader(pipeline, self._limits, text)
        speech = speech_model(pipeline, text)
        self._takes_sound = speech is not None
        self._transcriptions = Transcriptions(engine, speech, text, pipeline.name)
        self._embeddings = Embeddings(engine, pipeline, text)
        self._plain = self._plain_call()
        self._openapi = msgspec.json.encode(document(pipeline, self._limits))
        self._created_at_s = int(time.time())
        self._routes: dict[str, dict[str, Handler]] = {
            "/": {"POST": self._plain},
            "/v1/completions": {"POST": self._complete},
            "/v1/chat/completions": {"POST": self._chat},
            EMBEDDINGS: {"POST": self._embeddings.serve},
            TRANSCRIPTIONS: {"POST": self._transcriptions.serve},
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

    def _plain_call(self) -> Handler:
        """What `POST /` does in this pipeline."""
        if self._takes_sound:
            return self._transcriptions.call
        match task_of(self._pipeline):
            case None:
                return self._generate_plain
            case Task.EMBED:
                return self._embeddings.serve
            case Task.FILL_MASK:
                return MaskFilling(self._engine, self._pipeline, self._text).call
            case Task.CLASSIFY:
                return Classifying(self._engine, self._pipeline).call
            case Task.BYTES:
                return self._pass_bytes
            case Task.PROGRAM:
                return self._call_program

    async def _generate_plain(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._generate(Dialect.PLAIN, scope, receive, send)

    async def _pass_bytes(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(scope, receive, self._limits.max_body_bytes)
        deadline = deadline_s(scope)
        with watched(receive):
            answer = await self._engine.run(body, deadline)
        await send_whole(send, answer, BYTES)

    async def _call_program(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(scope, receive, self._limits.max_body_bytes)
        deadline = deadline_s(scope)
        content_type = (header(scope, b"content-type") or b"").decode("latin-1")
        with watched(receive):
            answer, made_type = await self._engine.call(body, content_type, deadline)
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
        output = TextOutput(self._text.decoder(call.generation.prompt), call.stops, call.generation.eos)
        if call.stream:
            await self._stream(call, output, receive, send)
            return
        with watched(receive):
            answer = await self._collect(call, output)
        await send_whole(send, answer)

    async def _collect(self, call: Call, output: TextOutput) -> bytes:
        parts, ids = [], []
        async with aclosing(self._tokens(call)) as tokens:
            async for new in tokens:
                parts.append(output.push(new))
                ids.extend(new)
                if output.is_cut:
                    break
        tail, reason = output.finish()
        parts.append(tail)
        return whole(call, self._pipeline.name, "".join(parts), ids[: output.tokens], reason)

    async def _stream(self, call: Call, output: TextOutput, receive: Receive, send: Send) -> None:
        """Streams the answer. Status and refusals are decided by the first tokens."""
        events = Events(call, self._pipeline.name)
        pending = events.opening()
        started = False
        most = call.generation.max_tokens
        try:
            with watched(receive):
                async with aclosing(self._tokens(call)) as tokens:
                    async for ids in tokens:
                        if not started:
                            await start_events(send)
                            started = True
                        seen = output.tokens
                        text = output.push(ids)
                        pending += events.chunk(text, ids[: output.tokens - seen])
                        if output.is_cut:
                            break
                        # The last chunk waits for the engine's end, which is there already.
                        if pending and output.reason is None and output.tokens < most:
                            await send({"type": "http.response.body", "body": pending, "more_body": True})
                            pending = b""
        except Refusal as refusal:
            if not started:
                raise
            await send({"type": "http.response.body", "body": pending + event(error_body(refusal))})
            return
        except Exception:  # a bug: the client is told, the server logs it
            if started:
                failure = Failure("the router failed on this request")
                await send({"type": "http.response.body", "body": pending + event(error_body(failure))})
            raise
        if not started:
            raise Failure("the pipeline ended the request without a token")
        pending += events.closing(*_ending(output))
        await send({"type": "http.response.body", "body": pending})

    def _tokens(self, call: Call) -> AsyncGenerator[list[int], None]:
        # The port promises `aclose`; its type says AsyncIterator so that engines may be classes.
        return cast("AsyncGenerator[list[int], None]", self._engine.generate(call.generation))

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


def _ending(output: TextOutput) -> tuple[str, int, FinishReason]:
    text, reason = output.finish()
    return text, output.tokens, reason


async def _send_state(send: Send, holds: bool, word: str) -> None:
    await send_whole(send, msgspec.json.encode({word: holds}), JSON, 200 if holds else 503)


def _safe(content_type: str) -> bytes:
    """A program's content type as a header's value; one that can be none is given up."""
    value = content_type.encode("latin-1", "replace")
    return value if value and all(0x20 <= byte < 0x7F for byte in value) else BYTES
