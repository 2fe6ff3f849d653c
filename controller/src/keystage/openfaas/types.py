"""JSON bodies of the OpenFaaS REST API as a client reads them (faas-provider `types`, MIT).

Used by `openfaas.client`. Programs in Go leave out what is zero or empty and write `null` for a list or
map that is none, so every field has a default and `null` counts as absent. It must not interpret.
"""
# ruff: noqa: N815  (names are fixed by the OpenFaaS API)

from __future__ import annotations

from typing import TypeVar

import msgspec

T = TypeVar("T")


class Version(msgspec.Struct, frozen=True):
    """Release and commit of a program."""

    release: str = ""
    sha: str = ""


class ProviderInfo(msgspec.Struct, frozen=True):
    """Who runs the functions."""

    provider: str = ""
    orchestration: str = ""
    version: Version = Version()


class GatewayInfo(msgspec.Struct, frozen=True):
    """Answer of GET /system/info."""

    provider: ProviderInfo = ProviderInfo()
    version: Version = Version()
    arch: str = ""


class FunctionUsage(msgspec.Struct, frozen=True):
    """What a function's replicas use together: millicores and bytes."""

    cpu: float = 0.0
    totalMemoryBytes: float = 0.0


class FunctionStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A function as GET /system/functions and /system/function/{name} tell it."""

    name: str
    image: str = ""
    namespace: str = ""
    envProcess: str = ""
    envVars: dict[str, str] = {}
    constraints: list[str] = []
    secrets: list[str] = []
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    limits: dict[str, str] = {}
    requests: dict[str, str] = {}
    readOnlyRootFilesystem: bool = False
    invocationCount: float = 0.0
    replicas: int = 0
    availableReplicas: int = 0
    createdAt: str = ""
    usage: FunctionUsage | None = None


class Secret(msgspec.Struct, frozen=True):
    """A secret's name; its value is never read back."""

    name: str
    namespace: str = ""


class LogMessage(msgspec.Struct, frozen=True):
    """One line of GET /system/logs."""

    text: str
    name: str = ""
    namespace: str = ""
    instance: str = ""
    timestamp: str = ""


def decoded(body: bytes, kind: type[T]) -> T:
    """Reads a body, `null` members counting as absent.

    Raises:
        msgspec.DecodeError: it is not that.
    """
    try:
        return msgspec.convert(_without_null(msgspec.json.decode(body)), kind)
    except RecursionError as error:
        raise msgspec.DecodeError("nested too deeply") from error


def _without_null(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_null(member) for key, member in value.items() if member is not None}
    if isinstance(value, list):
        return [_without_null(item) for item in value if item is not None]
    return value
