"""Environment of a replica that concerns how parameters reach its device; read here only."""

from __future__ import annotations

from pathlib import Path

from pydantic_settings import BaseSettings, SettingsConfigDict


class DeviceConfig(BaseSettings):
    """What `device_copy` and `standby` are told.

    Attributes:
        run: the owner's run folder (0700), where replicas publish their arenas to one another.
        replica: name of this replica.
        peer_gpu: whether parameters may come from, and be offered to, other replicas' GPUs.
    """

    model_config = SettingsConfigDict(env_prefix="KEYSTAGE_", extra="ignore", frozen=True)

    run: Path | None = None
    replica: str = ""
    peer_gpu: bool = True
