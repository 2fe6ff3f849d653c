"""Opens a process's end of the wire as its environment says; the only caller of `config`.

Before it: a worker or router starts. After it: the worker's engine owns what `open_worker` returns, the
router's node the mailbox. It must be called in the process that uses the sockets, after any fork.
"""

from __future__ import annotations

import dataclasses

from keystage.wire import link as links
from keystage.wire.address import Address, node_token
from keystage.wire.config import WireConfig
from keystage.wire.errors import WireError
from keystage.wire.keyring import Keyring
from keystage.wire.link import Link
from keystage.wire.mailbox import Mailbox
from keystage.wire.ring import Ring
from keystage.wire.sources import TensorSources
from keystage.wire.tensor_server import TensorServer


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerWire:
    """A worker's end of the wire.

    Attributes:
        mailbox: its inbox, and the outboxes.
        ring: where its tensors lie.
        sources: where it gets those of others.
        server: hands its tensors to other nodes; None when none can reach it.
    """

    mailbox: Mailbox
    ring: Ring
    sources: TensorSources
    server: TensorServer | None


def node_identity() -> str:
    """Identity of this process's node, `KEYSTAGE_NODE` included; see `link.node_identity`."""
    return links.node_identity(WireConfig().node)


def open_worker(inbox: str, ring_bytes: int, config: WireConfig | None = None) -> WorkerWire:
    """Binds a worker's inbox and, with `KEYSTAGE_WIRE_HOST`, its tcp inbox and tensor port.

    Args:
        inbox: `ipc://PATH`.
        ring_bytes: size of its ring.
        config: settings; None reads the environment.

    Raises:
        WireError: a setting cannot be used.
        zmq.ZMQError: the inbox cannot be bound.
    """
    config = config or WireConfig()
    link = _link(config)
    ring = Ring(ring_bytes, is_checked=config.wire_checksum == "on")
    server = TensorServer(ring, link) if link is not None and link.host else None
    try:
        mailbox = Mailbox(inbox, link=link, tensors=server.address if server is not None else "")
    except Exception:  # whatever it was: the port must not stay open
        if server is not None:
            server.close()
        raise
    return WorkerWire(mailbox, ring, TensorSources(link), server)


def open_router(inbox: str, config: WireConfig | None = None) -> Mailbox:
    """Binds a router's inbox, exactly where `KEYSTAGE_ROUTER` says: its workers are told the same text.

    Args:
        inbox: `ipc://PATH`, `tcp://HOST:PORT`, or `router_address` of both.
        config: settings; None reads the environment.

    Raises:
        WireError: a setting cannot be used.
        zmq.ZMQError: the inbox cannot be bound.
    """
    return Mailbox(inbox, link=_link(config or WireConfig()), is_named=True)


def router_address(path: str, host_port: str, node: str) -> str:
    """`KEYSTAGE_ROUTER` of a router that neighbours reach by ipc and other nodes by tcp.

    Args:
        path: path of the UNIX socket.
        host_port: `host:port` of the tcp inbox.
        node: `KEYSTAGE_NODE` of the router, empty when it has none.
    """
    return Address(path, host_port, "", node_token(links.node_identity(node))).text


def _link(config: WireConfig) -> Link | None:
    """Keys and node of a process; None when nothing of the kind is set."""
    if config.wire_host and config.wire_key_file is None:
        raise WireError(f"KEYSTAGE_WIRE_HOST={config.wire_host} needs KEYSTAGE_WIRE_KEY_FILE")
    if config.wire_bind and not config.wire_host and config.wire_key_file is None:
        raise WireError(f"KEYSTAGE_WIRE_BIND={config.wire_bind} needs KEYSTAGE_WIRE_KEY_FILE")
    if not config.node and config.wire_key_file is None:
        return None
    keyring = Keyring(config.wire_key_file) if config.wire_key_file is not None else None
    return Link(
        node=node_token(links.node_identity(config.node)),
        secret=keyring.secrets[0] if keyring is not None else None,
        host=config.wire_host,
        bind=config.wire_bind,
        is_plain=config.wire_plain,
        keyring=keyring,
    )
