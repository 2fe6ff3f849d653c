"""Settings of the gateway, read from the environment here and nowhere else in this part."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, SecretStr, ValidationInfo, field_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from keystage.gateway.replicas import MAX_WAITING
from keystage.kubernetes.config import ClusterSettings
from keystage.local.durations import MAX_S
from keystage.wire.redis_address import check_redis


class GatewaySettings(ClusterSettings):
    """Environment of `python -m keystage.gateway.app`.

    Attributes:
        control: the supervisor's UNIX socket; needed where the backend is `local`.
        credentials: folder with `basic-auth-user` and `basic-auth-password`.
        http: `host:port`, or `fd://N` for an inherited listening socket.
        lifeline_fd: descriptor whose end of file ends this process.
        override_s: seconds for which a person's scale request holds against the policy. Ten minutes:
            long enough to ride out an incident by hand, short enough to be forgotten safely.
        wake_s: seconds a request waits for a first ready replica; the longest cold start known is 45 s.
        max_waiting: requests that may wait for one function's first replica at once; beyond: 429.
        timeout_s: seconds that a function may take, or be silent while it answers; functions are told
            the same number, see `gateway.timeouts`.
        max_body_bytes: largest request body passed on to a function.
        most_connections: of clients at once, 0: what the limit of descriptors allows, see `wire.crowd`.
        connection_age_s: seconds after which a client's connection ends with its next answer, 0: never.
        redis: address of the Redis that keeps asynchronous calls; None: they are kept in memory.
        async_entries: asynchronous calls of one function that are held at once; beyond: 429.
        async_bytes: bytes of all of them; one function may hold as much as is free.
        async_body_bytes: largest body of an asynchronous call: every copy of it (queue, Redis' own file,
            replicas of Redis) costs, what is larger belongs into a store of objects.
        async_answer_bytes: largest answer that is passed to a callback.
        async_per_function: asynchronous calls of one function that this gateway runs at once.
        async_in_flight: those of all functions; a function that has none running may always begin one.
        async_attempts: tries of a call before it is given up.
        async_retry_s: seconds before the second try of a call or a callback; doubles up to 60, half of it is
            random.
        async_retry_codes: statuses of a function that are tried again.
        async_lease_s: seconds after which a dead gateway's calls are run by another one (Redis only).
        async_drain_s: seconds that running calls get when the gateway stops. `keystage up` gives it 5 s
            in all, of which answers to waiting clients get 3.
        leave_s: seconds after SIGTERM in which requests are still taken, each connection closed by its next
            answer, so that no client writes to one that is being closed. None: 2 on Kubernetes, where others
            are there to go to, else 0.
        stop_s: seconds that running requests get then. `keystage up` gives the gateway 5 s in all.
        callback_hosts: hosts to which answers may be posted, separated by commas; empty: any.
    """

    model_config = SettingsConfigDict(env_prefix="KEYSTAGE_", extra="forbid", frozen=True)

    control: Path | None = Field(default=None, validate_default=True)
    credentials: Path
    http: str = "127.0.0.1:8080"
    lifeline_fd: int | None = None
    override_s: float = Field(default=600.0, gt=0, le=MAX_S, allow_inf_nan=False)
    wake_s: float = Field(default=60.0, ge=0, le=MAX_S, allow_inf_nan=False)
    max_waiting: int = Field(default=MAX_WAITING, gt=0)
    timeout_s: float = Field(default=600.0, gt=0, le=MAX_S, allow_inf_nan=False)
    max_body_bytes: int = Field(default=64 << 20, gt=0)
    most_connections: int = Field(default=0, ge=0)
    connection_age_s: float = Field(default=60.0, ge=0, le=MAX_S, allow_inf_nan=False)
    redis: SecretStr | None = None
    async_entries: int = Field(default=10_000, gt=0)
    async_bytes: int = Field(default=256 << 20, gt=0)
    async_body_bytes: int = Field(default=1 << 20, gt=0)
    async_answer_bytes: int = Field(default=16 << 20, gt=0)
    async_per_function: int = Field(default=16, gt=0)
    async_in_flight: int = Field(default=128, gt=0)
    async_attempts: int = Field(default=5, gt=0)
    async_retry_s: float = Field(default=1.0, gt=0, le=MAX_S, allow_inf_nan=False)
    async_retry_codes: Annotated[frozenset[int], NoDecode] = frozenset({429, 500, 502, 503, 504})
    async_lease_s: float = Field(default=30.0, ge=0.5, le=MAX_S, allow_inf_nan=False)
    async_drain_s: float = Field(default=1.0, ge=0, le=MAX_S, allow_inf_nan=False)
    leave_s: float | None = Field(default=None, ge=0, le=MAX_S, allow_inf_nan=False)
    stop_s: float = Field(default=3.0, ge=0, le=MAX_S, allow_inf_nan=False)
    callback_hosts: Annotated[tuple[str, ...], NoDecode] = ()

    @field_validator("control")
    @classmethod
    def _has_control(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if info.data.get("backend") == "local" and value is None:
            raise ValueError("KEYSTAGE_BACKEND=local needs it")
        return value

    @field_validator("redis")
    @classmethod
    def _address(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None:
            check_redis(value.get_secret_value())
        return value

    @field_validator("async_retry_codes", "callback_hosts", mode="before")
    @classmethod
    def _list(cls, value: object) -> object:
        if isinstance(value, str):
            return [word.strip() for word in value.split(",") if word.strip()]
        return value
