"""What benchmarks take from the environment. Only this module of theirs reads it."""

from __future__ import annotations

from pathlib import Path

from pydantic_settings import BaseSettings, SettingsConfigDict


class BenchSettings(BaseSettings):
    """Settings of the benchmarks.

    Attributes:
        traces: KEYSTAGE_TRACES, folder of trace files; None looks beside the checkout.
    """

    model_config = SettingsConfigDict(env_prefix="KEYSTAGE_", extra="forbid", frozen=True)

    traces: Path | None = None
