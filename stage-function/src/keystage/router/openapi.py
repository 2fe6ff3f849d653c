"""The router's OpenAPI 3.1 document, made from the field tables that it reads requests by.

`router.face` serves it at `GET /openapi.json`. One document per pipeline: its name, its context
length and its vocabulary are bounds of requests. Pure. It must not state a bound of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from keystage.bundle.api import Pipeline
from keystage.router import fields, images
from keystage.router import openapi_answers as answers
from keystage.router.api import STATS_PATH, RouterStats
from keystage.router.classes import DEFAULT_TOP_K, SAFETENSORS
from keystage.router.embeddings import PATH as EMBEDDINGS
from keystage.router.engine import Limits
from keystage.router.fields import Field, Verdict
from keystage.router.idempotency_http import KEY, LONGEST_KEY, LONGEST_POSITION, POSITION
from keystage.router.tasks import Task, task_of
from keystage.router.transcriptions import FORMATS
from keystage.router.transcriptions import PATH as TRANSCRIPTIONS
from keystage.router.transcriptions_model import FAMILY as SPEECH

Schema = dict[str, Any]

PATH = "/openapi.json"
_JSON = "application/json"
_EVENTS = "text/event-stream"
_BYTES = "application/octet-stream"
_FORM = "multipart/form-data"
_REFERENCE = "#/components/schemas/{name}"
_WHY = {
    400: "the request can never be served as it is",
    401: "where API keys are needed: none came with the request, or none that is known",
    403: "the API key does not allow that priority",
    404: "another model than the one served",
    408: "a head or a body did not come in time",
    409: "what `Last-Event-ID` wants to go on with is not known here and cannot be made the same again",
    413: "the body exceeds the pipeline's bound",
    415: "a file of a kind that the pipeline does not read",
    422: "the `Idempotency-Key` is another request's",
    429: "too many requests wait, or the deadline would pass before the answer is there",
    500: "the pipeline failed on this request",
    503: "too many connections; or the router ends, or cannot ask its journal: ask again with the same key",
    504: "the deadline passed, also where no worker came in that time",
}
_GENERATION = (400, 401, 403, 404, 408, 409, 413, 422, 429, 500, 503, 504)
_ITEMS = (400, 401, 403, 404, 408, 413, 422, 429, 500, 503, 504)
_IMAGE = (400, 401, 403, 408, 413, 415, 422, 429, 500, 503, 504)
_SINGLE_PASS = (400, 401, 403, 408, 413, 422, 429, 500, 503, 504)
_PROGRAM = (*_SINGLE_PASS, 415)
_REFUSED = (400, 401, 403, 408, 413, 422, 504)
"""Of what no pipeline of this kind does; keys and deadlines are looked at before."""
_TRANSCRIPTION = (400, 401, 403, 404, 408, 413, 415, 422, 429, 500, 503, 504)
_HEADERS = {401: "WWW-Authenticate", 429: "Retry-After", 503: "Retry-After"}
_DEADLINE = {
    "name": "X-Keystage-Deadline-S",
    "in": "header",
    "description": "seconds within which the answer must be complete",
    "schema": {"type": "number", "exclusiveMinimum": 0},
}
_PRIORITY = {
    "name": "X-Keystage-Priority",
    "in": "header",
    "description": "how urgent it is; an API key says how urgent it may be at most",
    "schema": {"type": "string", "enum": ["low", "normal", "high"]},
}
_KEY = {
    "name": KEY,
    "in": "header",
    "description": "one answer for this key, however often it is asked for; events of a stream are numbered",
    "schema": {"type": "string", "pattern": f"^[!-~]{{1,{LONGEST_KEY}}}$"},
}
_POSITION = {
    "name": POSITION,
    "in": "header",
    "description": f"tokens that the client has of a stream, whose request had the same `{KEY}`",
    "schema": {"type": "string", "pattern": f"^[0-9]{{1,{LONGEST_POSITION}}}$"},
}

_WITH_STREAM = {
    "if": {"properties": {"stream_options": {"type": "object"}}, "required": ["stream_options"]},
    "then": {"properties": {"stream": {"const": True}}, "required": ["stream"]},
}


def document(pipeline: Pipeline, limits: Limits) -> Schema:
    """The document of one pipeline.

    Args:
        pipeline: what is served.
        limits: what its engine admits.
    """
    (stats,), components = msgspec.json.schema_components([RouterStats], ref_template=_REFERENCE)
    components["Model"] = answers.MODEL
    components["TokenId"] = {"type": "integer", "minimum": 0, "maximum": max(0, limits.vocab_size - 1)}
    # Without a token to begin with, an empty text makes no prompt.
    components["PromptText"] = {"type": "string", "minLength": 0 if pipeline.bos is not None else 1}
    paths: dict[str, Schema] = {
        "/": {"post": _plain(pipeline, limits)},
        "/v1/completions": {"post": _openai("complete", "completions", pipeline, limits)},
        "/v1/chat/completions": {"post": _openai("chat", "chat completions", pipeline, limits)},
        EMBEDDINGS: {"post": _embeddings("embed", pipeline, limits)},
        TRANSCRIPTIONS: {"post": _transcription(pipeline)},
        "/v1/models": _get("models", "The one model served", {200: answers.MODELS, 401: None}),
        "/v1/models/{name}": _get(
            "model", "The model served", {200: answers.MODEL, 401: None, 404: None}, "name"
        ),
        "/_/health": _get("health", "Whether the process is well", _both(answers.state("healthy"))),
        "/_/ready": _get("ready", "Whether requests can be served now", _both(answers.state("ready"))),
        STATS_PATH: _get("stats", "Counters for the controller", {200: stats}),
        "/metrics": _get("metrics", "Prometheus text", {200: {"type": "string"}}),
        PATH: _get("openapi", "This document", {200: {"type": "object"}}),
    }
    texts = {kind: {"schema": {"type": "string"}} for kind in ("text/plain", "application/openmetrics-text")}
    paths["/metrics"]["get"]["responses"]["200"]["content"] = texts
    return {
        "openapi": "3.1.0",
        "info": {
            "title": f"Keystage pipeline {pipeline.name}",
            "version": "1",
            "description": f"At most {limits.max_body_bytes} bytes a body, whatever its Content-Type says. "
            "A method that a path does not have is answered with 405 and `Allow`, a path that is not here "
            "with 404; both with the error object.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"apiKey": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"apiKey": []}],
    }


def request_schema(table: Mapping[str, Field], required: str, limits: Limits, pipeline: Pipeline) -> Schema:
    """What a field table takes, in JSON Schema.

    Args:
        table: one of `router.fields`.
        required: the field that must be there.
        limits: bounds that are the pipeline's.
        pipeline: its name is the model's.
    """
    most = max(1, limits.context_length - 1)
    members: Schema = {}
    for name, field in table.items():
        schema = dict(field.read.schema)
        if name == "model":
            schema["const"] = pipeline.name
        elif name == "dimensions":
            schema["const"] = pipeline.hidden_size
        elif schema.get("maximum", 0) > most and name.endswith("tokens"):
            schema["maximum"] = most  # a prompt has at least one token
        if name != required:
            schema = _or_null(schema)
        if field.verdict is not Verdict.REFUSED:
            schema["description"] = f"{field.verdict}: {field.note}"
        members[name] = schema
    schema = {"type": "object", "properties": members, "required": [required], "additionalProperties": False}
    return schema | (_WITH_STREAM if "stream_options" in members else {})


def _or_null(schema: Schema) -> Schema:
    if not schema or schema.get("type") == "null":
        return dict(schema)
    return {"anyOf": [schema, {"type": "null"}]}


def _openai(name: str, what: str, pipeline: Pipeline, limits: Limits) -> Schema:
    table, shape = fields.COMPLETION, (answers.COMPLETION, answers.COMPLETION_EVENT)
    if name == "chat":
        table, shape = fields.CHAT, (answers.CHAT, answers.CHAT_EVENT)
    if pipeline.family == SPEECH:
        return _post(name, "Refused: the pipeline takes sound", (400, 413), {_JSON: {}}, None)
    if not limits.looping or (name == "chat" and not pipeline.chat_template):
        lacks = "has no chat template" if limits.looping else "is single-pass"
        return _post(name, f"Refused: the pipeline {lacks}", (400, 413), {_JSON: {}}, None)
    return _generation(name, f"OpenAI {what}", table, shape, pipeline, limits)


def _plain(pipeline: Pipeline, limits: Limits) -> Schema:
    """`POST /`, which every kind of pipeline has its own of."""
    if pipeline.family == SPEECH:
        answer = {_JSON: {"schema": answers.TRANSCRIPTION}}
        return _post("call", "Plain function call: a WAV file", _TRANSCRIPTION, {_BYTES: {}}, answer)
    match task_of(pipeline):
        case None:
            shape = (answers.PLAIN, answers.PLAIN_EVENT)
            return _generation("call", "Plain function call", fields.PLAIN, shape, pipeline, limits)
        case Task.EMBED:
            return _embeddings("call", pipeline, limits)
        case Task.FILL_MASK:
            body = {_JSON: {"schema": request_schema(fields.FILL_MASK, "text", limits, pipeline)}}
            filled = {_JSON: {"schema": answers.FILLED}}
            return _post("call", "Plain function call: fills masks", _ITEMS, body, filled)
        case Task.CLASSIFY:
            return _classification(limits)
        case Task.BYTES:
            return _post("call", "Plain function call", _SINGLE_PASS, {_BYTES: {}}, {_BYTES: {}})
        case Task.PROGRAM:
            return _post("call", "Request to the stream program", _PROGRAM, {"*/*": {}}, {"*/*": {}})


def _embeddings(name: str, pipeline: Pipeline, limits: Limits) -> Schema:
    if task_of(pipeline) is not Task.EMBED:
        return _post(name, "Refused: the pipeline makes no embeddings", _REFUSED, {_JSON: {}}, None)
    body = {_JSON: {"schema": request_schema(fields.EMBEDDINGS, "input", limits, pipeline)}}
    answer = {_JSON: {"schema": answers.embeddings(pipeline.hidden_size)}}
    return _post(name, "OpenAI embeddings", _ITEMS, body, answer)


def _classification(limits: Limits) -> Schema:
    taken: Schema = {kind: {} for kind in images.TYPES}
    answer = {_JSON: {"schema": answers.CLASSES}, SAFETENSORS: {}}
    operation = _post("call", "Plain function call: classes of an image", _IMAGE, taken, answer)
    schema = {"type": "integer", "minimum": 1, "maximum": limits.vocab_size, "default": DEFAULT_TOP_K}
    top_k = {"name": "top_k", "in": "query", "description": "classes of the answer", "schema": schema}
    return {**operation, "parameters": [*operation["parameters"], top_k]}


def _transcription(pipeline: Pipeline) -> Schema:
    what = "OpenAI audio transcriptions"
    if pipeline.family != SPEECH:
        return _post("transcribe", "Refused: the pipeline takes no sound", _REFUSED, {_FORM: {}}, None)
    members: Schema = {
        "file": {"type": "string", "contentMediaType": "audio/wav", "description": "a WAV file"},
        "model": {"const": pipeline.name},
        "language": {"type": "string", "description": "a language's code; heard where it is absent"},
        "prompt": {"type": "string", "description": "a text that the sound goes on from"},
        "response_format": {"enum": list(FORMATS), "default": "json"},
        "temperature": {"type": "number", "minimum": 0, "maximum": 1, "default": 0},
    }
    form = {"type": "object", "properties": members, "required": ["file"], "additionalProperties": False}
    whole = {"anyOf": [answers.TRANSCRIPTION, answers.TRANSCRIPTION_VERBOSE]}
    answer = {_JSON: {"schema": whole}, "text/plain": {"schema": {"type": "string"}}}
    return _post("transcribe", what, _TRANSCRIPTION, {_FORM: {"schema": form}}, answer)


def _generation(
    name: str,
    what: str,
    table: Mapping[str, Field],
    shape: tuple[Schema, Schema],
    pipeline: Pipeline,
    limits: Limits,
) -> Schema:
    required = "messages" if "messages" in table else "prompt"
    body = {_JSON: {"schema": request_schema(table, required, limits, pipeline)}}
    # Before OpenAPI 3.2 the schema of this type is read as that of each event.
    whole, event = shape
    answer = {_JSON: {"schema": whole}, _EVENTS: {"schema": event}}
    operation = _post(name, what, _GENERATION, body, answer)
    return {**operation, "parameters": [*operation["parameters"], _POSITION]}


def _post(name: str, what: str, refusals: Iterable[int], body: Schema, answer: Schema | None) -> Schema:
    responses = {} if answer is None else {"200": {"description": "the answer", "content": answer}}
    return {
        "operationId": name,
        "summary": what,
        "parameters": [_DEADLINE, _PRIORITY, _KEY],
        "requestBody": {"required": _JSON in body, "content": body},
        "responses": responses | {str(status): _refusal(status) for status in refusals},
    }


def _both(schema: Schema) -> dict[int, Schema | None]:
    return {200: schema, 503: schema}


def _get(name: str, what: str, schemas: Mapping[int, Schema | None], parameter: str = "") -> Schema:
    """A path that is served for GET and HEAD; a status without schema is a refusal."""
    operation: Schema = {"operationId": name, "summary": what, "responses": {}}
    if parameter:
        schema = {"type": "string"}
        operation["parameters"] = [{"name": parameter, "in": "path", "required": True, "schema": schema}]
    for status, schema_ in schemas.items():
        operation["responses"][str(status)] = (
            _refusal(status)
            if schema_ is None
            else {"description": what, "content": {_JSON: {"schema": schema_}}}
        )
    bare = {status: {"description": r["description"]} for status, r in operation["responses"].items()}
    return {"get": operation, "head": {**operation, "operationId": f"head_{name}", "responses": bare}}


def _refusal(status: int) -> Schema:
    schema: Schema = answers.refusal(status)
    response: Schema = {"description": _WHY[status], "content": {_JSON: {"schema": schema}}}
    if status in _HEADERS:
        response["headers"] = {_HEADERS[status]: {"description": "seconds", "schema": {"type": "string"}}}
    return response
