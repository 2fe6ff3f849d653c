"""The port between the gateway and whatever runs functions.

`gateway.rest*`, `gateway.replicas` and `gateway.load` use it; `gateway.local` implements it for
processes on this machine, `gateway.kubernetes` for pods. One contract suite runs over every
implementation. This module must not know HTTP beyond the status an error stands for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from keystage.local.api import Deployment, Load, Usage

STALE_S = 60.0
"""Older than this a view is not to be trusted: three times the longest silence of a backend that is well."""


class GatewayError(Exception):
    """Base of this part's errors; `status` is the HTTP status it is answered with."""

    status = 500


class BadRequest(GatewayError):
    """A request that can never be served as it is."""

    status = 400


class UnknownFunction(GatewayError):
    """No function of that name is deployed."""

    status = 404


class UnknownSecret(GatewayError):
    """No secret of that name."""

    status = 404


class AlreadyDeployed(GatewayError):
    """A create for a function or a secret that exists."""

    status = 409


class TooLarge(GatewayError):
    """A body beyond its bound."""

    status = 413


class BackendUnavailable(GatewayError):
    """The backend cannot be reached."""

    status = 503


@dataclasses.dataclass(frozen=True, slots=True)
class Endpoint:
    """A ready replica: its name and `host:port`."""

    replica: str
    address: str


@dataclasses.dataclass(frozen=True, slots=True)
class FunctionState:
    """A function and who serves it now.

    Attributes:
        deployment: what was deployed.
        created_at_s: Unix seconds.
        replicas: replicas wanted: the override of a person where one holds, else the policy's.
        ready: replicas that take requests.
        waking: somebody already asked for a first replica.
        trouble: why replicas are failing, one line each.
    """

    deployment: Deployment
    created_at_s: float
    replicas: int
    ready: tuple[Endpoint, ...]
    waking: bool
    trouble: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class LogLine:
    """One line of a replica's output; `at_s` in Unix seconds."""

    at_s: float
    replica: str
    text: str


class Backend(Protocol):
    """What the gateway needs. Reads come from a view that the backend keeps fresh."""

    async def start(self) -> None:
        """Connects and gets a first view.

        Raises:
            BackendUnavailable: there was none in time.
        """

    async def stop(self) -> None:
        """Disconnects."""

    def functions(self) -> Sequence[FunctionState]:
        """All functions, by name."""

    def get(self, name: str) -> FunctionState:
        """One function.

        Raises:
            UnknownFunction: it is not deployed.
        """

    def view_age_s(self) -> float:
        """Seconds since the view was last known to be right."""

    async def changed(self, timeout_s: float) -> None:
        """Waits until the view changes, at most `timeout_s` seconds."""

    async def put(self, deployment: Deployment) -> None:
        """Creates or replaces a function; later reads see it.

        Raises:
            BadRequest: it can never run there.
            BackendUnavailable: the backend cannot be reached.
        """

    async def delete(self, name: str) -> None:
        """Drains and removes a function; later reads do not see it.

        Raises:
            UnknownFunction: it is not deployed.
        """

    async def override(self, name: str, replicas: int, expires_at_s: float) -> None:
        """Records that a person wants so many replicas until a time (Unix seconds).

        Raises:
            BadRequest: the number is out of bounds.
            UnknownFunction: it is not deployed.
        """

    async def wake(self, name: str) -> None:
        """Records that a request waits for a function without replicas.

        Raises:
            UnknownFunction: it is not deployed.
        """

    async def logs(self, name: str, *, tail: int | None, since_s: float) -> list[LogLine]:
        """Output of a function's replicas in order of time.

        Args:
            name: function.
            tail: newest lines at most, None for all that are kept.
            since_s: only lines later than this (Unix seconds).

        Raises:
            UnknownFunction: it is not deployed.
        """

    async def usage(self, name: str) -> Usage:
        """What a function's replicas use together.

        Raises:
            UnknownFunction: it is not deployed.
        """

    async def tell_load(self, name: str, load: Load) -> None:
        """Tells what this gateway has in hand for a function.

        The controller scales plain functions by it, and a replica that has requests is let finish them.

        Raises:
            UnknownFunction: it is not deployed, and no replica of it is left.
        """

    async def report(self, since: tuple[str, int] | None, wait_s: float) -> bytes | None:
        """What the controller reports (`observability.api.Report`), encoded as JSON.

        Args:
            since: controller and number of the report that the caller has, None: any will do.
            wait_s: seconds to wait for one other than that.

        Returns:
            None where there was none by then.

        Raises:
            BackendUnavailable: the backend cannot be reached.
        """

    async def secrets(self) -> list[str]:
        """Names of all secrets, sorted; values are never read back."""

    async def put_secret(self, name: str, value: bytes, *, create: bool) -> None:
        """Creates or replaces a secret.

        Raises:
            BadRequest: the name or size is out of bounds.
            AlreadyDeployed: create, and it exists.
            UnknownSecret: not create, and there is none.
        """

    async def delete_secret(self, name: str) -> None:
        """Removes a secret; running replicas keep what they have, later starts are refused by name.

        Raises:
            UnknownSecret: there is none.
        """
