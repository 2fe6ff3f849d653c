"""Which pod a connected process belongs to: its cgroup names the pod's UID.

Asked by `door` for every connection. The kernel tells the peer's process (SO_PEERCRED), the process its
cgroup, and the kubelet has put the UID into the cgroup's path, in one of these forms:

    /kubepods/burstable/pod<uid>/<container>                               driver cgroupfs
    /kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod<u_i_d>.slice/cri-<id>.scope    systemd
    /../../kubepods-burstable-pod<u_i_d>.slice/cri-<id>.scope              seen from a cgroup namespace

with anything before it where the kubelet has a root of its own or is itself in a container. The pod's own
processes may make cgroups below theirs, never above: so the first UID below our own kubelet's root counts.
Reading needs the host's PID namespace (`hostPID`), and no further right.
"""

from __future__ import annotations

import os
import re
import select
import socket
import struct
from pathlib import Path

from keystage.keysmanager.channel import peer

_SO_PEERPIDFD = 77
"""Linux 6.5: a descriptor of the process that connected, which no other process can inherit by its number."""
_POD = re.compile(
    r"(?:^|-)pod([0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12}|[0-9a-f]{32})(?:\.slice)?$"
)
"""A pod's cgroup. UIDs of pods that a kubelet makes from files are 32 digits without dashes."""
_ROOT = re.compile(r"(?:^|-)kubepods(?:\.slice)?$")


class NoPod(Exception):
    """The peer is no process of a pod; says what it is."""

    http_status = 403


def pod_of(sock: socket.socket) -> str:
    """UID of the pod whose process connected.

    Raises:
        NoPod: it is in none, is not visible here, or has ended.
    """
    pid, uid = peer(sock)
    if pid <= 0:
        raise NoPod("the peer's process is not visible here: the KeysManager needs the host's PID namespace")
    who = f"process {pid} of user {uid}"
    fd = _pidfd(sock, pid)
    if fd is None:
        raise NoPod(f"{who} has ended")
    try:
        text = _cgroup(pid)
        own = _cgroup(os.getpid())
        # Had it ended before the file was read, the number could be another's by now.
        watch = select.poll()
        watch.register(fd, select.POLLIN)
        if watch.poll(0):
            raise NoPod(f"{who} has ended")
    except OSError as error:
        raise NoPod(f"cgroup of {who} cannot be read: {error.strerror}") from error
    finally:
        os.close(fd)
    found = uid_in(text, own)
    if found is None:
        raise NoPod(f"{who} belongs to no pod (cgroups: {_shown(text)})")
    return found


def uid_in(cgroups: str, own: str) -> str | None:
    """The pod's UID in the content of `/proc/<pid>/cgroup`.

    Args:
        cgroups: the peer's.
        own: ours: it tells where our kubelet's root is, when that is in a container itself.

    Returns:
        The UID with dashes; None: in no pod, or hierarchies that tell of different ones.
    """
    roots = {_root(path) for path in _paths(own)} - {()}
    found = {uid for path in _paths(cgroups) if (uid := _first(path, roots)) is not None}
    return found.pop() if len(found) == 1 else None


def _first(path: tuple[str, ...], roots: set[tuple[str, ...]]) -> str | None:
    below = next((path[len(root) :] for root in roots if path[: len(root)] == root), path)
    for part in below:
        match = _POD.search(part)
        if match is not None:
            return _dashed(match.group(1))
    return None


def _root(path: tuple[str, ...]) -> tuple[str, ...]:
    """The path down to the innermost `kubepods`: that of the kubelet which started us; empty: none."""
    last = max((place for place, part in enumerate(path) if _ROOT.search(part)), default=-1)
    return path[: last + 1]


def _paths(cgroups: str) -> list[tuple[str, ...]]:
    """Paths of all hierarchies (v1: several lines, v2: one), as parts; `..` leads out of our namespace."""
    lines = (line.split(":", 2) for line in cgroups.splitlines())
    return [tuple(filter(None, fields[2].split("/"))) for fields in lines if len(fields) == 3]


def _dashed(uid: str) -> str:
    return uid.replace("_", "-")


def _shown(cgroups: str) -> str:
    return ", ".join(sorted({"/" + "/".join(path) for path in _paths(cgroups)}))[:300] or "none"


def _cgroup(pid: int) -> str:
    return Path(f"/proc/{pid}/cgroup").read_text()


def _pidfd(sock: socket.socket, pid: int) -> int | None:
    """A descriptor of the peer's process; None: it has ended."""
    try:
        (fd,) = struct.unpack("i", sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4))
    except OSError:
        pass  # an older kernel, or a process that is gone
    else:
        os.set_inheritable(fd, False)
        return int(fd)
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None
