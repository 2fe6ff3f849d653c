"""The nodes that this machine plays, and how each one's KeysManager is started.

Used by `local.world`. One node is the rule: then replicas get no node name and everything is as on one
machine. With several, each node has a daemon, a name that its replicas get (so that workers of
different nodes talk over TCP), and the other daemons as peers; nodes after the first treat the
bundle's home as a disk of another machine. This module must not start anything.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from keystage.local.errors import BadDeployment
from keystage.local.home import Home
from keystage.local.node import Node
from keystage.local.process import listening_socket
from keystage.local.program import Program, router_socket

HOST = "127.0.0.1"
MAX_NODES = 16
"""Each has a daemon and a fork server with torch in memory."""


@dataclasses.dataclass(frozen=True, slots=True)
class Site:
    """A node and what its daemon is given.

    Attributes:
        node: the node.
        face: listening socket of the daemon's TCP face.
        env: variables of the daemon, on top of those all daemons get.
    """

    node: Node
    face: socket.socket
    env: Mapping[str, str]


def nodes_of(count: int, own: str = "") -> tuple[str, ...]:
    """Names of the nodes.

    Args:
        count: how many.
        own: name of the only one, empty: the host's.

    Raises:
        BadDeployment: names the bounds and the number.
    """
    if not 1 <= count <= MAX_NODES:
        raise BadDeployment(f"nodes must be in 1..{MAX_NODES}, not {count}")
    if count == 1:
        return (own or socket.gethostname() or "node-0",)
    return tuple(f"node-{n}" for n in range(count))


def sites_of(names: Sequence[str], home: Home, faces: Sequence[socket.socket]) -> list[Site]:
    """Puts nodes together.

    Args:
        names: of the nodes.
        home: open state folder.
        faces: a listening socket for each.
    """
    addresses = [f"{host}:{port}" for host, port in (face.getsockname()[:2] for face in faces)]
    cores = len(os.sched_getaffinity(0)) / max(1, len(names))
    sites = []
    for n, (name, face, address) in enumerate(zip(names, faces, addresses, strict=True)):
        # The socket's name is short whatever the node's is: its path has 107 bytes at most.
        path = home.run / f"keysmanager-{n}.sock"
        own = {"KEYSTAGE_NODE": name, "KEYSTAGE_KEYSMANAGER": str(path)}
        peers = [f"http://{other}" for other in addresses if other != address]
        env = {
            **own,
            "KEYSTAGE_KEYSMANAGER_STATE": str(home.keysmanager_state(name)),
            "KEYSTAGE_KEYSMANAGER_TOKEN_FILE": str(home.keysmanager_token),
            "KEYSTAGE_KEYSMANAGER_PEERS": ",".join(peers),
        }
        if n:
            env["KEYSTAGE_HOME_IS_REMOTE"] = "1"
        wire = {"KEYSTAGE_WIRE_HOST": HOST, "KEYSTAGE_WIRE_KEY_FILE": str(home.wire_key)}
        node = Node(name, path, cores=cores, http=address, env={**own, **wire} if len(names) > 1 else {})
        sites.append(Site(node, face, env))
    return sites


class RouterAddresses:
    """Inbox addresses of routers that workers of other nodes reach; kept, so that a restart has the same.

    Args:
        run: folder of sockets.
        node: node of all routers; empty: there is only one, and no other way than the socket is needed.

    Attributes:
        known: addresses by pipeline.
    """

    def __init__(self, run: Path, node: str = "") -> None:
        self._run = run
        self._node = node
        self.known: dict[str, str] = {}

    def of(self, pipeline: str) -> str:
        """The address of a pipeline's router, empty where the socket alone will do."""
        if not self._node or not pipeline:
            return ""
        if pipeline not in self.known:
            from keystage.wire.opening import router_address

            with listening_socket(HOST) as free:
                host_port = f"{HOST}:{free.getsockname()[1]}"
            path = str(router_socket(self._run, pipeline))
            self.known[pipeline] = router_address(path, host_port, self._node)
        return self.known[pipeline]


def daemon_program(env: Mapping[str, str]) -> Program:
    """How a KeysManager is started: in a session of its own, by which its descendants are known."""
    return Program(
        (sys.executable, "-m", "keystage.keysmanager.app"),
        env,
        socket_variable="KEYSTAGE_KEYSMANAGER_LISTEN",
        is_session=True,
    )
