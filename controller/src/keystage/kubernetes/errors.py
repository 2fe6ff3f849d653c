"""What can go wrong between Keystage and a Kubernetes API server."""

from __future__ import annotations


class ClusterError(Exception):
    """The API server refused; says what, with its own words and status."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status


class NotFound(ClusterError):
    """404: no such object."""


class Conflict(ClusterError):
    """409: it exists already, or somebody else changed or owns it."""


class Gone(ClusterError):
    """410: the version to watch from is too old; list again."""


class Forbidden(ClusterError):
    """401, 403: the service account may not; names verb and resource."""


class Invalid(ClusterError):
    """400, 422: the object can never be accepted as it is."""


class ClusterUnavailable(ClusterError):
    """No answer, 429, or 5xx: later it may work."""
