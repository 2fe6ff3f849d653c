"""Environment of the device plugin (`KEYSTAGE_*`, names fixed in docs/environment.md); read here only."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from keystage.keysmanager.device_plugin_gpus import parse_emulated


class DevicePluginConfig(BaseSettings):
    """What the plugin is told. Other `KEYSTAGE_*` variables are none of its business.

    Attributes:
        device_plugins: folder of the kubelet's socket; the plugin's own sockets go there too.
        emulated_gpus: GPUs to advertise that are not there, `COUNTxGIB` by commas (`2x80`); empty: real ones.
        gpu_poll_s: seconds between two looks at the GPUs; a lost one is told after at most so long.
    """

    model_config = SettingsConfigDict(env_prefix="KEYSTAGE_", extra="ignore", frozen=True)

    device_plugins: Path = Path("/var/lib/kubelet/device-plugins")
    emulated_gpus: str = ""
    gpu_poll_s: float = Field(default=10.0, ge=0.05, le=3600)

    @field_validator("emulated_gpus")
    @classmethod
    def _is_emulated(cls, value: str) -> str:
        parse_emulated(value)
        return value
