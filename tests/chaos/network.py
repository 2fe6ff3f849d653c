"""A network of the run's own, and links in it that can be cut.

Everything of a run, the suite included, lives in one network namespace: no other process of the machine is
touched, whatever is cut. Nodes of `keystage up --nodes 2` are processes that talk over TCP on 127.0.0.1;
those of one node talk over UNIX sockets and shared memory. So every TCP connection to a worker's inbox or
tensor port is one between nodes, and a packet filter that drops a port's packets both ways, answers included,
is a cut cable: nobody is told, and TCP sends again until the link is mended or somebody gives up.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

INSIDE = "KEYSTAGE_CHAOS_NETWORK"
"""Set in the environment of the process that `enter` became."""
CHAIN = "keystage-chaos"
_LISTENS = "0A"
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1


def enter(argv: Sequence[str]) -> str:
    """Becomes the same program in a network namespace; returns only where it is in one, or cannot be.

    Returns:
        Why links cannot be cut, empty: they can.
    """
    if os.environ.get(INSIDE):
        _lo_up()
        return _filter_fault()
    unshare = shutil.which("unshare")
    if unshare is None:
        return "unshare is not installed"
    for flags in (["-n"], ["-r", "-n"]):
        if subprocess.run([unshare, *flags, "true"], capture_output=True, check=False).returncode == 0:
            os.environ[INSIDE] = "1"
            os.execv(unshare, [unshare, *flags, "--", sys.executable, *argv])
    return "network namespaces need CAP_SYS_ADMIN, or user namespaces for everybody"


def _lo_up() -> None:
    """Brings the loopback interface up: a new namespace has it down."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        asked = struct.pack("16sH14x", b"lo", 0)
        (_, flags) = struct.unpack("16sH14x", fcntl.ioctl(sock, _SIOCGIFFLAGS, asked))
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _IFF_UP))


def _filter_fault() -> str:
    """Makes the chain whose rules cut links; why not, empty: it is there."""
    path = shutil.which("iptables", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    if path is None:
        return "iptables is not installed"
    for words in (["-N", CHAIN], ["-I", "INPUT", "-i", "lo", "-p", "tcp", "-j", CHAIN]):
        done = subprocess.run([path, "-w", *words], capture_output=True, text=True, check=False)
        if done.returncode and "exists" not in done.stderr:
            return f"iptables: {done.stderr.strip()[:200]}"
    return ""


class Cut:
    """Ports whose packets are dropped just now."""

    def __init__(self) -> None:
        self._iptables = shutil.which("iptables", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin") or ""
        self._ports: set[int] = set()

    @property
    def dropped(self) -> int:
        """Packets dropped since the cut began."""
        done = subprocess.run(
            [self._iptables, "-w", "-nvxL", CHAIN], capture_output=True, text=True, check=False
        )
        rows = [line.split() for line in done.stdout.splitlines()[2:]]
        return sum(int(row[0]) for row in rows if row and row[0].isdigit())

    def widen(self, ports: Iterable[int]) -> None:
        """Drops these ports' packets as well, to and from."""
        new = sorted(set(ports) - self._ports)
        for port in new:
            for way in ("--dport", "--sport"):
                self._run("-A", CHAIN, "-p", "tcp", way, str(port), "-j", "DROP")
        self._ports |= set(new)

    def mend(self) -> None:
        """Drops nothing any more."""
        self._run("-F", CHAIN)
        self._ports.clear()

    def _run(self, *words: str) -> None:
        subprocess.run([self._iptables, "-w", *words], capture_output=True, check=True)


def listening(pid: int) -> set[int]:
    """TCP ports that a process listens on, empty: it is gone."""
    try:
        names = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()]  # noqa: PTH115  (no path)
        rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    except OSError:
        return set()
    inodes = {name[8:-1] for name in names if name.startswith("socket:[")}
    return {int(row[1].partition(":")[2], 16) for row in rows if row[3] == _LISTENS and row[9] in inodes}


def reap_with_parent() -> None:
    """The calling process gets SIGKILL when its parent ends (for the child between fork and exec)."""
    ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
