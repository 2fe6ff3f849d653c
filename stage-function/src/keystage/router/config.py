"""Environment of a router (`KEYSTAGE_*`); read here only."""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path

import msgspec
from pydantic import Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from keystage.batching.choice import parse_batching, parse_late
from keystage.bundle.api import Pipeline
from keystage.bundle.errors import BundleError
from keystage.router.admission import AdmissionBounds
from keystage.router.api_keys import ApiKeys, keys_path
from keystage.router.batch_settings import BatchSettings
from keystage.router.idempotency import KeyBounds
from keystage.wire.redis_address import check_redis
from keystage.wire.unreadable import UNREADABLE

MOST_SPUS = 1_000_000
DEFAULT_TTFT_S = 2.0
"""What a looping pipeline that states nothing is held to; the controller's policy has the same default."""


class RouterConfig(BaseSettings):
    """What a router function is told.

    Attributes:
        pipeline: pipeline name.
        bundle: `file://` URL or path of the bundle, or its `http(s)://` home.
        run: folder for what is fetched from an HTTP home.
        router: inbox address to bind: `ipc://PATH`, `tcp://HOST:PORT`, or both (see `wire.address`).
        http: `host:port` or `fd://N`.
        replica: unique name.
        events: folder for event logs, none when unset.
        queue_items: requests that may wait.
        queue_bytes: bytes of their inputs.
        deadline_s: for requests that bring none.
        max_losses: workers a request may lose without getting any further.
        slow_factor: so many times slower than others of its stage a worker rests for a while, 0: never.
        max_body_bytes: largest request body.
        waves: waves in flight per path, 0 derives it from the path's devices.
        batching: when batches of a single-pass pipeline start: `eager`, `timeout:MS`, `deferred`,
            `partial-slo`.
        late: what becomes of requests that cannot meet their deadline: `demote` or `refuse`.
        spus: shares of a device of a stream program's modules, `NAME=UNITS,...`; docs/streams.md.
        slo: the pipeline's objective as JSON; `deadline_s` of it is the deadline that batches are planned by,
            all of it is what answers are counted by.
        idempotency_s: that an answer to a request with a key is kept, after it was last asked for.
        idempotency_bytes: of such answers in memory.
        idempotency_entries: requests with a key that are known at once.
        idempotency_grace_s: that such a request goes on without a client.
        redis: address of the Redis that keeps them beyond this process; None: they are kept in memory.
        journal_wait_s: for one answer of that Redis, then serving goes on without it.
        journal_lease_s: after which others take a silent router's requests over.
        installation: what differs there shares no key in Redis.
        api_keys: file of API keys, or `secret:NAME` for a secret of the function; empty: nobody needs a key.
        secrets: folder where the function's secrets are mounted (`secret_mount_path`).
        most_connections: connections of clients at once, 0: what the limit of descriptors allows.
        metrics: answers are counted by how long they took; off: only what the controller needs is counted.
        lifeline_fd: see `wire.endpoints`.
    """

    model_config = SettingsConfigDict(env_prefix="KEYSTAGE_", frozen=True, extra="ignore")

    pipeline: str
    bundle: str
    router: str
    http: str = "127.0.0.1:0"
    run: Path = Path(".keystage/run")
    replica: str = "router"
    events: Path | None = None
    queue_items: int = Field(default=1024, ge=1)
    queue_bytes: int = Field(default=256 * 1024 * 1024, ge=1)
    deadline_s: float = Field(default=600.0, gt=0)
    max_losses: int = Field(default=3, ge=0)
    slow_factor: float = Field(default=3.0, ge=0, allow_inf_nan=False)
    max_body_bytes: int = Field(default=64 * 1024 * 1024, ge=1)
    waves: int = Field(default=0, ge=0, le=1024)
    batching: str = "eager"
    late: str = "demote"
    slo: str = ""
    spus: str = ""
    idempotency_s: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    idempotency_bytes: int = Field(default=64 * 1024 * 1024, ge=1)
    idempotency_entries: int = Field(default=65_536, ge=1)
    idempotency_grace_s: float = Field(default=30.0, ge=0, allow_inf_nan=False)
    redis: SecretStr | None = None
    journal_wait_s: float = Field(default=0.25, gt=0, allow_inf_nan=False)
    journal_lease_s: float = Field(default=3.0, ge=0.1, allow_inf_nan=False)
    installation: str = ""
    api_keys: str = ""
    secrets: str = Field(default="/var/openfaas/secrets", validation_alias="secret_mount_path")
    most_connections: int = Field(default=0, ge=0)
    metrics: bool = True
    lifeline_fd: int | None = None

    @field_validator("redis")
    @classmethod
    def _is_redis(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None:
            check_redis(value.get_secret_value())
        return value

    @field_validator("batching")
    @classmethod
    def _is_batching(cls, value: str) -> str:
        parse_batching(value)
        return value

    @field_validator("late")
    @classmethod
    def _is_late(cls, value: str) -> str:
        parse_late(value)
        return value

    @field_validator("spus")
    @classmethod
    def _are_shares(cls, value: str) -> str:
        _spus(value)
        return value

    @field_validator("slo")
    @classmethod
    def _is_objective(cls, value: str) -> str:
        _deadline_s(value)
        return value

    def batch_settings_of(self, pipeline: Pipeline) -> BatchSettings:
        """How batches of this pipeline are made.

        Raises:
            BundleError: they are not for such a pipeline, or name modules that it has not.
        """
        found = self.batch_settings()
        if pipeline.execution == "looping":
            ttft_s, tpot_s = _of_tokens(self.slo)
            found = dataclasses.replace(found, ttft_s=ttft_s, tpot_s=tpot_s)
        if found.spus and pipeline.graph is None:
            raise BundleError(
                f"KEYSTAGE_SPUS is for stream programs; {pipeline.name} is {pipeline.execution}"
            )
        try:
            found.shares([module.name for module in pipeline.graph.modules] if pipeline.graph else [])
        except ValueError as error:
            raise BundleError(f"program {pipeline.name}: {error}") from error
        return found

    def key_bounds(self) -> KeyBounds:
        """What is kept of requests with a key."""
        return KeyBounds(
            self.idempotency_entries, self.idempotency_bytes, self.idempotency_s, self.idempotency_grace_s
        )

    def batch_settings(self) -> BatchSettings:
        """How batches are made."""
        objective_s = _deadline_s(self.slo)
        return BatchSettings(
            parse_batching(self.batching), parse_late(self.late), objective_s, _spus(self.spus)
        )

    def bounds(self, keys: ApiKeys | None = None) -> AdmissionBounds:
        """The admission bounds; tenants have the weights that their keys give."""
        found = AdmissionBounds(self.queue_items, self.queue_bytes, self.deadline_s, self.max_losses)
        return found if keys is None else dataclasses.replace(found, weight_of=keys.weight_of)

    def keys(self) -> ApiKeys | None:
        """The API keys, read; None: nobody needs one.

        Raises:
            KeysError: the file cannot be used.
        """
        path = keys_path(self.api_keys, self.secrets)
        if path is None:
            return None
        found = ApiKeys(path)
        found.load()
        return found


def _spus(text: str) -> tuple[tuple[str, int], ...]:
    """Shares by module.

    Raises:
        ValueError: a piece is not `NAME=UNITS` with 1 to 1,000,000 units, or a name comes twice.
    """
    found: dict[str, int] = {}
    for piece in filter(None, text.split(",")):
        name, is_given, units = piece.strip().partition("=")
        if not (name and is_given and units.isascii() and units.isdecimal() and len(units) <= 7):
            raise ValueError(f"every piece must be NAME=UNITS, {piece[:100]!r} is not")
        if not 1 <= int(units) <= MOST_SPUS:
            raise ValueError(f"units must be 1 to {MOST_SPUS}, {name} has {int(units)}")
        if name in found:
            raise ValueError(f"module {name!r} comes twice")
        found[name] = int(units)
    return tuple(found.items())


_SILENT = msgspec.Raw(b"null")


class _Objective(msgspec.Struct):
    deadline_s: float | None = None
    ttft_s: msgspec.Raw = _SILENT
    tpot_s: msgspec.Raw = _SILENT


def _of_tokens(slo: str) -> tuple[float | None, float | None]:
    """Bounds of TTFT and TPOT; one that cannot be believed is none here, the controller says so."""
    stated = msgspec.json.decode(slo, type=_Objective) if slo else _Objective()
    if stated.deadline_s is None and stated.ttft_s == stated.tpot_s == _SILENT:
        return DEFAULT_TTFT_S, None
    return _bound_s(stated.ttft_s), _bound_s(stated.tpot_s)


def _bound_s(given: msgspec.Raw) -> float | None:
    try:
        bound_s = msgspec.json.decode(given, type=float | None)
    except UNREADABLE:
        return None
    return bound_s if bound_s is not None and 0 < bound_s < math.inf else None


def _deadline_s(slo: str) -> float | None:
    """`deadline_s` of an objective, None where it states none.

    Raises:
        ValueError: it is no JSON object, or its deadline is no positive number of seconds.
    """
    if not slo:
        return None
    try:
        given_s = msgspec.json.decode(slo, type=_Objective).deadline_s
    except UNREADABLE as error:
        wanted = 'a JSON object such as {"deadline_s": 0.2}'
        raise ValueError(f"it must be {wanted}, not {slo[:100]!r}: {error}") from error
    if given_s is not None and not 0 < given_s < math.inf:
        raise ValueError(f"deadline_s must be more than 0 and finite, it is {given_s}")
    return given_s


def cpu_waves() -> int:
    """Waves worth having in flight over workers that share this machine's cores."""
    return max(1, len(os.sched_getaffinity(0)))
