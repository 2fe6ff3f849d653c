"""One node as the supervisor sees it: replicas forked by its KeysManager, and what that tells.

Before it: `local.supervisor` wants a replica. After it: the daemon (`keysmanager.app`, kept by
`local.system`), and a `Process` around what it forked. A daemon that is absent, refuses, or does not
answer is a `NotForked` with its reason: the supervisor then starts a plain process. It must not
choose nodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from keystage.keysmanager.api import Fork, Forked, NodeStatus, StageName
from keystage.keysmanager.client import (
    KeysManagerClient,
    KeysManagerError,
    KeysManagerGone,
    KeysManagerRefused,
)
from keystage.local.adopted import reap
from keystage.local.api import NodeRecord
from keystage.local.logs import ReplicaLog
from keystage.local.process import Process, listening_socket
from keystage.local.program import Program

log = logging.getLogger(__name__)

STATUS_EVERY_S = 1.0


class NotForked(Exception):
    """The KeysManager did not start the replica; says why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Patience:
    """How long a KeysManager is waited for, in seconds.

    Attributes:
        present_s: for a daemon to listen (again): it starts within a second or two.
        answer_s: for any sign of life while it works on a request.
        fork_s: for a replica in all: loading gigabytes from a slow disk takes minutes.
        every_s: from one look for a sign of life to the next.
    """

    present_s: float = 15.0
    answer_s: float = 8.0
    fork_s: float = 300.0
    every_s: float = 2.0


class Node:
    """A node and its KeysManager.

    Args:
        name: node name.
        path: the daemon's UNIX socket.
        cores: CPU cores of the node.
        http: `host:port` of the daemon's TCP face.
        env: variables that replicas on this node get.
        patience: bounds on waiting.

    Attributes:
        name: see above.
        env: see above.
        has_forked: something, once: whoever does not need it waits little for it from then on.
        is_failing: asked before waiting for a daemon that is absent: whether it crashes again and again.
        restart: called when the daemon is there and silent for `Patience.answer_s`.
    """

    def __init__(
        self,
        name: str,
        path: Path,
        *,
        cores: float,
        http: str = "",
        env: dict[str, str] | None = None,
        patience: Patience | None = None,
    ) -> None:
        self.name = name
        self.env = env or {}
        self.has_forked = False
        self.is_failing: Callable[[], bool] = lambda: False
        self.restart: Callable[[], None] = lambda: None
        self._client = KeysManagerClient(path)
        self._cores = cores
        self._http = http
        self._patience = patience or Patience()
        self._status: NodeStatus | None = None
        self._key_stages: tuple[StageName, ...] = ()
        self._changed = asyncio.Event()

    def record(self) -> NodeRecord:
        """What is known of it."""
        return NodeRecord(
            node=self.name,
            cores=self._cores,
            keysmanager=str(self._client.path),
            status=self._status,
            http=self._http,
        )

    def keep(self, stages: Sequence[StageName]) -> None:
        """Stages to keep in memory, most important first; told to the daemon, and again when it restarts."""
        if tuple(stages) != self._key_stages:
            self._key_stages = tuple(stages)
            self._changed.set()

    async def watch(self) -> None:
        """Asks for the status again and again, and tells the key stages; ends by cancellation."""
        told: tuple[float, tuple[StageName, ...]] = (0.0, ())
        while True:
            self._changed.clear()
            wanted = (told[0], self._key_stages)
            try:
                async with asyncio.timeout(self._patience.answer_s):
                    self._status = await self._client.status()
                wanted = (self._status.started_at_s, self._key_stages)
                if wanted != told and (wanted[1] or told[1]):
                    await self._client.key_stages(wanted[1])
                    told = wanted
            except KeysManagerRefused as error:
                log.warning("KeysManager of %s refused %d key stages: %s", self.name, len(wanted[1]), error)
                told = wanted
            except KeysManagerError:
                self._status = None
            except TimeoutError:  # before OSError, whose kind it is
                log.warning(
                    "KeysManager of %s was silent for %g s: it is restarted",
                    self.name,
                    self._patience.answer_s,
                )
                self._status = None
                self.restart()
            except OSError as error:
                log.warning("KeysManager of %s cannot be asked: %s", self.name, error)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), STATUS_EVERY_S)

    async def fork(
        self, replica: str, command: Program, *, replica_log: ReplicaLog, wanted_at_s: float
    ) -> tuple[Process, Forked]:
        """Has a replica forked.

        Args:
            replica: its name.
            command: what it runs; `command.module` must be set.
            replica_log: takes its output.
            wanted_at_s: when it was wanted (`time.monotonic`).

        Raises:
            NotForked: it was not, within bounds.
        """
        request = Fork(
            replica=replica,
            module=command.module,
            env={**command.env, **self.env},
            wanted_at_s=wanted_at_s,
            sharing="private" if command.env.get("KEYSTAGE_SHARING") == "private" else "shared",
        )
        deadline_s = time.monotonic() + self._patience.present_s
        while True:
            try:
                found = await self._fork(request, replica_log)
                self.has_forked = True
                return found
            except KeysManagerRefused as error:
                raise NotForked(f"the KeysManager of {self.name} refused: {error}") from error
            except KeysManagerGone as error:
                if self.is_failing() or time.monotonic() > deadline_s:
                    raise NotForked(f"no KeysManager on {self.name}: {error}") from error
            await asyncio.sleep(0.05)

    async def _fork(self, request: Fork, replica_log: ReplicaLog) -> tuple[Process, Forked]:
        """One try with descriptors of its own: what an earlier one may have started sees its lifeline cut."""
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            server = theirs.enter_context(listening_socket())
            read_end, write_end = os.pipe()
            ours.callback(os.close, read_end)
            theirs.callback(os.close, write_end)
            lifeline, owner_end = os.pipe()
            theirs.callback(os.close, lifeline)
            ours.callback(os.close, owner_end)
            forked = await self._bounded(self._client.fork(request, lifeline, write_end, server.fileno()))
            host, port = server.getsockname()[:2]
            ours.pop_all()
        pid = forked.pid
        return Process(pid, f"{host}:{port}", replica_log, read_end, lambda: reap(pid), owner_end), forked

    async def _bounded(self, work: Coroutine[Any, Any, Forked]) -> Forked:
        """Waits for a fork while the daemon shows life, at most `fork_s`."""
        task = asyncio.ensure_future(work)
        end_s = time.monotonic() + self._patience.fork_s
        try:
            while not task.done():
                left_s = end_s - time.monotonic()
                await asyncio.wait([task], timeout=max(0.0, min(self._patience.every_s, left_s)))
                fault = await self._fault(end_s) if not task.done() else ""
                if fault and not task.done():
                    raise NotForked(fault)
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def _fault(self, end_s: float) -> str:
        """Why not to wait any longer, empty while there is none."""
        if time.monotonic() >= end_s:
            return f"the KeysManager of {self.name} forked nothing in {self._patience.fork_s:g} s"
        try:
            async with asyncio.timeout(self._patience.answer_s):
                await self._client.status()
        except TimeoutError:
            return f"the KeysManager of {self.name} was silent for {self._patience.answer_s:g} s"
        except KeysManagerError:
            return ""  # gone: the request itself hears of it
        return ""
