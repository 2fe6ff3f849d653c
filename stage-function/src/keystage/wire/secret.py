"""The deployment's secret, and every key that is derived from it.

One file (`KEYSTAGE_WIRE_KEY_FILE`, readable by its owner alone) makes processes of different nodes one
deployment. From it HKDF (RFC 5869, SHA-256) derives, each under a label of its own: the CURVE key pair
of every inbox, the CURVE key pair of every sender, the key of the tensor connections' handshake, and the
seed of their TLS certificate. Nothing else is configured and nothing is exchanged.

What that means: all holders of the file are one trust domain; each can act as any other. Who holds it
not can neither connect nor read, and learns no public key either. The secret is replaced by replacing
the file and restarting the processes.
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


def read_secret(path: Path) -> Secret:
    """Reads the secret of a deployment.

    Raises:
        WireError: the file is missing, open to others, too short or too long.
    """
    name = f"KEYSTAGE_WIRE_KEY_FILE={path}"
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            value = file.read(MAX_BYTES + 1).strip()
    except OSError as error:
        raise WireError(f"{name} cannot be read: {error.strerror}") from error
    if mode & 0o077:
        raise WireError(f"{name} has mode {mode:04o}: others may read or change it; expected 0600")
    if not MIN_BYTES <= len(value) <= MAX_BYTES:
        raise WireError(
            f"{name} holds {min(len(value), MAX_BYTES + 1)} bytes, expected {MIN_BYTES} to {MAX_BYTES}"
        )
    return Secret(value)


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
