"""HTTP Basic credentials, compared in constant time.

Called by `gateway.rest` before every management request; invocations need none, as with OpenFaaS.
Credentials never appear in a message or a log.
"""

from __future__ import annotations

import base64
import binascii
import hmac


class Credentials:
    """The one user of the management API."""

    __slots__ = ("_expected",)

    def __init__(self, user: str, password: str) -> None:
        self._expected = f"{user}:{password}".encode()

    def __repr__(self) -> str:
        return "Credentials(...)"

    def admit(self, authorization: str | None) -> bool:
        """Whether an Authorization header carries these credentials."""
        scheme, _, encoded = (authorization or "").partition(" ")
        if scheme.lower() != "basic":
            return False
        try:
            given = base64.b64decode(encoded.strip(), validate=True)
        except (binascii.Error, ValueError):
            return False
        return hmac.compare_digest(given, self._expected)
