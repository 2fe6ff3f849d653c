"""How a process is named on the wire: one text that holds every way to reach it. Pure.

A name is `ipc://PATH`, `tcp://HOST:PORT`, or, for a process that other nodes reach as well,
`ipc://PATH#tcp=HOST:PORT&tensors=HOST:PORT&node=TOKEN`. Messages, credit and paths treat it as opaque;
only `mailbox` (which socket) and `sources` (which way for a tensor) look inside, each for itself: the
same name means shared memory to a neighbour and TCP to everybody else. So no message needs two
addresses, and a name without `#` means what it always did.
"""

from __future__ import annotations

import dataclasses
import hashlib

from keystage.wire.errors import WireError

_KEYS = ("tcp", "tensors", "node")


@dataclasses.dataclass(frozen=True, slots=True)
class Address:
    """The parts of a name.

    Attributes:
        ipc: path of the inbox's UNIX socket, empty for none.
        tcp: `host:port` of the inbox, empty for none.
        tensors: `host:port` where this process's tensors are fetched, empty for none.
        node: token of the process's node, empty when it is not told (then: the reader's own).
    """

    ipc: str = ""
    tcp: str = ""
    tensors: str = ""
    node: str = ""

    @property
    def text(self) -> str:
        """The name as it travels."""
        if not self.ipc:
            return f"tcp://{self.tcp}"
        rest = "&".join(f"{key}={value}" for key in _KEYS if (value := getattr(self, key)))
        return f"ipc://{self.ipc}#{rest}" if rest else f"ipc://{self.ipc}"

    def is_on(self, node: str) -> bool:
        """Whether the process shares memory and process ids with the node of that token."""
        return self.node in ("", node)


def parse(text: str) -> Address:
    """Takes a name apart.

    Raises:
        WireError: it has another form.
    """
    if text.startswith("tcp://"):
        return Address(tcp=_host_port(text.removeprefix("tcp://"), text))
    path, mark, rest = text.removeprefix("ipc://").partition("#")
    if not text.startswith("ipc://") or not path:
        raise WireError(f"address {text!r}: expected ipc://PATH or tcp://HOST:PORT")
    found: dict[str, str] = {}
    for part in rest.split("&") if mark else ():
        key, _, value = part.partition("=")
        if key not in _KEYS or not value or key in found:
            raise WireError(f"address {text!r}: {part!r} is none of {', '.join(_KEYS)} with a value, once")
        found[key] = value if key == "node" else _host_port(value, text)
    return Address(path, found.get("tcp", ""), found.get("tensors", ""), found.get("node", ""))


def split_host(host_port: str) -> tuple[str, int]:
    """`host:port` as (host without brackets, port)."""
    host, _, port = host_port.rpartition(":")
    return host.strip("[]"), int(port)


def join_host(host: str, port: int) -> str:
    """(host, port) as `host:port`, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _host_port(value: str, text: str) -> str:
    host, _, port = value.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or len(port) > 5 or not 0 < int(port) < 65536:
        raise WireError(f"address {text!r}: {value!r} is no HOST:PORT")
    return value


def node_token(identity: str) -> str:
    """A node identity as it stands in addresses: short, and without the host's own numbers."""
    return hashlib.sha256(identity.encode()).hexdigest()[:16]
