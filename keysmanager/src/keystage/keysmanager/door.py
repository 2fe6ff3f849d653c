"""Who may connect to a socket of the daemon, and how much of the daemon one of them may take.

Used by `server`. The node's own door is for our user and root, who are trusted. The pods' door is open to
whoever can reach the path, so it tells each peer's pod apart and bounds it: what one pod opens, leaves open
or asks without reading must not keep another, or the supervisor, from being served.
"""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Callable

from keystage.keysmanager.channel import peer
from keystage.keysmanager.pod_identity import NoPod, pod_of


class NotAdmitted(Exception):
    """A peer that may not come in; names it."""

    def __init__(self, reason: str, status: int = 403) -> None:
        super().__init__(reason)
        self.status = status


@dataclasses.dataclass(frozen=True, slots=True)
class Door:
    """Rules of one socket.

    Attributes:
        admit: tells a peer's origin (empty: the node's own user); raises `NotAdmitted`.
        mode: of the socket in the file system.
        connections: open ones at once.
        connections_of_one: of one origin.
        waiting: requests of one connection that are not answered yet; more are refused at once.
        claims: segments that one connection may hold.
        silent_s: a connection that holds and awaits nothing is closed after so long; None: never.
    """

    admit: Callable[[socket.socket], str]
    mode: int = 0o600
    connections: int = 1024
    connections_of_one: int = 1024
    waiting: int = 256
    claims: int = 4096
    silent_s: float | None = None


def is_allowed(uid: int, own_uid: int) -> bool:
    """Whether a process of user `uid` may ask as the node's own: our own user, or root."""
    return uid in (own_uid, 0)


def _own(sock: socket.socket) -> str:
    pid, uid = peer(sock)
    if not is_allowed(uid, os.geteuid()):
        raise NotAdmitted(f"process {pid} of user {uid} may not ask the KeysManager of user {os.geteuid()}")
    return ""


def _pod(sock: socket.socket) -> str:
    try:
        return pod_of(sock)
    except NoPod as error:
        raise NotAdmitted(str(error), error.http_status) from error


OWN = Door(_own)
PODS = Door(_pod, mode=0o666, connections=512, connections_of_one=8, waiting=4, claims=16, silent_s=5.0)
"""A worker needs one connection a stage; a node runs at most a few hundred pods."""
