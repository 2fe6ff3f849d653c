"""Secrets: kept in the state folder, laid out for each replica that may read them.

Written over the control socket, read when a replica starts: it gets a folder with copies of just its
secrets, so that one which is replaced or removed later stays as it was for whoever runs. Values are bytes
that nobody but such a replica reads back: they must not reach a record, a log or an environment.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from keystage.local.api import MAX_SECRET_BYTES, MAX_SECRET_NAME, SUBDOMAIN
from keystage.local.errors import BadSecret, SecretExists, UnknownSecret

MOUNT_VARIABLE = "secret_mount_path"
"""The environment variable by which OpenFaaS' own programs find their secrets."""
_NAME = re.compile(SUBDOMAIN)
_TEMPORARY = ".new-"


class SecretStore:
    """All secrets of a system.

    Args:
        folder: where they are kept, mode 0700; made by the first that is put.
        replicas: folder of the replicas' copies, likewise.
    """

    def __init__(self, folder: Path, replicas: Path) -> None:
        self._folder = folder
        self._replicas = replicas

    def names(self) -> list[str]:
        """Names of all, sorted."""
        if not self._folder.is_dir():
            return []
        return sorted(file.name for file in self._folder.iterdir() if _NAME.fullmatch(file.name))

    def put(self, name: str, value: bytes, *, create: bool | None = None) -> bool:
        """Creates or replaces one, as a whole, durably.

        Args:
            name: a DNS subdomain, as Kubernetes wants it.
            value: 1 byte to `MAX_SECRET_BYTES`.
            create: True: only if there is none; False: only if there is one; None: either way.

        Returns:
            Whether it was created.

        Raises:
            BadSecret: name or size is out of bounds.
            SecretExists: it was to be created and exists.
            UnknownSecret: it was to be replaced and does not.
        """
        file = self._folder / _checked(name)
        if not 1 <= len(value) <= MAX_SECRET_BYTES:
            raise BadSecret(f"secret {name} must have 1..{MAX_SECRET_BYTES} bytes, not {len(value)}")
        exists = file.exists()
        if exists and create is True:
            raise SecretExists(f"secret {name} exists already: update it instead")
        if not exists and create is False:
            raise UnknownSecret(f"secret {name} does not exist")
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._folder.chmod(0o700)
        fd, temporary = tempfile.mkstemp(prefix=_TEMPORARY, dir=self._folder)  # made with mode 0600
        try:
            with os.fdopen(fd, "wb") as out:
                out.write(value)
                out.flush()
                os.fsync(out.fileno())
            Path(temporary).replace(file)
        except OSError:
            with contextlib.suppress(FileNotFoundError):
                Path(temporary).unlink()
            raise
        return not exists

    def delete(self, name: str) -> None:
        """Removes one; running replicas keep their copies.

        Raises:
            BadSecret: it is no name.
            UnknownSecret: there is none.
        """
        try:
            (self._folder / _checked(name)).unlink()
        except FileNotFoundError:
            raise UnknownSecret(f"secret {name} does not exist") from None

    def check(self, function: str, names: Iterable[str]) -> None:
        """Refuses secrets that are not there.

        Raises:
            BadSecret: names function and secrets.
        """
        absent = sorted(set(names) - set(self.names()))
        if absent:
            shown = ", ".join(name[:MAX_SECRET_NAME] for name in absent)
            raise BadSecret(f"function {function}: secret {shown} does not exist: create it first")

    def lay_out(self, replica: str, names: Iterable[str]) -> Path | None:
        """Copies a replica's secrets into a folder of its own.

        Returns:
            The folder; None where it has none.

        Raises:
            BadSecret: one is not there (any longer).
        """
        wanted = sorted(set(names))
        if not wanted:
            return None
        self.check(replica.rpartition("-")[0], wanted)
        folder = self._replicas / replica
        folder.mkdir(mode=0o700, parents=True)
        for name in wanted:
            value = (self._folder / name).read_bytes()
            fd = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400)
            with os.fdopen(fd, "wb") as out:
                out.write(value)
        return folder

    def clear(self, replica: str) -> None:
        """Removes what was laid out for a replica that is gone."""
        shutil.rmtree(self._replicas / replica, ignore_errors=True)

    def sweep(self) -> None:
        """Removes halves of files that a killed predecessor left."""
        if self._folder.is_dir():
            for file in self._folder.glob(_TEMPORARY + "*"):
                file.unlink(missing_ok=True)


def _checked(name: str) -> str:
    if len(name) > MAX_SECRET_NAME or not _NAME.fullmatch(name):
        raise BadSecret(
            f"secret name {name[:80]!r} must have at most {MAX_SECRET_NAME} characters and match {SUBDOMAIN}"
        )
    return name
