"""What can go wrong between us and a gateway, by name.

Raised by `openfaas.exchange` and `openfaas.client`; a message tells what was asked, the status, and the
first bytes of the answer. Credentials are never part of one.
"""

from __future__ import annotations

FIRST_BYTES = 200
"""As much of an answer as a message repeats."""


class OpenFaasError(Exception):
    """Base of this part's errors.

    Attributes:
        status: HTTP status of the answer, 0 where there was none.
    """

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class BadAddress(OpenFaasError, ValueError):
    """An address that is none of a gateway."""


class BadPassword(OpenFaasError, ValueError):
    """A password file that cannot be used."""


class Unreachable(OpenFaasError):
    """No answer, or not one of HTTP."""


class Unauthorised(OpenFaasError):
    """The credentials are missing or wrong (401, 403)."""


class NotFound(OpenFaasError):
    """There is no such function or secret (404)."""


class Refused(OpenFaasError):
    """The request can never be served as it is (any other status below 500 that is no success)."""


class Failed(OpenFaasError):
    """The gateway or its provider failed (500 and above)."""


class BadAnswer(OpenFaasError):
    """A success whose body is not what the API says."""


class Unverified(OpenFaasError):
    """A success that changed nothing: a provider may answer 200 and only log why it refused."""


def answered(asked: str, status: int, body: bytes) -> OpenFaasError:
    """The error that an answer without success stands for.

    Args:
        asked: method and address.
        status: of the answer, not 2xx.
        body: of the answer.
    """
    said = body[:FIRST_BYTES].decode(errors="replace").strip()
    text = f"{asked} answered {status}" + (f": {said}" if said else " without a body")
    if status in (401, 403):
        return Unauthorised(f"{text} (credentials are missing or wrong)", status)
    if status == 404:
        return NotFound(text, status)
    return (Failed if status >= 500 else Refused)(text, status)
