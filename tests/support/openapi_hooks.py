"""Hooks of the conformance runs (SCHEMATHESIS_HOOKS): what generated requests may do to this machine.

Read by the schemathesis process that `tests/contract/test_openapi_conformance.py` starts. What is
changed is what would cost: a deployment that is valid as generated becomes one of three functions
whose program only sleeps and one of these three is what is removed, a scale request asks for two replicas
at most and names no other function than its path, a name in a path is one that is deployed half of
the time, a callback goes nowhere, and logs are not followed without end.
"""

from __future__ import annotations

import re
import zlib
from typing import Any

import schemathesis

NAMES = ("fuzz-a", "fuzz-b", "fuzz-c")
PROGRAM = "sleep 600"
CALLBACK = "http://127.0.0.1:9/"
"""Where nobody listens."""
_NAME = re.compile("[a-z0-9]([-a-z0-9]*[a-z0-9])?")


@schemathesis.hook
def filter_failure(context: Any, failure: Any, case: Any, response: Any) -> bool:
    """Whether a failure counts: a header that nobody knows is no bad data, HTTP has it passed over."""
    return "in header - object with unexpected properties" not in str(failure.message)


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: dict[str, Any]) -> None:
    """Changes a request right before it is sent."""
    path = case.operation.path
    if path.startswith("/functions/"):
        _tame_control(case, path)
    else:
        _tame(case, path)


def _tame(case: Any, path: str) -> None:
    body = case.body
    chance = zlib.crc32(repr((path, case.path_parameters, case.query)).encode())
    if path == "/system/functions" and isinstance(body, dict):
        name = body.get("service")
        if isinstance(name, str) and _NAME.fullmatch(name) and len(name) <= 63:
            case.body = {**body, "service": NAMES[chance % 3]}
            if isinstance(body.get("envProcess"), str | None):
                case.body["envProcess"] = PROGRAM
            if isinstance(body.get("secrets"), list):
                case.body["secrets"] = []
    if path.startswith("/system/scale-function/") and isinstance(body, dict):
        replicas = body.get("replicas")
        if isinstance(replicas, int) and 2 < replicas <= 1000:
            case.body = {**body, "replicas": 2}
        if isinstance(body.get("serviceName"), str):
            case.body = {**case.body, "serviceName": ""}
    if path == "/system/functions" and isinstance(body, dict) and isinstance(body.get("functionName"), str):
        case.body = {**body, "functionName": NAMES[chance % 3]}
    if case.headers and str(case.headers.get("X-Callback-Url", "")).startswith("http"):
        case.headers["X-Callback-Url"] = CALLBACK
    if path == "/system/logs" and isinstance(case.query, dict):
        case.query.pop("follow", None)
    parameters = case.path_parameters or {}
    if "name" in parameters and chance % 2:
        known = NAMES[chance // 2 % 3] if path.startswith("/system/scale") else "echo"
        parameters["name"] = "openfaas-fn" if "/namespace/" in path else known


def _tame_control(case: Any, path: str) -> None:
    """Of the supervisor's own socket: the same three functions, programs that sleep, two replicas at most."""
    case.path_parameters["name"] = NAMES[zlib.crc32(repr((path, case.body)).encode()) % 3]
    body = case.body
    if not isinstance(body, dict):
        return
    changed = dict(body)
    if "envProcess" in changed and isinstance(changed["envProcess"], str):
        changed["envProcess"] = PROGRAM
    if "service" in changed and isinstance(changed["service"], str):
        changed["service"] = case.path_parameters["name"]
    for holder in (changed, changed.get("override")):
        if (
            isinstance(holder, dict)
            and isinstance(holder.get("replicas"), int)
            and 2 < holder["replicas"] <= 1000
        ):
            holder["replicas"] = 2
    case.body = changed
