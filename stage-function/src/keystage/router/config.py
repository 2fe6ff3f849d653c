"""Environment of a router (`KEYSTAGE_*`); read here only."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from keystage.router.admission import AdmissionBounds


class RouterConfig(BaseSettings):
    """What a router function is told.

    Attributes:
        pipeline: pipeline name.
        bundle: `file://` URL or path of the bundle.
        router: inbox address to bind: `ipc://PATH`, `tcp://HOST:PORT`, or both (see `wire.address`).
        http: `host:port` or `fd://N`.
        replica: unique name.
        events: folder for event logs, none when unset.
        queue_items: requests that may wait.
        queue_bytes: bytes of their inputs.
        deadline_s: for requests that bring none.
        max_losses: workers a request may lose.
        max_body_bytes: largest request body.
        waves: waves in flight per path, 0 derives it from the path's devices.
        lifeline_fd: see `wire.endpoints`.
    """

    model_config = SettingsConfigDict(env_prefix="KEYSTAGE_", frozen=True, extra="ignore")

    pipeline: str
    bundle: str
    router: str
    http: str = "127.0.0.1:0"
    replica: str = "router"
    events: Path | None = None
    queue_items: int = Field(default=1024, ge=1)
    queue_bytes: int = Field(default=256 * 1024 * 1024, ge=1)
    deadline_s: float = Field(default=600.0, gt=0)
    max_losses: int = Field(default=3, ge=0)
    max_body_bytes: int = Field(default=64 * 1024 * 1024, ge=1)
    waves: int = Field(default=0, ge=0, le=1024)
    lifeline_fd: int | None = None

    def bounds(self) -> AdmissionBounds:
        """The admission bounds."""
        return AdmissionBounds(self.queue_items, self.queue_bytes, self.deadline_s, self.max_losses)


def cpu_waves() -> int:
    """Waves worth having in flight over workers that share this machine's cores."""
    return max(1, len(os.sched_getaffinity(0)))
