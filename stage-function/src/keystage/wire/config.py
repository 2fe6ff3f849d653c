"""Environment of the wire (`KEYSTAGE_*`, names fixed in docs/environment.md); read here only.

Before it: a supervisor or a pod sets the variables, the same on every process of a deployment but for
`KEYSTAGE_NODE` and the hosts. After it: `opening` makes a mailbox and its tensor connections of them.
Without any of them a process talks over `ipc://` and shared memory, to its own node only.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class WireConfig(BaseSettings):
    """How a process is reached from other nodes.

    Attributes:
        node: node name; tells nodes on one machine apart. Rings are used between equal names only.
        wire_host: host name or address under which other nodes reach this process; empty: not at all.
        wire_bind: address to listen on; empty: `wire_host` itself.
        wire_key_file: file with the deployment's secret (mode 0600); needed to talk to other nodes.
        wire_plain: tensors cross the network unencrypted, because the network itself encrypts.
    """

    model_config = SettingsConfigDict(env_prefix="KEYSTAGE_", frozen=True, extra="ignore")

    node: str = Field(default="", max_length=253)
    wire_host: str = Field(default="", max_length=253)
    wire_bind: str = Field(default="", max_length=253)
    wire_key_file: Path | None = None
    wire_plain: bool = False
