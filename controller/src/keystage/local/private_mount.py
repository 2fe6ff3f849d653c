"""Shows a program its secrets where OpenFaaS functions look for them, and nobody else anything.

Called by `local.lifeline` in the guard of a foreign program, before that starts: the guard moves into a mount
namespace of its own (as another user than root, into a user namespace too, in which it stays who it is) and
binds the replica's folder over `/var/openfaas/secrets`. That folder must exist: none is made on the host.
Where the kernel forbids it nothing changes, and the program has `secret_mount_path` alone. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

SECRETS = Path("/var/openfaas/secrets")
_CLONE_NEWNS = 0x00020000
_CLONE_NEWUSER = 0x10000000
_MS_RDONLY, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18


def show(folder: str, at: Path) -> str:
    """Binds a folder over another one for this process and those it starts, for reading only.

    Must be called while the process has one thread.

    Args:
        folder: what is to be seen.
        at: where; it must exist.

    Returns:
        Why it could not be done, empty when it was. Then nothing has changed.

    Raises:
        OSError: it could be done a moment ago, and cannot now.
    """
    if not at.is_dir():
        return f"{at} does not exist on this machine"
    fault = _tried(folder, at)
    if not fault:
        _enter(folder, at)
    return fault


def _tried(folder: str, at: Path) -> str:
    """Tries it in a child, since half of it cannot be taken back; why it failed, empty when it did not."""
    pid = os.fork()
    if pid == 0:
        number = 255
        try:
            _enter(folder, at)
            number = 0
        except OSError as error:
            number = error.errno or 255
        finally:
            os._exit(number)
    number = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return f"no mount namespace: {os.strerror(number)}" if number else ""


def _enter(folder: str, at: Path) -> None:
    uid, gid = os.getuid(), os.getgid()
    _unshare(_CLONE_NEWNS | (0 if uid == 0 else _CLONE_NEWUSER))
    if uid != 0:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    _mount("none", "/", _MS_REC | _MS_PRIVATE)  # nothing of what follows reaches the host
    _mount(folder, str(at), _MS_BIND)
    with contextlib.suppress(OSError):  # flags of the folder's file system may forbid it; they are copies
        _mount("none", str(at), _MS_BIND | _MS_REMOUNT | _MS_RDONLY)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _unshare(flags: int) -> None:
    _check(_libc().unshare(flags))


def _mount(source: str, target: str, flags: int) -> None:
    _check(_libc().mount(source.encode(), target.encode(), None, ctypes.c_ulong(flags), None))


def _check(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
