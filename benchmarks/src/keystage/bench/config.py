"""What benchmarks take from the environment. Only this module of theirs reads it."""

from __future__ import annotations

from pathlib import Path

from pydantic_settings import BaseSettings, SettingsConfigDict


class BenchSettings(BaseSettings):
    """Settings of the benchmarks.

    Attributes:
        trace_folder: KEYSTAGE_TRACE_FOLDER, folder of trace files; None looks beside the checkout.
        lifeline_fd: KEYSTAGE_LIFELINE_FD, set by the local world for a policy that it keeps running
            (`bench.steered`): descriptor whose end of file ends that process.
        wrk: KEYSTAGE_WRK, program that `bench sender` sets beside; None looks on PATH.
        hey: KEYSTAGE_HEY, likewise.
        locust: KEYSTAGE_LOCUST, likewise.
    """

    model_config = SettingsConfigDict(env_prefix="KEYSTAGE_", extra="forbid", frozen=True)

    trace_folder: Path | None = None
    lifeline_fd: int | None = None
    wrk: Path | None = None
    hey: Path | None = None
    locust: Path | None = None
