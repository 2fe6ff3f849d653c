"""Settings of the gateway, read from the environment here and nowhere else in this part."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class GatewaySettings(BaseSettings):
    """Environment of `python -m keystage.gateway.app`.

    Attributes:
        control: the supervisor's UNIX socket.
        credentials: folder with `basic-auth-user` and `basic-auth-password`.
        http: `host:port`, or `fd://N` for an inherited listening socket.
        lifeline_fd: descriptor whose end of file ends this process.
        override_s: seconds for which a person's scale request holds against the policy. Ten minutes:
            long enough to ride out an incident by hand, short enough to be forgotten safely.
        wake_s: seconds a request waits for a first ready replica; the longest cold start known is 45 s.
        upstream_s: seconds without a byte from a replica before a request is given up.
        max_body_bytes: largest request body passed on to a function.
    """

    model_config = SettingsConfigDict(env_prefix="KEYSTAGE_", extra="forbid", frozen=True)

    control: Path
    credentials: Path
    http: str = "127.0.0.1:8080"
    lifeline_fd: int | None = None
    override_s: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    wake_s: float = Field(default=60.0, ge=0, allow_inf_nan=False)
    upstream_s: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    max_body_bytes: int = Field(default=64 << 20, gt=0)
