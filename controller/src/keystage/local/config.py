"""Settings of the local world, read from the environment here and nowhere else in this part.

`local.up` reads them once and hands plain values on. Names are those of the documentation
(`KEYSTAGE_HOME`, `KEYSTAGE_DRAIN_S`, ...).
"""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from keystage.local.durations import MAX_S
from keystage.local.ledger import Bounds
from keystage.local.program import TIMEOUT_S

MAX_BASE = 24
"""Characters: with `/ks-xxxxxxxx/`, a pipeline's name of 63 and `.router` a socket's path has 107 bytes."""


class LocalSettings(BaseSettings):
    """Environment of `keystage up`.

    Attributes:
        home: state folder.
        gateway_port: TCP port of the gateway on 127.0.0.1; 0 picks a free one.
        drain_s: seconds a replica may take to finish its work after it was told to stop; a
            function's own KEYSTAGE_DRAIN_S wins.
        start_limit_s: seconds a replica may take to become ready before it is started anew; loading
            gigabytes from a slow disk takes minutes, a hang is for ever.
        timeout_s: longest that a function may take; told to functions and to the gateway.
        keysmanager_off: start every replica as a plain process, without a KeysManager.
        node: name of this node where there is only one, empty: the host's.
        shutdown_s: seconds all processes together get to end when `up` ends.
        lifeline_fd: read end of the owner's pipe, for a command that `up` started.
    """

    model_config = SettingsConfigDict(env_prefix="KEYSTAGE_", extra="forbid", frozen=True)

    home: Path = Path(".keystage")
    gateway_port: int = Field(default=8080, ge=0, le=65535)
    drain_s: float = Field(default=60.0, ge=0.0, le=MAX_S, allow_inf_nan=False)
    start_limit_s: float = Field(default=600.0, gt=0.0, le=MAX_S, allow_inf_nan=False)
    shutdown_s: float = Field(default=10.0, gt=0.0, le=MAX_S, allow_inf_nan=False)
    timeout_s: float = Field(default=TIMEOUT_S, gt=0.0, le=MAX_S, allow_inf_nan=False)
    keysmanager_off: bool = False
    node: str = ""
    lifeline_fd: int | None = None

    def bounds(self) -> Bounds:
        """Time limits in the form the ledger takes them."""
        return Bounds(drain_s=self.drain_s, start_limit_s=self.start_limit_s, timeout_s=self.timeout_s)


def inherited_environment() -> tuple[dict[str, str], dict[str, str]]:
    """Splits this process's environment into (general variables, KEYSTAGE_* variables).

    Functions get only the general part, so that a setting meant for `up` never leaks into a
    replica; gateway and controller get both.
    """
    general = {k: v for k, v in os.environ.items() if not k.startswith("KEYSTAGE_")}
    ours = {k: v for k, v in os.environ.items() if k.startswith("KEYSTAGE_")}
    return general, ours


def runtime_folder() -> Path:
    """The folder in which run folders are made: XDG_RUNTIME_DIR where it is usable, else /tmp."""
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    if base and len(base) <= MAX_BASE and os.access(base, os.W_OK | os.X_OK):
        return Path(base)
    return Path("/tmp")  # noqa: S108  (mkdtemp makes a private folder in it; paths must be short)
