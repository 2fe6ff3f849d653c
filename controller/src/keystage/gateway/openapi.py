"""The gateway's OpenAPI 3.1 document, made from its route table and its msgspec types.

Served at `GET /openapi.json`. Pure. It must not state anything that the route table or a type does
not hold, or the two could drift apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from keystage.gateway import types
from keystage.gateway.auth import CHALLENGE
from keystage.gateway.routes import ANY, JSON, LINES, ROUTES, TEXT, Answer, Parameter, Route

_REFERENCE = "#/components/schemas/{name}"
_GIVEN = {"type": "string", "minLength": 1}
_A_VALUE = [{"required": [name], "properties": {name: _GIVEN}} for name in ("value", "rawValue")]
_UNAUTHORISED = Answer(
    "401", "credentials are missing or wrong", headers={"WWW-Authenticate": f"`{CHALLENGE}`"}
)


def document(routes: Iterable[Route] = ROUTES) -> dict[str, Any]:
    """The document.

    Args:
        routes: what is served; a GET route is served for HEAD too.
    """
    routes = tuple(routes)
    kinds: list[Any] = [a.body for r in routes for a in r.answers if a.body is not None]
    kinds += [r.body for r in routes if r.body not in (None, ANY)]
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_REFERENCE)
    known = dict(zip(map(repr, kinds), schemas, strict=True))
    components[types.Secret.__name__]["anyOf"] = _A_VALUE
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        item = paths.setdefault(route.path, {})
        item[route.method.lower()] = _operation(route, known)
        if route.method == "GET":
            item.setdefault("head", _operation(route, known, "head_"))
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Keystage gateway",
            "version": types.GATEWAY_INFO.version.release,
            "description": "The REST API of an OpenFaaS gateway. A method that a path does not have is "
            "answered with 405 and `Allow`, `OPTIONS` with 204 and `Allow`, other paths with 404.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"basic": {"type": "http", "scheme": "basic"}},
        },
        "security": [{"basic": []}],
    }


def encoded() -> bytes:
    """The document as JSON."""
    return msgspec.json.encode(document())


def _operation(route: Route, known: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    has_body = route.method != "HEAD" and not prefix
    answers = route.answers if route.is_open else (*route.answers, _UNAUTHORISED)
    operation: dict[str, Any] = {
        "operationId": prefix + route.name,
        "summary": route.what,
        "responses": {a.status: _response(a, known, has_body) for a in answers},
    }
    if route.parameters:
        operation["parameters"] = [_parameter(p) for p in route.parameters]
    if route.is_open:
        operation["security"] = []
    if route.body == ANY:
        operation["requestBody"] = {"content": {ANY: {}}}
    elif route.body is not None:
        content = {JSON: {"schema": known[repr(route.body)]}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _parameter(parameter: Parameter) -> dict[str, Any]:
    return {
        "name": parameter.name,
        "in": parameter.where,
        "required": parameter.required,
        "description": parameter.what,
        "schema": parameter.schema,
    }


def _response(answer: Answer, known: dict[str, Any], has_body: bool) -> dict[str, Any]:
    response: dict[str, Any] = {"description": answer.what}
    if answer.headers:
        response["headers"] = {
            name: {"description": what, "schema": {"type": "string"}} for name, what in answer.headers.items()
        }
    if not has_body or not answer.media:
        return response
    schema: dict[str, Any] = {}
    if answer.media == JSON:
        schema = {"schema": known[repr(answer.body)]}
    elif answer.media == LINES:
        # One object a line; the keyword that says so (itemSchema) comes with OpenAPI 3.2.
        schema = {"schema": {"type": "string"}, "x-itemSchema": known[repr(answer.body)]}
    elif answer.media == TEXT:
        schema = {"schema": {"type": "string"}}
    response["content"] = dict.fromkeys((answer.media, *answer.also), schema)
    return response
