"""OpenAPI documents of the HTTP APIs that have none of their own: they are between parts, for nobody else.

Only what is needed to make requests: paths, methods, and bodies that are nearly right.
"""

from __future__ import annotations

from typing import Any

import msgspec

Document = dict[str, Any]
_ANY: dict[str, Any] = {"default": {"description": "whatever it answers"}}


def _operation(
    body: Any = None, *, path: str = "", query: tuple[str, ...] = (), raw: bool = False
) -> dict[str, Any]:
    names = [part.strip("{}") for part in path.split("/") if part.startswith("{")]
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in names
    ]
    parameters += [{"name": name, "in": "query", "schema": {"type": ["number", "string"]}} for name in query]
    made: dict[str, Any] = {"responses": _ANY, "parameters": parameters}
    if raw:
        kinds = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
        made["requestBody"] = {"content": kinds}
    elif body is not None:
        made["requestBody"] = {"content": {"application/json": {"schema": body}}}
    return made


def _document(paths: dict[str, Any], kinds: tuple[Any, ...] = (), *, bearer: bool = False) -> Document:
    _, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    found: Document = {
        "openapi": "3.1.0",
        "info": {"title": "between parts", "version": "1"},
        "paths": paths,
        "components": {"schemas": components},
    }
    if bearer:
        found["components"]["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"bearer": []}]
    return found


def _of(kind: Any) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


def worker() -> Document:
    """`keystage.worker.http`."""
    paths = {
        path: {"get": _operation()} for path in ("/_/health", "/_/ready", "/_/start", "/metrics", "/no/such")
    }
    threads = {"type": "object", "properties": {"threads": {"type": "integer"}}, "required": ["threads"]}
    return _document(
        {
            **paths,
            "/_/threads": {"get": _operation(), "put": _operation(threads)},
            "/": {"post": _operation(raw=True), "get": _operation()},
        },
        bearer=True,
    )


def keysmanager() -> Document:
    """`keystage.keysmanager.peer_server`."""
    from keystage.keysmanager.api import Invalidate, StageName
    from keystage.keysmanager.pod_api import Grant

    parameters = "/v1/parameters/{identity}"
    return _document(
        {
            "/v1/status": {"get": _operation()},
            parameters: {"get": _operation(path=parameters)},
            "/v1/key-stages": {"put": _operation({"type": "array", "items": _of(StageName)})},
            "/v1/invalidate": {"post": _operation(_of(Invalidate))},
            "/v1/grants": {"put": _operation({"type": "array", "items": _of(Grant)})},
            "/metrics": {"get": _operation()},
        },
        (StageName, Invalidate, Grant),
        bearer=True,
    )


def control() -> Document:
    """`keystage.local.control`."""
    from keystage.local.api import Cpu, Deployment, Desired, Intent, KeyStageList, Load

    one = "/functions/{name}"
    paths: dict[str, Any] = {
        one: {
            "get": _operation(path=one), "put": _operation(_of(Deployment), path=one),
            "delete": _operation(path=one),
        },
        f"{one}/intent": {"put": _operation(_of(Intent), path=one)},
        f"{one}/replicas": {"put": _operation(_of(Desired), path=one)},
        f"{one}/cpu": {"put": _operation(_of(Cpu), path=one)},
        f"{one}/load": {"put": _operation(_of(Load), path=one)},
        f"{one}/usage": {"get": _operation(path=one)},
        f"{one}/logs": {"get": _operation(path=one, query=("tail", "since"))},
        "/secrets": {"get": _operation()},
        "/secrets/{name}": {
            "put": _operation(path="/secrets/{name}", raw=True), "delete": _operation(path="/secrets/{name}"),
        },
        "/key-stages": {"put": _operation(_of(KeyStageList))},
        "/report": {"put": _operation({"type": "object"})},
    }  # fmt: skip
    for path in ("/functions", "/replicas", "/nodes", "/starts", "/healthz"):
        paths[path] = {"get": _operation()}
    return _document(paths, (Deployment, Intent, Desired, Cpu, Load, KeyStageList))
