"""JSON bodies of the OpenFaaS REST API (faas-provider `types`, MIT), field names as they are there.

Used by `gateway.rest*`, and by `gateway.openapi` as schemas: what an annotation's `Meta` says of a
bound is for the document, the code that enforces it names the value too. A member that is null
counts as absent and an unknown one is ignored, as Go programs read JSON. Must not do anything but
convert.
"""
# ruff: noqa: N815  (names are fixed by the OpenFaaS API)

from __future__ import annotations

import datetime as dt
import json
import platform
from importlib import metadata
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from keystage.gateway.backend import FunctionState, LogLine
from keystage.gateway.names import LABEL, MAX_NAME, NAMESPACE
from keystage.local.api import MAX_SECRET_NAME, SUBDOMAIN, Deployment, Usage
from keystage.local.labels import MAX_REPLICAS

_BASE64 = "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
_NO_NUL = r"^[^\u0000]*$"


def _as(**schema: Any) -> Meta:
    return Meta(extra_json_schema=schema)


Name = Annotated[str, _as(pattern=f"^{LABEL}$", maxLength=MAX_NAME)]
NameOfSecret = Annotated[str, _as(pattern=f"^{SUBDOMAIN}$", maxLength=MAX_SECRET_NAME)]
Namespace = Annotated[str, _as(enum=["", NAMESPACE])] | None
Text = Annotated[str, _as(pattern=_NO_NUL)]
Texts = dict[str, str]
Time = Annotated[str, _as(format="date-time")]
Millicores = Annotated[float, Meta(description="CPU cores times 1000", extra_json_schema={"minimum": 0})]
Count = Annotated[int, _as(minimum=0)]
Environment = Annotated[dict[str, Text], _as(propertyNames={"pattern": "^[A-Za-z_][A-Za-z0-9_]*$"})]


class FunctionUsage(msgspec.Struct, frozen=True):
    """What all replicas of a function use together."""

    cpu: Millicores
    totalMemoryBytes: Count


class FunctionStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A function as `faas-cli list` and `describe` read it."""

    name: str
    image: str
    namespace: str
    replicas: Count
    availableReplicas: Count
    invocationCount: Count
    createdAt: Time
    envProcess: str = ""
    envVars: Texts = {}
    constraints: list[str] = []
    secrets: list[str] = []
    labels: Texts
    annotations: Texts
    limits: Texts | None = None
    requests: Texts | None = None
    readOnlyRootFilesystem: bool = False
    usage: FunctionUsage | None = None


class FunctionDeployment(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST and PUT /system/functions."""

    service: Name
    image: str | None = None
    namespace: Namespace = None
    envProcess: Text | None = None
    envVars: Environment | None = None
    constraints: list[str] | None = None
    secrets: list[NameOfSecret] | None = None
    labels: Texts | None = None
    annotations: Texts | None = None
    limits: Texts | None = None
    requests: Texts | None = None
    readOnlyRootFilesystem: bool | None = None

    def deployment(self) -> Deployment:
        """The same without nulls."""
        given = {name: getattr(self, name) for name in self.__struct_fields__}
        return Deployment(**{name: value for name, value in given.items() if value is not None})


class DeleteFunctionRequest(msgspec.Struct, frozen=True):
    """Body of DELETE /system/functions."""

    functionName: str
    namespace: Namespace = None


class ScaleServiceRequest(msgspec.Struct, frozen=True):
    """Body of POST /system/scale-function/{name}."""

    replicas: Annotated[int, _as(minimum=0, maximum=MAX_REPLICAS)]
    serviceName: str | None = None
    namespace: Namespace = None


class Secret(msgspec.Struct, frozen=True):
    """Body of POST and PUT /system/secrets: `value`, `rawValue` (base64), or both, as faas-cli sends them.

    `rawValue` counts where it is not empty: `value` cannot hold every byte.
    """

    name: NameOfSecret
    namespace: Namespace = None
    value: str | None = None
    rawValue: Annotated[bytes, _as(pattern=_BASE64)] | None = None

    def __repr__(self) -> str:
        return f"Secret({self.name!r}, ...)"


class SecretName(msgspec.Struct, frozen=True, omit_defaults=True):
    """A secret without its value: a row of the list, and the body of DELETE /system/secrets."""

    name: NameOfSecret
    namespace: Namespace = None


class FunctionNamespace(msgspec.Struct, frozen=True):
    """A namespace."""

    name: str
    annotations: Texts | None = None
    labels: Texts | None = None


class LogMessage(msgspec.Struct, frozen=True):
    """One line of GET /system/logs."""

    name: str
    namespace: str
    instance: str
    timestamp: Time
    text: str


class VersionInfo(msgspec.Struct, frozen=True):
    """What was built."""

    commit_message: str
    sha: str
    release: str


class ProviderInfo(msgspec.Struct, frozen=True):
    """Who runs functions."""

    provider: str
    version: VersionInfo
    orchestration: str


class GatewayInfo(msgspec.Struct, frozen=True):
    """Answer of GET /system/info."""

    provider: ProviderInfo
    version: VersionInfo
    arch: str


class Telemetry(msgspec.Struct, frozen=True):
    """Answer of GET /system/telemetry: nothing is sent anywhere."""

    enabled: bool = False


def rfc3339(at_s: float) -> str:
    """Unix seconds as RFC 3339 in UTC, to the microsecond."""
    return dt.datetime.fromtimestamp(at_s, dt.UTC).isoformat().replace("+00:00", "Z")


def log_message(name: str, line: LogLine) -> LogMessage:
    """A log line as OpenFaaS writes it."""
    return LogMessage(name, NAMESPACE, line.replica, rfc3339(line.at_s), line.text)


def function_status(state: FunctionState, invocations: int, usage: Usage | None = None) -> FunctionStatus:
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
        # OpenFaaS's own label of a function; clients written in Go read both maps unasked.
        labels={"faas_function": d.service, **d.labels},
        annotations=d.annotations,
        limits=d.limits,
        requests=d.requests,
        readOnlyRootFilesystem=d.readOnlyRootFilesystem,
        usage=None if usage is None else FunctionUsage(usage.cpu_cores * 1000, usage.memory_bytes),
    )


def _version() -> VersionInfo:
    """Release and, where it was installed from a repository, the commit."""
    try:
        package = metadata.distribution("keystage")
    except metadata.PackageNotFoundError:
        return VersionInfo("", "unknown", "0+source")
    source = json.loads(package.read_text("direct_url.json") or "{}")
    return VersionInfo("", source.get("vcs_info", {}).get("commit_id", "unknown"), package.version)


GATEWAY_INFO = GatewayInfo(
    ProviderInfo("keystage-local", _version(), "keystage"), _version(), platform.machine()
)
