"""The deployment's secret, and every key that is derived from it.

One file (`KEYSTAGE_WIRE_KEY_FILE`, readable by its owner alone; mounted into a container, root's and
readable by our group) makes processes of different nodes one deployment. From it HKDF (RFC 5869, SHA-256)
derives, each under a label of its own: the CURVE key pair of every inbox, the CURVE key pair of every
sender, the key of the tensor connections' handshake, and the seed of their TLS certificate. Nothing else
is configured and nothing is exchanged.

What that means: all holders of the file are one trust domain; each can act as any other. Who holds it
not can neither connect nor read, and learns no public key either.

While the secret is being replaced the file has two lines: the first is used, both are accepted. Running
processes see a changed file by themselves (`keyring`); the three steps are in docs/security.md.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path

from keystage.wire.errors import WireError

MIN_BYTES = 32
"""As much as every derived key holds."""
MAX_BYTES = 4096
"""A key file is short; whatever is longer is some other file."""
MAX_SECRETS = 2
"""The old one and the new one."""


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Secret:
    """The bytes of the secret; never shown, not even by `repr`."""

    _value: bytes

    def derive(self, label: str) -> bytes:
        """A key of 32 bytes for one purpose (RFC 5869 with one block of output).

        Args:
            label: the purpose; different labels give independent keys.
        """
        extracted = hmac.digest(b"keystage wire 1", self._value, hashlib.sha256)
        return hmac.digest(extracted, label.encode() + b"\x01", hashlib.sha256)

    @property
    def fingerprint(self) -> str:
        """What it is called in logs and between peers: says which one is meant, nothing about it."""
        return self.derive("fingerprint").hex()[:8]


def read_secret(path: Path) -> Secret:
    """Reads the secret that is used; see `read_secrets`."""
    return read_secrets(path)[0]


def read_secrets(path: Path) -> tuple[Secret, ...]:
    """Reads the secrets of a deployment: the first is used, all are accepted.

    Raises:
        WireError: the file is missing, open to others, or a line of it is too short or too long.
    """
    name = f"KEYSTAGE_WIRE_KEY_FILE={path}"
    try:
        with path.open("rb") as file:
            facts = os.fstat(file.fileno())
            value = file.read(MAX_BYTES + 1).strip()
    except OSError as error:
        raise WireError(f"{name} cannot be read: {error.strerror}") from error
    if is_open_to_others(facts.st_mode, facts.st_uid, os.geteuid()):
        mode = stat.S_IMODE(facts.st_mode)
        raise WireError(f"{name} has mode {mode:04o}: others may read or change it; expected 0600")
    lines = [line.strip() for line in value.splitlines() if line.strip()] or [b""]
    for number, line in enumerate(lines, 1):
        if len(value) > MAX_BYTES or len(line) < MIN_BYTES:
            where = f"line {number} of {name}" if len(lines) > 1 else name
            size = MAX_BYTES + 1 if len(value) > MAX_BYTES else len(line)
            raise WireError(f"{where} holds {size} bytes, expected {MIN_BYTES} to {MAX_BYTES}")
    if len(lines) > MAX_SECRETS:
        raise WireError(
            f"{name} holds {len(lines)} secrets, one a line; expected 1, or {MAX_SECRETS} for a while"
        )
    return tuple(Secret(line) for line in dict.fromkeys(lines))


def is_open_to_others(mode: int, owner: int, reader: int) -> bool:
    """Whether a file with a secret can be read or changed by more than its owner and us.

    A secret that is mounted into a container belongs to root and is read through its group, which is the
    reader's own there: that one bit is allowed, and only to a reader who is not root.

    Args:
        mode: of the file.
        owner: user the file belongs to.
        reader: user who reads it.
    """
    allowed = stat.S_IRGRP if owner == 0 != reader else 0
    return bool(stat.S_IMODE(mode) & (stat.S_IRWXG | stat.S_IRWXO) & ~allowed)


def create_secret(path: Path) -> None:
    """Writes a new random secret with mode 0600; an existing file is left alone.

    Raises:
        OSError: the file cannot be written.
    """
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return
    with os.fdopen(fd, "w") as file:
        file.write(secrets.token_hex(32) + "\n")
