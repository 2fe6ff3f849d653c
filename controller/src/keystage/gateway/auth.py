"""HTTP Basic credentials of the management API (RFC 7617).

OpenFaaS keeps them in two files, `basic-auth-user` and `basic-auth-password`; so do we. This
module must not let a credential into a message or a log.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac

CHALLENGE = 'Basic realm="Restricted", charset="UTF-8"'
"""Value of WWW-Authenticate: user and password are compared as UTF-8."""


class Credentials:
    """The one user of the management API."""

    __slots__ = ("_expected",)

    def __init__(self, user: str, password: str) -> None:
        self._expected = _digest(f"{user}:{password}".encode())

    def __repr__(self) -> str:
        return "Credentials(...)"

    def admit(self, authorization: str | None) -> bool:
        """Whether an Authorization header carries these credentials.

        Digests are compared, so that the time taken tells neither content nor length.
        """
        scheme, _, encoded = (authorization or "").partition(" ")
        if scheme.lower() != "basic":
            return False
        try:
            given = base64.b64decode(encoded.strip(), validate=True)
        except (binascii.Error, ValueError):
            return False
        return hmac.compare_digest(_digest(given), self._expected)


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()
