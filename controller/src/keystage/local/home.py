"""The state folder of a running system: lock, credentials, functions, logs, run folder.

Opened first by `local.up`, closed last. Layout:

    lock                     flock held by `keystage up`, contains its process id
    run                      path of the run folder (sockets), present while it exists
    credentials/basic-auth-user, credentials/basic-auth-password    files of mode 0600
    credentials/keysmanager-token, credentials/wire-key             likewise, between nodes
    keysmanager/<node>/      state of a node's KeysManager: history, disk cache
    secrets/<name>           secrets, files of mode 0600 in a folder of mode 0700
    functions.json           deployed functions, one per line
    bundles/ logs/ decisions.jsonl

A folder that is made here has mode 0700; functions.json, logs and decisions.jsonl have 0600 in any.

Sockets lie in a short folder of their own, because a UNIX socket's path holds 107 bytes. This
module must not start processes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
from pathlib import Path

from keystage.local.errors import HomeLocked, LocalError

RUN_PREFIX = "ks-"
USER = "admin"
USER_FILE = "basic-auth-user"
PASSWORD_FILE = "basic-auth-password"  # noqa: S105  (a file name, as OpenFaaS has it)
TOKEN_FILE = "keysmanager-token"  # noqa: S105  (a file name)
WIRE_KEY_FILE = "wire-key"


class Home:
    """A state folder. `open` takes it, `close` gives it back.

    Attributes:
        path: absolute path of the folder.
        run: run folder, set while open.
    """

    def __init__(self, path: Path, runtime: Path) -> None:
        self.path = path.absolute()
        self.run = Path()
        self._runtime = runtime
        self._lock_fd = -1

    @property
    def functions(self) -> Path:
        """File of deployed functions."""
        return self.path / "functions.json"

    @property
    def logs(self) -> Path:
        """Folder of the replicas' logs."""
        return self.path / "logs"

    @property
    def bundles(self) -> Path:
        """Folder of bundles made by `keystage split`."""
        return self.path / "bundles"

    @property
    def secrets(self) -> Path:
        """Folder of the functions' secrets."""
        return self.path / "secrets"

    @property
    def replica_secrets(self) -> Path:
        """Folder of the copies that replicas read; it goes with the run folder."""
        return self.run / "secrets"

    @property
    def credentials(self) -> Path:
        """Folder with the gateway's user name and password files."""
        return self.path / "credentials"

    @property
    def keysmanager_token(self) -> Path:
        """File of the token that KeysManagers and their clients over TCP share."""
        return self.credentials / TOKEN_FILE

    @property
    def wire_key(self) -> Path:
        """File of the secret that workers and routers of different nodes share."""
        return self.credentials / WIRE_KEY_FILE

    def keysmanager_state(self, node: str) -> Path:
        """State folder of a node's KeysManager."""
        return self.path / "keysmanager" / node

    @property
    def control(self) -> Path:
        """The supervisor's UNIX socket."""
        return self.run / "up.sock"

    def open(self) -> None:
        """Locks the folder, removes what a killed predecessor left, makes what is missing.

        Raises:
            HomeLocked: another process holds it.
            LocalError: the folder cannot be made or written.
        """
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock()
            for folder in (self.logs, self.bundles):
                folder.mkdir(exist_ok=True)
            self._ensure_credentials()
            self._remove_stale_run()
            self.run = Path(tempfile.mkdtemp(prefix=RUN_PREFIX, dir=self._runtime))
            (self.path / "run").write_text(f"{self.run}\n")
        except OSError as error:
            self.close()
            raise LocalError(f"state folder {self.path} cannot be used: {error}") from error
        except LocalError:
            self.close()
            raise

    @property
    def lock_fd(self) -> int:
        """Descriptor of the lock, while open."""
        return self._lock_fd

    def resume(self, run: Path, lock_fd: int) -> None:
        """Takes a folder that this process holds already."""
        self.run = run
        self._lock_fd = lock_fd

    def close(self) -> None:
        """Removes the run folder and releases the lock."""
        if self.run != Path():
            shutil.rmtree(self.run, ignore_errors=True)
            with contextlib.suppress(FileNotFoundError):
                (self.path / "run").unlink()
            self.run = Path()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _lock(self) -> None:
        lock = self.path / "lock"
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(fd, 32).decode("ascii", "replace").strip() or "unknown"
            os.close(fd)
            raise HomeLocked(
                f"state folder {self.path} is in use by process {holder}: end it, or choose another "
                "folder with KEYSTAGE_HOME"
            ) from None
        os.ftruncate(fd, 0)
        os.write(fd, f"{os.getpid()}\n".encode())
        self._lock_fd = fd

    def _ensure_credentials(self) -> None:
        self.credentials.mkdir(mode=0o700, exist_ok=True)
        drawn = ((file, secrets.token_urlsafe(32)) for file in (PASSWORD_FILE, TOKEN_FILE, WIRE_KEY_FILE))
        for name, value in ((USER_FILE, USER), *drawn):
            file = self.credentials / name
            if file.exists() and file.read_text().strip():
                file.chmod(0o600)
                continue
            fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(fd, "w") as out:
                out.write(value)

    def _remove_stale_run(self) -> None:
        try:
            stale = Path((self.path / "run").read_text().strip())
        except FileNotFoundError:
            return
        # Only what we made ourselves is removed, whatever the file says.
        is_ours = stale.name.startswith(RUN_PREFIX) and stale.is_dir() and not stale.is_symlink()
        if is_ours and stale.stat().st_uid == os.getuid():
            shutil.rmtree(stale, ignore_errors=True)
        (self.path / "run").unlink()


def control_socket(home: Path) -> Path:
    """Path of the control socket of the system that runs on a state folder.

    Raises:
        LocalError: nothing runs there.
    """
    try:
        run = (home / "run").read_text().strip()
    except FileNotFoundError:
        raise LocalError(f"nothing runs on state folder {home}: start it with `keystage up`") from None
    return Path(run) / "up.sock"


def read_credentials(folder: Path) -> tuple[str, str]:
    """Reads (user, password) from a credentials folder.

    Raises:
        LocalError: a file is missing or empty.
    """
    values = []
    for name in (USER_FILE, PASSWORD_FILE):
        try:
            value = (folder / name).read_text().strip()
        except OSError as error:
            raise LocalError(f"credentials file {folder / name} cannot be read: {error.strerror}") from error
        if not value:
            raise LocalError(f"credentials file {folder / name} is empty")
        values.append(value)
    return values[0], values[1]
