"""The gateway's routes in one table: what is served, and what is documented.

`gateway.rest` serves exactly these paths and methods, `gateway.openapi` writes them down. Pure;
must not know how a route is answered. Over 300 lines, since a table in two places is read nowhere.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from keystage.gateway import types
from keystage.gateway.metrics import CONTENT_TYPE, OPEN_TYPE
from keystage.gateway.names import NAMESPACE
from keystage.gateway.queries import FALSE, TRUE
from keystage.gateway.queue_address import MAX_URL
from keystage.observability.api import EVENTS_PATH, REPORT_PATH, Report

JSON = "application/json"
TEXT = "text/plain; charset=utf-8"
LINES = "application/x-ndjson"
EVENTS = "text/event-stream"
ANY = "*/*"


@dataclasses.dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a route: `where` is `path`, `query` or `header`."""

    name: str
    where: str
    what: str
    schema: dict[str, Any]
    required: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """One status of a route.

    Attributes:
        status: HTTP status, or `default`.
        what: when it comes.
        media: content type, empty for no body.
        body: type of a JSON body, or of each line.
        headers: headers that come with it, and what they hold.
        also: other content types it can have, by what is asked for.
    """

    status: str
    what: str
    media: str = TEXT
    body: Any = None
    headers: dict[str, str] = dataclasses.field(default_factory=dict)
    also: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Route:
    """One path and method.

    Attributes:
        method: HTTP method.
        path: path with `{names}`.
        name: which handler answers it; operation id of the document.
        what: what it does.
        answers: every status it can answer with, but for 401, which `is_open` decides.
        parameters: of path, query and header.
        body: type of its JSON body, `ANY` for any bytes, None for none.
        is_open: needs no credentials.
    """

    method: str
    path: str
    name: str
    what: str
    answers: tuple[Answer, ...]
    parameters: tuple[Parameter, ...] = ()
    body: Any = None
    is_open: bool = False


_BOOLEAN = {"type": "string", "enum": [*sorted(TRUE), *sorted(FALSE)]}
_TEXT = {"type": "string"}
_NAMESPACE = Parameter("namespace", "query", "there is one", {"type": "string", "enum": ["", NAMESPACE]})
_FUNCTION = Parameter("name", "path", f"function, also as `name.{NAMESPACE}`", _TEXT, required=True)
_NAMED = Parameter("name", "path", "namespace", _TEXT, required=True)
_SUB_PATH = Parameter("path", "path", "path for the function; may contain slashes", _TEXT, required=True)
_ACCEPTED = Answer("202", "accepted", "")
_BAD = Answer("400", "names what is at fault, the bound and the value")
_NO_FUNCTION = Answer("404", "no such function")
_NO_SECRET = Answer("404", "no such secret")
_NO_NAMESPACE = Answer("404", "no such namespace")
_EXISTS = Answer("409", "it exists already")
_LATE = Answer("408", "the body did not come in time")
_LARGE = Answer("413", "the body exceeds the bound, which is named", headers={"Connection": "close"})
_DOWN = Answer("503", "the backend cannot be reached")
_NO_REPORT = Answer("503", "no controller has reported, or the backend cannot be reached")
_UNCHANGED = Answer("304", "unchanged since the ETag that was given", "")
_ONE_NAMESPACE = Answer("403", "refused: there is one namespace, and it stays")
_LOGS = (
    Parameter("name", "query", "function", {"type": "string", "minLength": 1}, required=True),
    _NAMESPACE,
    Parameter("instance", "query", "only this replica", _TEXT),
    Parameter("tail", "query", "newest lines; 0 or less: all", {"type": "integer", "format": "int64"}),
    Parameter("since", "query", "only later lines (RFC 3339)", {"type": "string", "format": "date-time"}),
    Parameter("follow", "query", "go on with new lines", _BOOLEAN),
)


def _json(body: Any) -> Answer:
    return Answer("200", "the answer", JSON, body)


def _write(method: str, path: str, name: str, what: str, body: Any, *more: Answer) -> Route:
    return Route(method, path, name, what, (_ACCEPTED, _BAD, *more, _LATE, _LARGE, _DOWN), body=body)


