"""Environment of the wire and of traces (`KEYSTAGE_*`, `OTEL_*`; docs/environment.md); read here only.

Before it: a supervisor or a pod sets the variables, the same on every process of a deployment but for
`KEYSTAGE_NODE` and the hosts. After it: `opening` makes a mailbox and its tensor connections of them.
Without any of them a process talks over `ipc://` and shared memory, to its own node only.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal, Self
from urllib.parse import unquote, urlsplit

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict


class WireConfig(BaseSettings):
    """How a process is reached from other nodes.

    Attributes:
        node: node name; tells nodes on one machine apart. Rings are used between equal names only.
        wire_host: host name or address under which other nodes reach this process; empty: not at all.
        wire_bind: address to listen on; empty: `wire_host` itself.
        wire_key_file: file with the deployment's secret (mode 0600); needed to talk to other nodes.
        wire_plain: tensors cross the network unencrypted, because the network itself encrypts.
        wire_checksum: whether tensors are sent with checksums; those that come with one are checked always.
    """

    model_config = SettingsConfigDict(env_prefix="KEYSTAGE_", frozen=True, extra="ignore")

    node: str = Field(default="", max_length=253)
    wire_host: str = Field(default="", max_length=253)
    wire_bind: str = Field(default="", max_length=253)
    wire_key_file: Path | None = None
    wire_plain: bool = False
    wire_checksum: Literal["off", "on"] = "off"


SAMPLERS = ("always_on", "always_off", "traceidratio")
"""Each also as `parentbased_*`."""


class TraceConfig(BaseSettings):
    """Whether requests are traced, and where to: OpenTelemetry's own variables, and one of ours.

    Traces are off unless `KEYSTAGE_TRACES=on`, or an OTLP endpoint is named; `KEYSTAGE_TRACES=off`,
    `OTEL_SDK_DISABLED=true` and `OTEL_TRACES_EXPORTER=none` each switch them off.

    Attributes:
        traces: `KEYSTAGE_TRACES`: `on`, `off`, or empty: as the others say.
        is_disabled: `OTEL_SDK_DISABLED`.
        exporter: `OTEL_TRACES_EXPORTER`: `otlp` or `none`.
        endpoint: `OTEL_EXPORTER_OTLP_ENDPOINT`: `http(s)://host:port`, `/v1/traces` is appended.
        traces_endpoint: `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`: the whole address; goes before `endpoint`.
        protocol: `OTEL_EXPORTER_OTLP_PROTOCOL`: `http/protobuf` alone.
        given_headers: `OTEL_EXPORTER_OTLP_HEADERS`: `name=value,...`, percent-encoded.
        given_traces_headers: `OTEL_EXPORTER_OTLP_TRACES_HEADERS`: go before `given_headers`.
        timeout_ms: `OTEL_EXPORTER_OTLP_TIMEOUT`: for one body, milliseconds.
        sampler: `OTEL_TRACES_SAMPLER`: who begins a trace; `parentbased_*` follow the caller's flag.
        sampler_arg: `OTEL_TRACES_SAMPLER_ARG`: the part of `*traceidratio`, 0 to 1.
        service_name: `OTEL_SERVICE_NAME`, empty: the part's own.
        given_resource: `OTEL_RESOURCE_ATTRIBUTES`: `name=value,...`, percent-encoded.
    """

    model_config = SettingsConfigDict(
        frozen=True, extra="ignore", hide_input_in_errors=True, env_ignore_empty=True
    )

    traces: Literal["", "on", "off"] = Field(default="", validation_alias="KEYSTAGE_TRACES")
    is_disabled: bool = Field(default=False, validation_alias="OTEL_SDK_DISABLED")
    exporter: str = Field(default="otlp", validation_alias="OTEL_TRACES_EXPORTER")
    endpoint: str = Field(default="", validation_alias="OTEL_EXPORTER_OTLP_ENDPOINT")
    traces_endpoint: str = Field(default="", validation_alias="OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    protocol: str = Field(default="http/protobuf", validation_alias="OTEL_EXPORTER_OTLP_PROTOCOL")
    given_headers: str = Field(default="", validation_alias="OTEL_EXPORTER_OTLP_HEADERS")
    given_traces_headers: str = Field(default="", validation_alias="OTEL_EXPORTER_OTLP_TRACES_HEADERS")
    timeout_ms: float = Field(default=10_000, gt=0, validation_alias="OTEL_EXPORTER_OTLP_TIMEOUT")
    sampler: str = Field(default="parentbased_always_on", validation_alias="OTEL_TRACES_SAMPLER")
    sampler_arg: str = Field(default="", validation_alias="OTEL_TRACES_SAMPLER_ARG")
    service_name: str = Field(default="", validation_alias="OTEL_SERVICE_NAME")
    given_resource: str = Field(default="", validation_alias="OTEL_RESOURCE_ATTRIBUTES")

    @model_validator(mode="after")
    def _can_be_done(self) -> Self:
        if not self.is_on:  # others' variables are none of our business then
            return self
        if self.exporter != "otlp":
            raise ValueError(f"OTEL_TRACES_EXPORTER: otlp or none can be served, not {self.exporter!r}")
        if self.protocol != "http/protobuf":
            raise ValueError(
                f"OTEL_EXPORTER_OTLP_PROTOCOL: http/protobuf can be served (port 4318), not {self.protocol!r}"
            )
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
            raise ValueError(
                f"OTEL_EXPORTER_OTLP_ENDPOINT must be http(s)://host:port, not {parts.scheme}://{parts.hostname}"
            )
        if self.sampler.removeprefix("parentbased_") not in SAMPLERS:
            known = ", ".join(SAMPLERS)
            raise ValueError(
                f"OTEL_TRACES_SAMPLER: {known} (or parentbased_ before it) are served, not {self.sampler!r}"
            )
        if not 0 <= self.ratio <= 1:
            raise ValueError(f"OTEL_TRACES_SAMPLER_ARG must be 0 to 1, not {self.sampler_arg!r}")
        return self

    @property
    def is_on(self) -> bool:
        """Whether requests are traced."""
        if self.traces == "off" or self.is_disabled or self.exporter == "none":
            return False
        return self.traces == "on" or bool(self.endpoint or self.traces_endpoint)

    @property
    def url(self) -> str:
        """Where bodies are posted."""
        base = self.endpoint or "http://127.0.0.1:4318"
        return self.traces_endpoint or f"{base.rstrip('/')}/v1/traces"

    @property
    def ratio(self) -> float:
        """The part of the traces begun here that is kept; not a number where the setting is none."""
        try:
            return float(self.sampler_arg) if self.sampler_arg else 1.0
        except ValueError:
            return math.nan

    @property
    def timeout_s(self) -> float:
        """For one body."""
        return self.timeout_ms / 1e3

    @property
    def headers(self) -> dict[str, str]:
        """Sent along with every body."""
        return {**_pairs(self.given_headers), **_pairs(self.given_traces_headers)}

    @property
    def resource(self) -> dict[str, str]:
        """Said of the process."""
        return _pairs(self.given_resource)


def _pairs(text: str) -> dict[str, str]:
    """`name=value,...` as OpenTelemetry's variables have it; what has no `=` is left out."""
    found = (piece.partition("=") for piece in text.split(","))
    return {
        unquote(name.strip()): unquote(value.strip()) for name, sign, value in found if sign and name.strip()
    }
