"""Environment of a stage pod (`KEYSTAGE_*`, names fixed in docs/environment.md); read here only.

What the worker needs is read by `worker.config` once the pod becomes one; this is what it needs before.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict


class PodConfig(BaseSettings):
    """What a pod is told.

    Attributes:
        parked: whether it waits for an activation.
        stages: of a pod that is a worker from the start; empty while parked.
        pipeline: pipeline name.
        bundle: `file://` URL or path of the bundle, or its `http(s)://` home.
        device: see `worker.config`; so are `dtype`, `threads`, `kv_bytes`.
        http: `host:port` or `fd://N`.
        run: folder of this pod's own, for sockets and for what is fetched.
        replica: its name.
        keysmanager_pods: the KeysManager's socket for pods; None: this node has none.
        wire_key_file: the deployment's secret; the token of activations is derived from it.
    """

    model_config = SettingsConfigDict(env_prefix="KEYSTAGE_", frozen=True, extra="ignore")

    parked: bool = False
    stages: str = ""
    pipeline: str = ""
    bundle: str
    device: str = "cpu"
    dtype: str = ""
    threads: int = Field(default=1, ge=0, le=1024)
    kv_bytes: int = Field(default=512 * 1024 * 1024, gt=0)
    http: str = "0.0.0.0:8080"
    run: Path
    replica: str = "parked"
    keysmanager_pods: Path | None = None
    wire_key_file: Path | None = None

    @field_validator("keysmanager_pods", "wire_key_file", mode="before")
    @classmethod
    def _empty_is_unset(cls, value: object) -> object:
        return None if value == "" else value

    @model_validator(mode="after")
    def _is_one_or_the_other(self) -> PodConfig:
        if self.parked and self.wire_key_file is None:
            raise ValueError(
                "KEYSTAGE_PARKED needs KEYSTAGE_WIRE_KEY_FILE: nobody could prove that he may activate it"
            )
        if not self.parked and not self.stages:
            raise ValueError(
                "neither KEYSTAGE_STAGES nor KEYSTAGE_PARKED is set: a stage pod is one or the other"
            )
        return self

    @property
    def has_torch(self) -> bool:
        """Whether its device computes with torch."""
        return not self.device.startswith("emulated")