MANAGEMENT: tuple[Route, ...] = (
    Route(
        "GET",
        "/healthz",
        "healthz",
        "Whether it is alive and its view of functions and replicas is fresh",
        (Answer("200", "it is"), Answer("503", "the view is too old; names its age and the bound")),
        is_open=True,
    ),
    Route(
        "GET",
        "/metrics",
        "metrics",
        "Prometheus text",
        (Answer("200", "all series", CONTENT_TYPE, also=(OPEN_TYPE,)),),
        is_open=True,
    ),
    Route("GET", "/openapi.json", "openapi", "This document", (_json(dict[str, Any]),), is_open=True),
    Route(
        "GET",
        REPORT_PATH,
        "report",
        "What every pipeline, stage, replica and node is doing, and why",
        (_json(Report), _NO_REPORT),
    ),
    Route(
        "GET",
        EVENTS_PATH,
        "events",
        "The report as it is (`event: report`), then each new one, at most one a second, without end",
        (Answer("200", "server-sent events; `event: clock` first: the gateway's time", EVENTS), _NO_REPORT),
    ),
    Route(
        "GET",
        "/ui",
        "ui",
        "To the live page",
        (
            Answer("308", "the page is at `ui/`", "", headers={"Location": "ui/"}),
            Answer("200", "never itself: what a client gets that follows", ANY),
        ),
    ),
    Route("GET", "/ui/", "ui_page", "The live page", (Answer("200", "HTML", ANY), _UNCHANGED)),
    Route(
        "GET",
        "/ui/{file}",
        "ui_file",
        "A file of the live page",
        (Answer("200", "the file", ANY), _UNCHANGED, Answer("404", "no such file; names those there are")),
        (Parameter("file", "path", "its name", _TEXT, required=True),),
    ),
    Route("GET", "/system/info", "info", "Who provides", (_json(types.GatewayInfo),)),
    Route("GET", "/system/telemetry", "telemetry", "Nothing is sent anywhere", (_json(types.Telemetry),)),
    Route("GET", "/system/namespaces", "namespaces", "Names of all namespaces", (_json(list[str]),)),
    Route(
        "GET",
        "/system/namespace/{name}",
        "namespace",
        "One namespace",
        (_json(types.FunctionNamespace), _NO_NAMESPACE),
        (_NAMED,),
    ),
    Route(
        "POST",
        "/system/namespace/",
        "create_namespace",
        "Refused: namespaces cannot be created here",
        (_BAD, _ONE_NAMESPACE, _EXISTS, _LARGE),
        body=types.FunctionNamespace,
    ),
    Route(
        "POST",
        "/system/namespace/{name}",
        "create_named_namespace",
        "Refused: namespaces cannot be created here",
        (_ONE_NAMESPACE, _EXISTS),
        (_NAMED,),
        ANY,
    ),
    Route(
        "PUT",
        "/system/namespace/{name}",
        "update_namespace",
        "Refused: the namespace cannot be changed here",
        (_ONE_NAMESPACE, _NO_NAMESPACE),
        (_NAMED,),
        ANY,
    ),
    Route(
        "DELETE",
        "/system/namespace/{name}",
        "delete_namespace",
        "Refused: the namespace cannot be removed",
        (_ONE_NAMESPACE, _NO_NAMESPACE),
        (_NAMED,),
        ANY,
    ),
    Route(
        "GET",
        "/system/functions",
        "list_functions",
        "All functions",
        (_json(list[types.FunctionStatus]), _BAD),
        (_NAMESPACE,),
    ),
    _write(
        "POST", "/system/functions", "create", "Deploys a new function", types.FunctionDeployment, _EXISTS
    ),
    _write(
        "PUT", "/system/functions", "update", "Replaces a function", types.FunctionDeployment, _NO_FUNCTION
    ),
    _write(
        "DELETE",
        "/system/functions",
        "delete",
        "Drains and removes a function",
        types.DeleteFunctionRequest,
        _NO_FUNCTION,
    ),
    Route(
        "GET",
        "/system/function/{name}",
        "describe",
        "One function",
        (_json(types.FunctionStatus), _BAD, _NO_FUNCTION, _DOWN),
        (_FUNCTION, _NAMESPACE, Parameter("usage", "query", "with CPU and memory in use", _BOOLEAN)),
    ),
    Route(
        "POST",
        "/system/scale-function/{name}",
        "scale",
        "A person's wish for replicas; it expires",
        (_ACCEPTED, _BAD, _NO_FUNCTION, _LARGE, _DOWN),
        (_FUNCTION, _NAMESPACE),
        types.ScaleServiceRequest,
    ),
    Route(
        "GET",
        "/system/logs",
        "logs",
        "Output of a function, one JSON object per line",
        (Answer("200", "lines, the oldest first", LINES, types.LogMessage), _BAD, _NO_FUNCTION, _DOWN),
        _LOGS,
    ),
    Route(
        "GET",
        "/system/secrets",
        "list_secrets",
        "Names of all secrets; values are never read back",
        (_json(list[types.SecretName]), _BAD, _DOWN),
        (_NAMESPACE,),
    ),
    _write("POST", "/system/secrets", "create_secret", "Creates a secret", types.Secret, _EXISTS),
    _write("PUT", "/system/secrets", "update_secret", "Replaces a secret", types.Secret, _NO_SECRET),
    _write("DELETE", "/system/secrets", "delete_secret", "Removes a secret", types.SecretName, _NO_SECRET),
    Route(
        "POST",
        "/system/alert",
        "alert",
        "Refused: the controller alone decides replica numbers, no alert does",
        (Answer("403", "always"),),
        body=ANY,
    ),
)

