"""Refusals of the HTTP face, and how any refusal looks on the wire.

The body is OpenAI's: `{"error": {"message", "type", "param", "code"}}`, so that the `openai`
client raises its matching exception class. Refusals of the core (`router.engine`) pass through
here unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from keystage.router.engine import InvalidRequest, Refusal

_TYPES = {429: "rate_limit_error", 500: "server_error", 503: "unavailable_error", 504: "timeout_error"}


class FieldRefused(InvalidRequest):
    """One field of a request body is at fault.

    Attributes:
        codes: what its `code` may be.
    """

    codes = (
        "unknown_parameter",
        "unsupported_parameter",
        "unsupported_value",
        "invalid_type",
        "invalid_value",
        "missing_parameter",
    )

    def __init__(self, code: str, message: str, *, param: str) -> None:
        super().__init__(message, param=param)
        self.code = code


class Malformed(InvalidRequest):
    """The body is not what the path takes at all."""

    code = "malformed_body"


class ContextExceeded(InvalidRequest):
    """Prompt and max_tokens do not fit the pipeline's context."""

    code = "context_length_exceeded"


class UnsupportedMedia(Refusal):
    """A file of a kind that the pipeline does not read; the message says which it does."""

    status = 415
    code = "unsupported_media_type"


class UnknownPath(Refusal):
    """No such path."""

    status = 404
    code = "unknown_path"


class UnknownModel(Refusal):
    """The request names a model that this pipeline is not."""

    status = 404
    code = "model_not_found"


class MethodNotAllowed(Refusal):
    """The path exists for other methods; `allow` lists them."""

    status = 405
    code = "method_not_allowed"

    def __init__(self, message: str, *, allow: str) -> None:
        super().__init__(message)
        self.allow = allow


class BodyTooLarge(Refusal):
    """The body is larger than the pipeline takes."""

    status = 413
    code = "body_too_large"


class Unauthorized(Refusal):
    """No API key came with the request, or none that is known."""

    status = 401
    code = "invalid_api_key"


class PriorityRefused(Refusal):
    """The request asks for a priority that its API key does not allow."""

    status = 403
    code = "priority_not_allowed"


class Crowded(Refusal):
    """Too many connections, or too much that is still being sent."""

    status = 503
    code = "too_many_connections"


class SlowClient(Refusal):
    """A head or a body did not come in time."""

    status = 408
    code = "request_timeout"


class KeyReused(Refusal):
    """The `Idempotency-Key` of the request is another request's."""

    status = 422
    code = "idempotency_key_reused"

    def __init__(self) -> None:
        super().__init__(
            "this Idempotency-Key was used for another request (path, query, body or content type differ); "
            "take a new one",
            param="Idempotency-Key",
        )


class AnswerLost(Refusal):
    """The answer that the request wants to go on with is not known here and cannot be made the same again."""

    status = 409
    code = "answer_lost"


class JournalAway(Refusal):
    """What was made of the request may be in the journal, which cannot be asked at present."""

    status = 503
    code = "journal_unavailable"


class RouterLeaves(Refusal):
    """The router ends before the answer is complete; another one, or its successor, goes on."""

    status = 503
    code = "router_leaving"

    def __init__(self) -> None:
        super().__init__("the router ends: ask again with the same Idempotency-Key", retry_after_s=1.0)


def codes(status: int) -> list[str]:
    """Every code that a refusal with that status can have."""
    found: set[str] = set()
    for kind in _subclasses(Refusal):
        if kind.status == status and kind.__module__ in (Refusal.__module__, __name__):
            found.update(kind.codes if issubclass(kind, FieldRefused) else (kind.code,))
    return sorted(found)


def error_type(status: int) -> str:
    """OpenAI's `type` of a refusal with that status."""
    return _TYPES.get(status, "invalid_request_error")


def _subclasses(kind: type[Refusal]) -> Iterator[type[Refusal]]:
    for below in kind.__subclasses__():
        yield below
        yield from _subclasses(below)


def error_body(refusal: Refusal) -> bytes:
    """The refusal as OpenAI's error object, in JSON."""
    param = refusal.param
    return msgspec.json.encode(
        {
            "error": {
                "message": _writable(str(refusal)),
                "type": error_type(refusal.status),
                "param": None if param is None else _writable(param),
                "code": refusal.code,
            }
        }
    )


def _writable(text: str) -> str:
    """The text with `?` for what is no character: headers of a form bring bytes that are none."""
    return text.encode(errors="replace").decode()


def error_headers(refusal: Refusal) -> list[tuple[bytes, bytes]]:
    """Headers that belong to the refusal: `retry-after` (whole seconds, rounded up), `allow`."""
    headers = []
    if refusal.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(refusal.retry_after_s))))
    if isinstance(refusal, Unauthorized):
        headers.append((b"www-authenticate", b'Bearer realm="keystage"'))
    if isinstance(refusal, MethodNotAllowed):
        headers.append((b"allow", refusal.allow.encode()))
    return headers
