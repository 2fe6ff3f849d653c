"""JSON bodies of the OpenFaaS REST API (faas-provider `types`, MIT), field names as they are there.

Used by `gateway.rest`. Must not do anything but convert.
"""
# ruff: noqa: N815  (names are fixed by the OpenFaaS API)

from __future__ import annotations

import datetime as dt
import math
import platform
from collections.abc import Mapping
from importlib import metadata

import msgspec

from keystage.gateway.backend import BadRequest, FunctionState, LogLine
from keystage.gateway.names import NAMESPACE


class FunctionStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A function as `faas-cli list` and `describe` read it."""

    name: str
    image: str
    namespace: str
    replicas: int = msgspec.field(default=-1)
    availableReplicas: int = msgspec.field(default=-1)
    invocationCount: int = msgspec.field(default=-1)
    createdAt: str
    envProcess: str = ""
    envVars: dict[str, str] = {}
    constraints: list[str] = []
    secrets: list[str] = []
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    limits: dict[str, str] | None = None
    requests: dict[str, str] | None = None
    readOnlyRootFilesystem: bool = False


class DeleteFunctionRequest(msgspec.Struct, frozen=True):
    """Body of DELETE /system/functions."""

    functionName: str
    namespace: str = ""


class ScaleServiceRequest(msgspec.Struct, frozen=True):
    """Body of POST /system/scale-function/{name}."""

    replicas: int
    serviceName: str = ""
    namespace: str = ""


class LogMessage(msgspec.Struct, frozen=True):
    """One line of GET /system/logs."""

    name: str
    namespace: str
    instance: str
    timestamp: str
    text: str


class LogQuery(msgspec.Struct, frozen=True):
    """Query of GET /system/logs.

    Attributes:
        name: function.
        namespace: namespace.
        instance: only this replica.
        tail: newest lines at most, None for all.
        since_s: only later lines, Unix seconds.
        follow: go on with new lines.
    """

    name: str
    namespace: str
    instance: str
    tail: int | None
    since_s: float
    follow: bool

    @staticmethod
    def parse(query: Mapping[str, str]) -> LogQuery:
        """Reads query parameters.

        Raises:
            BadRequest: names the parameter and what it held.
        """
        if not query.get("name"):
            raise BadRequest("query parameter name is missing: which function's logs?")
        tail = query.get("tail", "")
        if tail and not (tail.lstrip("-").isascii() and tail.lstrip("-").isdigit()):
            raise BadRequest(f"query parameter tail must be an integer, not {tail[:80]!r}")
        since = query.get("since", "")
        since_s = 0.0
        if since:
            try:
                since_s = dt.datetime.fromisoformat(since).timestamp()
            except (ValueError, OverflowError):
                since_s = math.nan
            if not 0 <= since_s < math.inf:
                raise BadRequest(f"query parameter since must be an RFC 3339 time, not {since[:80]!r}")
        follow = query.get("follow", "").lower()
        return LogQuery(
            name=query["name"],
            namespace=query.get("namespace", ""),
            instance=query.get("instance", ""),
            # faas-cli sends -1 for all lines.
            tail=int(tail[:9]) if tail and not tail.startswith("-") else None,
            since_s=since_s,
            follow=follow in ("1", "true"),
        )


def rfc3339(at_s: float) -> str:
    """Unix seconds as RFC 3339 in UTC, to the microsecond."""
    return dt.datetime.fromtimestamp(at_s, dt.UTC).isoformat().replace("+00:00", "Z")


def log_message(name: str, line: LogLine) -> LogMessage:
    """A log line as OpenFaaS writes it."""
    return LogMessage(name, NAMESPACE, line.replica, rfc3339(line.at_s), line.text)


def function_status(state: FunctionState, invocations: int) -> FunctionStatus:
    """A function as OpenFaaS describes it."""
    d = state.deployment
    return FunctionStatus(
        name=d.service,
        image=d.image,
        namespace=NAMESPACE,
        replicas=state.replicas,
        availableReplicas=len(state.ready),
        invocationCount=invocations,
        createdAt=rfc3339(state.created_at_s),
        envProcess=d.envProcess,
        envVars=d.envVars,
        constraints=d.constraints,
        secrets=d.secrets,
        labels=d.labels,
        annotations=d.annotations,
        limits=d.limits,
        requests=d.requests,
        readOnlyRootFilesystem=d.readOnlyRootFilesystem,
    )


def _version() -> dict[str, str]:
    try:
        release = metadata.version("keystage")
    except metadata.PackageNotFoundError:
        release = "0+source"
    return {"commit_message": "", "sha": "", "release": release}


GATEWAY_INFO: dict[str, object] = {
    "provider": {"provider": "keystage-local", "version": _version(), "orchestration": "keystage"},
    "version": _version(),
    "arch": platform.machine(),
}