_CALL_ID = {"X-Call-Id": "the caller's, or a new one"}
_RETRY = {"Retry-After": "seconds"}
_OWN = tuple(
    # No content type: the function may answer with the same status and what it likes.
    Answer(status, f"{what} (plain text), or the function's own answer", "", headers=headers)
    for status, what, headers in (
        ("404", "no such function", {}),
        ("408", "the body did not come in time", {}),
        ("413", "the body exceeds the bound, which is named", {}),
        ("429", "too many requests wait for a replica", _RETRY),
        ("502", "the replica broke the connection before it answered", {}),
        ("503", "no replica was ready in time", _RETRY),
        ("504", "the replica sent nothing for too long", {}),
    )
)
INVOKE_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
"""What the document lists; every other method is passed on as well."""
INVOCATION: tuple[Route, ...] = tuple(
    Route(
        method,
        path,
        f"{method.lower()}_{name}",
        "Calls a function: method, path, query and body reach it as they are, its answer comes back as it is",
        (Answer("default", "what the function answers", "", headers=_CALL_ID), *_OWN),
        parameters,
        ANY if method in ("POST", "PUT", "PATCH", "DELETE") else None,
        is_open=True,
    )
    for path, name, parameters in (
        ("/function/{name}", "invoke", (_FUNCTION,)),
        ("/function/{name}/{path}", "invoke_path", (_FUNCTION, _SUB_PATH)),
    )
    for method in INVOKE_METHODS
)
_CALLBACK = Parameter(
    "X-Callback-Url",
    "header",
    "http or https address to which the function's answer is posted",
    {"type": "string", "pattern": "^(https?://[!-~]+)?$", "maxLength": MAX_URL},
)
ASYNC: tuple[Route, ...] = tuple(
    Route(
        "POST",
        path,
        name,
        "Queues a call and answers at once",
        (
            Answer("202", "queued", "", headers=_CALL_ID),
            Answer("400", "the call cannot be queued as it is; names what is at fault"),
            Answer("404", "no such function"),
            _LATE,
            Answer("413", "the body exceeds the bound, which is named"),
            Answer("429", "the queue is full; names the bound", headers=_RETRY),
            Answer("503", "the queue cannot be reached", headers=_RETRY),
        ),
        (*parameters, _CALLBACK),
        ANY,
        is_open=True,
    )
    for path, name, parameters in (
        ("/async-function/{name}", "queue_call", (_FUNCTION,)),
        ("/async-function/{name}/{path}", "queue_call_path", (_FUNCTION, _SUB_PATH)),
    )
)
ROUTES = (*MANAGEMENT, *INVOCATION, *ASYNC)
