"""Environment of a worker (`KEYSTAGE_*`, names fixed in docs/environment.md); read here only."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict


class WorkerConfig(BaseSettings):
    """What a stage function is told.

    Attributes:
        pipeline: pipeline name.
        stages: one index (`2`) or a range (`0-3`).
        bundle: `file://` URL or path of the bundle, or its `http(s)://` home.
        router: inbox address of the router, as the router has it; several separated by commas.
        device: `cpu`, `cuda`, `cuda:N`, `emulated[:alpha=..,beta=..,load=..]`.
        dtype: `fp32`, `bf16`, `fp16`; empty takes the bundle's.
        deterministic: every position, or item, is computed alone, so that no bit of it hangs on what else is
            computed (CPUs only).
        threads: intra-op threads; 1 when workers outnumber cores, 0 leaves torch's choice.
        slots: sessions or items in flight, 0 derives it.
        kv_bytes: bytes of KV state of all hosted stages, 0: `KV_BYTES_A_STAGE` for each.
        max_batch: rows of one wave or batch.
        wave_tokens: token budget of a wave, 0 derives it (`wave_tokens_on`).
        ring_bytes: shared memory for activations; as much of a GPU's for those that stay there.
        handoff: best way between workers' GPUs that is allowed: `auto` (device memory, pinned host memory
            where that cannot be mapped), `pinned`, `pageable`.
        kv_copy: whether a session moves with its KV state within a node; False: every move is a replay.
        http: `host:port` or `fd://N`.
        replica: unique name.
        run: folder for sockets, and for what is fetched from an HTTP home.
        handler: folder of the user's code, for stream programs that are not built in; empty for none.
        events: folder for event logs, none when unset.
        internal_token_file: bearer token of who may change the threads, mode 0600.
        wire_key_file: the deployment's secret; the token is derived from it where there is no token file.
        drain_s: longest drain; at least the longest request allowed.
        lifeline_fd: see `wire.endpoints`.
    """

    model_config = SettingsConfigDict(env_prefix="KEYSTAGE_", frozen=True, extra="ignore")

    pipeline: str
    stages: str
    bundle: str
    router: str
    device: str = "cpu"
    dtype: str = ""
    deterministic: bool = False
    threads: int = Field(default=1, ge=0, le=1024)
    slots: int = Field(default=0, ge=0, le=65536)
    kv_bytes: int = Field(default=0, ge=0, le=1 << 50)
    max_batch: int = Field(default=64, ge=1, le=4096)
    wave_tokens: int = Field(default=0, ge=0, le=65536)
    ring_bytes: int = Field(default=64 * 1024 * 1024, ge=4096, le=1 << 40)
    handoff: Literal["auto", "pinned", "pageable"] = "auto"
    kv_copy: bool = True
    http: str = "127.0.0.1:0"
    replica: str
    run: Path
    handler: str = ""
    events: Path | None = None
    internal_token_file: Path | None = None
    wire_key_file: Path | None = None
    drain_s: float = Field(default=60.0, ge=0)
    lifeline_fd: int | None = None

    @property
    def kv_budget_bytes(self) -> int:
        """Bytes of KV state of all hosted stages."""
        return self.kv_bytes or KV_BYTES_A_STAGE * len(parse_stages(self.stages))

    @field_validator("stages")
    @classmethod
    def _is_range(cls, value: str) -> str:
        parse_stages(value)
        return value


KV_BYTES_A_STAGE = 512 * 1024 * 1024
"""Default per hosted stage: 32 k positions of a small model's stage, 8 k of an eighth of a 7B model."""
MOST_STAGES = 10_000
"""As many as a model may have layers; a range is written out."""
_CPU_WAVE_TOKENS = 64
"""Keeps a CPU wave of a small model under 100 ms."""
_GPU_WAVE_TOKENS = 512
"""A prompt's piece that a 7B model computes in 19 ms on an H200, at three quarters of its best rate."""


def wave_tokens_on(device: str, wanted: int) -> int:
    """Token budget of a wave: `KEYSTAGE_WAVE_TOKENS`, or what suits the device where that is 0."""
    if wanted:
        return wanted
    return _GPU_WAVE_TOKENS if device.startswith("cuda") else _CPU_WAVE_TOKENS


def parse_stages(text: str) -> tuple[int, ...]:
    """Reads `2` or `0-3`.

    Raises:
        ValueError: it is neither.
    """
    first, _, last = text.partition("-")
    try:
        low, high = int(first), int(last or first)
    except ValueError:
        raise ValueError(f"KEYSTAGE_STAGES={text[:80]!r}: expected an index or a range such as 0-3") from None
    if not 0 <= low <= high < MOST_STAGES:
        raise ValueError(f"KEYSTAGE_STAGES={text[:80]!r}: expected 0 <= first <= last < {MOST_STAGES}")
    return tuple(range(low, high + 1))
