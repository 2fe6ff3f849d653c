"""Which file system a path lies on, and whether it is another machine's.

Read by `source_home`: a bundle's home on a network file system counts as "home" (last in order, read in
long sequential reads), one on a local file system as "disk". Parsing is pure; `file_system` reads
`/proc/self/mountinfo`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

MOUNTINFO = Path("/proc/self/mountinfo")

# fmt: off
_NETWORK = frozenset({
    "9p", "afs", "beegfs", "ceph", "cifs", "coda", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs",
    "nfs", "nfs4", "ocfs2", "orangefs", "panfs", "pvfs2", "smb", "smb2", "smb3", "smbfs", "wekafs",
})
# fmt: on
_LOCAL_FUSE = frozenset({"fuse.fuse-overlayfs", "fuse.bindfs", "fuse.mergerfs", "fuseblk"})


def is_network(kind: str) -> bool:
    """Whether a file system type is another machine's.

    Unknown types over FUSE count as remote: object stores and cluster file systems come that way.
    """
    if kind in _LOCAL_FUSE:
        return False
    return kind in _NETWORK or kind == "fuse" or kind.startswith("fuse.")


def type_of(path: str, mountinfo: str) -> str:
    """File system type of a path.

    Args:
        path: absolute and free of symbolic links.
        mountinfo: as in proc(5): `id parent major:minor root mountpoint options [...] - type source super`.

    Returns:
        The type of the longest mount point that is above the path, the last mounted of equals;
        empty if there is none.
    """
    best, kind = -1, ""
    for line in mountinfo.splitlines():
        before, separator, after = line.partition(" - ")
        fields = before.split(" ")
        if not separator or len(fields) < 5:
            continue
        point = _unescaped(fields[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= best:
            best, kind = len(point), after.split(" ", 1)[0]
    return kind


def file_system(path: Path) -> str:
    """File system type of a path that may not exist yet; empty where `/proc` does not tell."""
    try:
        text = MOUNTINFO.read_text(errors="surrogateescape")
    except OSError:
        return ""
    return type_of(os.path.realpath(path), text)


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
