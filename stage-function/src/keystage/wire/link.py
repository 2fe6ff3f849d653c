"""What a process needs to talk to other nodes: who it is, where it listens, and the keys.

Before it: `config` is read. After it: `mailbox` (CURVE on the tcp inbox) and the tensor connections
(`tensor_server`, `tensor_fetch`) take their keys from here, each time they need some: a secret may be
replaced while the process runs (`keyring`).
"""

from __future__ import annotations

import dataclasses
import socket
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import zmq
from zmq.utils import z85

from keystage.wire.errors import WireError
from keystage.wire.secret import Secret

if TYPE_CHECKING:
    from keystage.wire.certificate import Tls
    from keystage.wire.keyring import Keyring


@dataclasses.dataclass(frozen=True)
class Link:
    """A process's part in a deployment of several nodes.

    Attributes:
        node: token of its node (see `address.node_token`), empty when it has none.
        secret: the deployment's secret; None: it talks to its own node only.
        host: where other nodes reach it, empty: they do not.
        bind: address to listen on, empty: `host`.
        is_plain: tensors are not encrypted by us.
        keyring: secrets that may change while the process runs, in place of `secret`, which is then the
            first of them as the process began.
    """

    node: str = ""
    secret: Secret | None = None
    host: str = ""
    bind: str = ""
    is_plain: bool = False
    keyring: Keyring | None = None
    _known: tuple[Keys, ...] = dataclasses.field(default=(), init=False, repr=False, compare=False)

    @cached_property
    def listen_host(self) -> str:
        """The address to listen on, as a number: ZeroMQ binds to no names.

        Raises:
            WireError: the name is not known here.
        """
        name = self.bind or self.host
        try:
            return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
        except OSError as error:
            raise WireError(
                f"cannot listen on {name!r} (KEYSTAGE_WIRE_BIND or KEYSTAGE_WIRE_HOST): {error}"
            ) from error

    @property
    def keys(self) -> tuple[Keys, ...]:
        """Keys of every secret that is valid now: the first are used, all are accepted."""
        secrets = self.keyring.secrets if self.keyring is not None else (self.secret,)
        known = self._known
        if known and secrets == tuple(keys.secret for keys in known):
            return known
        kept = {keys.secret: keys for keys in known}
        made = tuple(kept.get(s) or Keys(s, is_plain=self.is_plain) for s in secrets if s is not None)
        object.__setattr__(self, "_known", made)
        return made

    @property
    def inbox_keys(self) -> tuple[bytes, bytes]:
        """`Keys.inbox_keys` of the secret that is used."""
        return self.keys[0].inbox_keys

    @property
    def sender_keys(self) -> tuple[bytes, bytes]:
        """`Keys.sender_keys` of the secret that is used."""
        return self.keys[0].sender_keys

    @property
    def handshake_key(self) -> bytes:
        """`Keys.handshake_key` of the secret that is used."""
        return self.keys[0].handshake_key


class Keys:
    """Keys derived from one secret.

    Args:
        secret: the secret.
        is_plain: there is no TLS.
    """

    def __init__(self, secret: Secret, *, is_plain: bool = False) -> None:
        self.secret = secret
        self._is_plain = is_plain

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Keys) and other.secret == self.secret

    def __hash__(self) -> int:
        return hash(self.secret)

    @cached_property
    def fingerprint(self) -> str:
        """See `Secret.fingerprint`."""
        return self.secret.fingerprint

    @cached_property
    def inbox_keys(self) -> tuple[bytes, bytes]:
        """CURVE (public, secret) key of every inbox of the deployment."""
        return self._curve("curve inbox")

    @cached_property
    def sender_keys(self) -> tuple[bytes, bytes]:
        """CURVE (public, secret) key of every sender; an inbox takes no other."""
        return self._curve("curve sender")

    @cached_property
    def handshake_key(self) -> bytes:
        """Key of the tensor connections' challenge and response."""
        return self.secret.derive("tensor handshake")

    @cached_property
    def tls(self) -> Tls | None:
        """TLS of the tensor connections, None where the network encrypts."""
        if self._is_plain:
            return None
        from keystage.wire.certificate import Tls  # only nodes that encrypt tensors need `cryptography`

        return Tls(self.secret)

    def _curve(self, label: str) -> tuple[bytes, bytes]:
        # Any 32 bytes are a CURVE secret key: the scalar is clamped where it is used.
        private = z85.encode(self.secret.derive(label))
        return zmq.curve_public(private), private


def node_identity(name: str = "") -> str:
    """Identity of this host, pid namespace and node name: equal ones share memory and process ids.

    Args:
        name: node name (`KEYSTAGE_NODE`), so that one machine can be several nodes; empty for one node.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    machine = f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    return f"{machine}/{name}" if name else machine
