"""Environment of the KeysManager (`KEYSTAGE_*`, names fixed in docs/environment.md); read here only."""

from __future__ import annotations

import socket
from pathlib import Path

from pydantic import Field, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from keystage.wire import bearer
from keystage.wire.bearer import Bearer
from keystage.wire.errors import WireError
from keystage.wire.secret import read_secret

MIN_MEMORY_BYTES = 1 << 20


class KeysManagerConfig(BaseSettings):
    """What the daemon is told. Other `KEYSTAGE_*` variables are none of its business and are left alone.

    Attributes:
        node: name of this node, in status and metrics.
        keysmanager: path of the UNIX socket.
        keysmanager_state: folder of history and disk cache; made if missing.
        keysmanager_listen: `host:port` or `fd://N` for controller and peers; empty: no TCP.
        keysmanager_pods: path of the socket for pods; empty: pods get nothing.
        keysmanager_token_file: bearer token of the TCP face, mode 0600; `listen` needs this or the key.
        wire_key_file: the deployment's secret; the token is derived from it where there is no token file.
        keysmanager_peers: addresses (`http://host:port`) of other nodes, by commas; they need the token too.
        keysmanager_memory: bytes the budget takes for the limit, instead of the cgroup's or the host's.
        keysmanager_cache_bytes: bytes of the local disk for copies of what came from peers and remote homes;
            0: none are kept, a disk belongs to its operator.
        standby_register_bytes: most that each standby maps and pins ahead of its use; 0: nothing.
        standbys_per_key_stage: standbys on a GPU for each key stage, while memory lasts; 0: none unasked.
        home_is_remote: whether a `file://` home is a disk of another machine, and what is read from it is
            therefore kept on the local one; unset: told by the type of its file system.
        lifeline_fd: read end of the owner's pipe; end of file ends the daemon, its holders and idle standbys.
    """

    model_config = SettingsConfigDict(env_prefix="KEYSTAGE_", extra="ignore", frozen=True)

    node: str = Field(default_factory=socket.gethostname, min_length=1, max_length=253)
    keysmanager: Path = Path(".keystage/keysmanager.sock")
    keysmanager_state: Path = Path(".keystage/keysmanager")
    keysmanager_listen: str = ""
    keysmanager_pods: Path | None = None
    keysmanager_token_file: Path | None = None
    wire_key_file: Path | None = None
    keysmanager_peers: str = ""
    keysmanager_memory: int | None = Field(default=None, ge=MIN_MEMORY_BYTES)
    keysmanager_cache_bytes: int = Field(default=0, ge=0)
    standby_register_bytes: int = Field(default=16 << 30, ge=0)
    standbys_per_key_stage: int = Field(default=1, ge=0, le=64)
    home_is_remote: bool | None = None
    lifeline_fd: int | None = None

    @field_validator(
        "home_is_remote",
        "keysmanager_memory",
        "keysmanager_pods",
        "keysmanager_token_file",
        "lifeline_fd",
        "wire_key_file",
        mode="before",
    )
    @classmethod
    def _empty_is_unset(cls, value: object) -> object:
        return None if value == "" else value

    @field_validator("keysmanager_peers")
    @classmethod
    def _peers_are_addresses(cls, value: str) -> str:
        for address in filter(None, value.split(",")):
            if not address.strip().startswith(("http://", "https://")):
                raise ValueError(f"peer {address!r}: expected http://host:port")
        return value

    @model_validator(mode="after")
    def _tcp_has_a_token(self) -> KeysManagerConfig:
        has_token = self.keysmanager_token_file is not None or self.wire_key_file is not None
        if (self.keysmanager_listen or self.keysmanager_peers) and not has_token:
            raise ValueError(
                "KEYSTAGE_KEYSMANAGER_LISTEN and _PEERS need KEYSTAGE_KEYSMANAGER_TOKEN_FILE (or "
                "KEYSTAGE_WIRE_KEY_FILE): parameters are served to nobody without a token"
            )
        return self

    @property
    def peers(self) -> tuple[str, ...]:
        """Addresses of the other nodes."""
        return tuple(a.strip().rstrip("/") for a in self.keysmanager_peers.split(",") if a.strip())

    def token(self) -> str:
        """The bearer token; empty where none is needed.

        Raises:
            ValueError: the file cannot be read, is empty, or others may read it.
        """
        if self.keysmanager_token_file is not None:
            return read_token(self.keysmanager_token_file)
        if self.wire_key_file is None or not (self.keysmanager_listen or self.keysmanager_peers):
            return ""
        return derived_token(self.wire_key_file)

    def bearer(self) -> Bearer:
        """As `token`; what is derived from the deployment's secret changes with it.

        Raises:
            ValueError: as `token`.
        """
        token = self.token()
        if self.keysmanager_token_file is not None or self.wire_key_file is None or not token:
            return bearer.bearer_of(token)
        return bearer.bearer_from(None, self.wire_key_file)


def derived_token(wire_key_file: Path) -> str:
    """The token that every process of a deployment derives from its secret.

    Raises:
        ValueError: the file is no secret.
    """
    try:
        return read_secret(wire_key_file).derive(bearer.INTERNAL).hex()
    except WireError as error:
        raise ValueError(str(error)) from error


def read_token(path: Path) -> str:
    """Reads a token file.

    Raises:
        ValueError: it cannot be read, is empty, or others than its owner may read it.
    """
    try:
        return bearer.read_token(path)
    except WireError as error:
        raise ValueError(str(error)) from error
