"""Backend over the supervisor's control socket: functions are processes on this machine.

Keeps a view of functions and replicas by a long poll (`GET /watch`), so that reads cost nothing
and a draining replica leaves the routing within milliseconds. Writes go to the socket and refresh
the view before they return. It writes functions and intents, never desired replica numbers.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

import aiohttp
import msgspec
import yarl

from keystage.gateway.backend import (
    AlreadyDeployed,
    BackendUnavailable,
    BadRequest,
    Endpoint,
    FunctionState,
    GatewayError,
    LogLine,
    UnknownFunction,
    UnknownSecret,
)
from keystage.gateway.local_report import ReportReader
from keystage.gateway.names import check_name
from keystage.local.api import Deployment, FunctionRecord, Intent, Load, Override, ReplicaRecord, Usage, View
from keystage.wire.unreadable import UNREADABLE

START_S = 10.0
RETRY_S = 0.1
REQUEST = aiohttp.ClientTimeout(total=10.0)
WATCH = aiohttp.ClientTimeout(total=40.0)
MAX_NAME_SHOWN = 1024
"""More of a secret's name is not sent: it is too long anyhow."""
_BASE = "http://supervisor"
_log = logging.getLogger(__name__)


class LocalBackend:
    """See `gateway.backend.Backend`.

    Args:
        socket: path of the supervisor's control socket.
    """

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._session: aiohttp.ClientSession | None = None
        self._version = (0, "")
        self._states: dict[str, FunctionState] = {}
        self._changed = asyncio.Event()
        self._synced_at_s = time.monotonic()
        self._task: asyncio.Task[None] | None = None
        self._reports = ReportReader(
            lambda path, within_s: self._ask("GET", path, timeout=aiohttp.ClientTimeout(total=within_s))
        )

    async def start(self) -> None:
        """Connects and gets a first view."""
        self._session = aiohttp.ClientSession(connector=aiohttp.UnixConnector(path=str(self._socket)))
        try:
            async with asyncio.timeout(START_S):
                while True:
                    try:
                        await self._refresh()
                        break
                    except BackendUnavailable as error:
                        _log.info("waiting for the supervisor: %s (%r)", error, error.__cause__)
                        await asyncio.sleep(RETRY_S)
        except TimeoutError:
            await self._session.close()
            raise BackendUnavailable(
                f"control socket {self._socket} did not answer within {START_S:g} s"
            ) from None
        self._task = asyncio.get_running_loop().create_task(self._follow())

    async def stop(self) -> None:
        """Disconnects."""
        await self._reports.stop()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._session is not None:
            await self._session.close()

    def functions(self) -> Sequence[FunctionState]:
        """All functions, by name."""
        return [self._states[name] for name in sorted(self._states)]

    def get(self, name: str) -> FunctionState:
        """One function."""
        try:
            return self._states[name]
        except KeyError:
            raise UnknownFunction(f"function {name} is not deployed") from None

    def view_age_s(self) -> float:
        """Seconds since the supervisor last said what there is, or that nothing changed."""
        return time.monotonic() - self._synced_at_s

    async def changed(self, timeout_s: float) -> None:
        """Waits until the view changes, at most `timeout_s` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    async def put(self, deployment: Deployment) -> None:
        """Creates or replaces a function."""
        check_name(deployment.service)
        await self._ask("PUT", f"/functions/{deployment.service}", msgspec.json.encode(deployment))
        await self._refresh()

    async def delete(self, name: str) -> None:
        """Drains and removes a function."""
        self.get(name)  # so that only names that are some reach a path
        await self._ask("DELETE", f"/functions/{name}")
        await self._refresh()

    async def override(self, name: str, replicas: int, expires_at_s: float) -> None:
        """Writes the override intent."""
        self.get(name)
        intent = Intent(override=Override(replicas, expires_at_s))
        await self._ask("PUT", f"/functions/{name}/intent", msgspec.json.encode(intent))
        await self._refresh()

    async def wake(self, name: str) -> None:
        """Writes the wake intent."""
        self.get(name)
        await self._ask("PUT", f"/functions/{name}/intent", msgspec.json.encode(Intent(wake=True)))

    async def logs(self, name: str, *, tail: int | None, since_s: float) -> list[LogLine]:
        """Output of a function's replicas in order of time."""
        self.get(name)
        query = f"?since={since_s:.6f}" + ("" if tail is None else f"&tail={tail}")
        body = await self._ask("GET", f"/functions/{name}/logs{query}")
        lines = []
        for row in body.decode("utf-8", "replace").split("\n")[:-1]:
            replica, at_s, text = row.split("|", 2)
            lines.append(LogLine(float(at_s), replica, text))
        return lines

    async def usage(self, name: str) -> Usage:
        """What a function's replicas use together."""
        self.get(name)
        return msgspec.json.decode(await self._ask("GET", f"/functions/{name}/usage"), type=Usage)

    async def tell_load(self, name: str, load: Load) -> None:
        """Tells this gateway's load, also for a removed function that has replicas at work."""
        check_name(name)
        await self._ask("PUT", f"/functions/{name}/load", msgspec.json.encode(load))

    async def report(self, since: tuple[str, int] | None, wait_s: float) -> bytes | None:
        """The controller's report, as the supervisor has it."""
        return await self._reports.report(since, wait_s)

    async def secrets(self) -> list[str]:
        """Names of all secrets, sorted."""
        return msgspec.json.decode(await self._ask("GET", "/secrets"), type=list[str])

    async def put_secret(self, name: str, value: bytes, *, create: bool) -> None:
        """Creates or replaces a secret."""
        condition = {"If-None-Match" if create else "If-Match": "*"}
        await self._ask(
            "PUT", _secret_path(name), io.BytesIO(value), missing=UnknownSecret, headers=condition
        )

    async def delete_secret(self, name: str) -> None:
        """Removes a secret."""
        await self._ask("DELETE", _secret_path(name), missing=UnknownSecret)

    async def _follow(self) -> None:
        failures = 0
        while True:
            try:
                # After a failure all is asked for: a supervisor that started anew counts from 1.
                await self._refresh(0 if failures else self._version[0])
            except Exception as error:  # noqa: BLE001
                # Whatever it is: were this task to end, the routing would be stale for ever and nobody told.
                if not failures:
                    _log.warning("view is stale: %r (%r)", error, error.__cause__)
                failures += 1
                await asyncio.sleep(RETRY_S)
            else:
                if failures:
                    _log.info("view is fresh again, after %d failures", failures)
                failures = 0

    async def _refresh(self, since: int = 0) -> None:
        body = await self._ask("GET", f"/watch?since={since}", timeout=WATCH)
        try:
            view = msgspec.json.decode(body, type=View)
        except UNREADABLE as error:
            raise BackendUnavailable(f"the supervisor's view cannot be read: {error}") from error
        version, incarnation = self._version
        if view.incarnation == incarnation and view.version <= version:
            self._synced_at_s = time.monotonic()
            return
        replicas: dict[str, list[ReplicaRecord]] = {}
        for replica in view.replicas:
            replicas.setdefault(replica.function, []).append(replica)
        self._states = {
            record.deployment.service: _state(record, replicas.get(record.deployment.service, []))
            for record in view.functions
        }
        self._version = (view.version, view.incarnation)
        self._synced_at_s = time.monotonic()
        self._changed.set()
        self._changed = asyncio.Event()

    async def _ask(
        self,
        method: str,
        path: str,
        body: bytes | io.BytesIO | None = None,
        timeout: aiohttp.ClientTimeout = REQUEST,  # noqa: ASYNC109  (aiohttp's own, per request)
        *,
        missing: type[GatewayError] = UnknownFunction,
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        assert self._session is not None, "start() comes first"
        try:
            async with self._session.request(
                method, yarl.URL(_BASE + path, encoded=True), data=body, timeout=timeout, headers=headers
            ) as answer:
                content = await answer.read()
        except TimeoutError as error:
            raise BackendUnavailable(f"the supervisor did not answer within {timeout.total:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise BackendUnavailable("the supervisor cannot be reached: it ends, or starts anew") from error
        if answer.status < 300:
            return content
        message = _message(content)
        if answer.status == 404:
            raise missing(message)
        if answer.status == 400:
            raise BadRequest(message)
        if answer.status == 412:
            raise AlreadyDeployed(message)
        raise BackendUnavailable(f"the supervisor answered with status {answer.status}: {message}")


def _secret_path(name: str) -> str:
    """Its path on the control socket, for whatever somebody calls a secret: the rule is the supervisor's."""
    if not name or name in (".", ".."):  # would be another path
        raise BadRequest(f"secret name {name!r} must be a DNS subdomain")
    return f"/secrets/{quote(name[:MAX_NAME_SHOWN], safe='')}"


def _message(content: bytes) -> str:
    try:
        return msgspec.json.decode(content, type=dict[str, str])["error"]
    except (KeyError, *UNREADABLE):
        return content[:200].decode("utf-8", "replace")


def _state(record: FunctionRecord, replicas: list[ReplicaRecord]) -> FunctionState:
    wanted = record.desired
    if record.override is not None and record.override.expires_at_s > time.time():
        wanted = record.override.replicas
    if wanted is None:
        wanted = sum(r.state != "draining" for r in replicas)
    return FunctionState(
        deployment=record.deployment,
        created_at_s=record.created_at_s,
        replicas=wanted,
        ready=tuple(Endpoint(r.replica, r.address) for r in replicas if r.state == "ready"),
        waking=record.wake,
        trouble=tuple(f"{r.replica}: {r.reason}" for r in replicas if r.state == "failed"),
    )
