"""What a replica needs, read from the environment it will have. Pure.

Before the ledger: `daemon` turns a `Fork` into `ForkAsked` with the parameters found for these stages.
Must not read the daemon's own environment.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from keystage.bundle.api import Pipeline
from keystage.keysmanager.api import Fork, Parameters, StageName
from keystage.keysmanager.shape import shape_of
from keystage.worker.config import parse_stages

BUNDLE = "KEYSTAGE_BUNDLE"
STAGES = "KEYSTAGE_STAGES"
DEVICE_COPY = "KEYSTAGE_DEVICE_COPY"
"""`0`: parameters stay in host memory, whatever the device (the paper's switch)."""
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "": ""}


@dataclasses.dataclass(frozen=True, slots=True)
class Needs:
    """Stages a replica hosts.

    Attributes:
        names: the stages, empty for a program that hosts none.
        device: `cpu`, `cuda`, `cuda:N`, empty for a program that hosts none.
        dtype: type they are built in (`float32`, ...), empty takes the bundle's.
        register_bytes: most that a standby of theirs registers ahead, None: as the daemon is told.
    """

    names: tuple[StageName, ...] = ()
    device: str = ""
    dtype: str = ""
    register_bytes: int | None = None

    @property
    def prepare(self) -> Literal["cpu", "none"]:
        """What its holder makes ready, see `api.Hold`."""
        return "cpu" if self.device == "cpu" else "none"

    def shape(self, parameters: Parameters, pipeline: bytes) -> str:
        """Shape class of a stage, run as needed here.

        Args:
            parameters: of the stage.
            pipeline: content of its bundle's `pipeline.json`.
        """
        device = "cuda:0" if self.device == "cuda" else self.device
        described = msgspec.json.decode(pipeline, type=Pipeline)
        return shape_of(described, parameters.name.stage, device, self.dtype)


def of(env: Mapping[str, str]) -> Needs:
    """Reads a replica's environment.

    Raises:
        ValueError: a stage worker's environment is incomplete or malformed; names the variable.
    """
    stages = env.get(STAGES, "")
    device = env.get("KEYSTAGE_DEVICE", "") or "cpu"
    if not stages or device.startswith("emulated"):
        return Needs()
    bundle = env.get(BUNDLE, "")
    if not bundle:
        raise ValueError("KEYSTAGE_STAGES is set and KEYSTAGE_BUNDLE is not: a stage needs its bundle")
    dtype = env.get("KEYSTAGE_DTYPE", "")
    if dtype not in _DTYPES:
        raise ValueError(f"KEYSTAGE_DTYPE={dtype}: expected one of fp32, bf16, fp16")
    home = home_of(bundle)
    names = tuple(StageName(home, stage) for stage in parse_stages(stages))
    return Needs(names, device, _DTYPES[dtype], _bytes(env, "KEYSTAGE_STANDBY_REGISTER_BYTES"))


def can_be_standby(fork: Fork) -> bool:
    """Whether a standby could become this replica: it has an arena of its device, which others may see."""
    return fork.sharing == "shared" and fork.env.get(DEVICE_COPY) != "0"


def unreadable(env: Mapping[str, str], identities: Sequence[str], note: str) -> str:
    """Why a replica that is to get no parameters from here could not read its bundle either; empty: it can.

    Args:
        env: as it was asked for.
        identities: of its stages; a worker of several asks for each of them when it runs.
        note: why it gets none from here.
    """
    bundle = env.get(BUNDLE, "")
    if len(identities) != 1 or not is_remote(bundle):
        return ""
    return f"{note}; and a replica cannot read {bundle} itself: parameters of a home over HTTP come from here"


def _bytes(env: Mapping[str, str], name: str) -> int | None:
    value = env.get(name, "")
    if value and not value.isdecimal():
        raise ValueError(f"{name}={value}: expected a number of bytes, 0 or more")
    return int(value) if value else None


def home_of(bundle: str) -> str:
    """A bundle's address as `file://` or `http(s)://`; a plain path is one of this machine."""
    return bundle if "://" in bundle else Path(bundle).absolute().as_uri()


def is_remote(bundle: str) -> bool:
    """Whether a bundle's home is reached over HTTP."""
    return bundle.startswith(("http://", "https://"))
