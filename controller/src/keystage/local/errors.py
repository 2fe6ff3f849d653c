"""What can go wrong in the local world, each with its HTTP status and exit code.

Raised by every module of this part; `local.control` turns them into answers, `local.up` into
exit codes. It must not hold messages: the place that knows bound and actual value writes them.
"""

from __future__ import annotations


class LocalError(Exception):
    """Base of this part's errors.

    Attributes:
        status: HTTP status on the control socket.
        exit_code: exit code of `keystage up`.
    """

    status = 500
    exit_code = 1


class BadDeployment(LocalError):
    """A deployment (or a number that goes with it) that can never run here."""

    status = 400
    exit_code = 2


class UnknownFunction(LocalError):
    """No function of that name is deployed."""

    status = 404
    exit_code = 2


class BadSecret(BadDeployment):
    """A secret's name or value that is out of bounds, or a deployment that names one which is not there."""


class UnknownSecret(LocalError):
    """No secret of that name."""

    status = 404
    exit_code = 2


class SecretExists(LocalError):
    """A secret that was to be created exists."""

    status = 412
    exit_code = 2


class NotUpgraded(LocalError):
    """A running system cannot become that version, or a part of it did not."""

    status = 409


class NotKept(LocalError):
    """What was asked for was done, and the state folder does not take it: it is gone after a restart."""

    status = 507


class CorruptState(LocalError):
    """A file of the state folder cannot be read; names file and line."""

    exit_code = 2


class PortInUse(LocalError):
    """Somebody else listens on the gateway's port."""

    exit_code = 3


class HomeLocked(LocalError):
    """Another `keystage up` holds the state folder."""

    exit_code = 4


class NotReady(LocalError):
    """Something did not become ready within its bound."""

    status = 503
    exit_code = 5
