"""Sends a plan from several machines: each agent takes every n-th request, and the rows come back merged.

Comes after `parts`, before `agent` on the other machines. Monotonic clocks of machines have nothing to do
with each other, so each agent's is measured: of many questions the one that came back fastest tells the
offset to half its way there and back (Cristian's method). It is asked again after the run; what it moved
meanwhile is told. An agent whose clock is not known to `MAX_ERROR_S` makes the run none.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Sequence

import aiohttp

from keystage.loadgen.plan import Plan
from keystage.loadgen.sending import messages
from keystage.loadgen.sending.agent import PATH
from keystage.loadgen.sending.parts import Count, Manner, Parts
from keystage.loadgen.sending.processes import END_GRACE_S, READY_S, Faced, SenderError
from keystage.loadgen.sending.row import Progress
from keystage.loadgen.sending.run import Sent, lose, so_far
from keystage.loadgen.target import Target
from keystage.wire.unreadable import UNREADABLE

QUESTIONS = 50
QUESTION_S = 10.0
MAX_ERROR_S = 0.005
"""Half the fastest way there and back; beyond it lags of milliseconds could not be told."""

LEAD_S = 0.5
"""From all being ready to the start: the word must reach every machine before it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Offset:
    """An agent's clock against ours.

    Attributes:
        offset_s: agent's `time.monotonic()` minus ours.
        error_s: bound on its error: half the fastest way there and back.
    """

    offset_s: float
    error_s: float


SILENCE_S = 30.0
"""An agent that is sending tells something every `TELL_S`; after this long without a word it is lost."""


class _Link:
    """A connection to one agent."""

    def __init__(self, name: str, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.name = name
        self._socket = socket

    async def tell(self, message: messages.AgentAsked) -> None:
        await self._socket.send_bytes(messages.encoded(message))

    async def hear(self) -> messages.AgentTold:
        """The next message.

        Raises:
            SenderError: the agent refused, or the connection ended.
        """
        message = await self._socket.receive()
        if message.type != aiohttp.WSMsgType.BINARY:
            raise SenderError([f"agent {self.name}: the connection ended ({message.type.name.lower()})"])
        try:
            told: messages.AgentTold = messages.agent_told(message.data)
        except UNREADABLE as error:
            raise SenderError([f"agent {self.name}: not understood: {error}"]) from error
        if isinstance(told, messages.Refused):
            raise SenderError([f"agent {self.name}: {told.reason}"])
        return told

    async def hear_soon(self) -> messages.AgentTold:
        """The next message of an agent that is sending.

        Raises:
            SenderError: as `hear`, or it said nothing for `SILENCE_S`.
        """
        try:
            async with asyncio.timeout(SILENCE_S):
                return await self.hear()
        except TimeoutError as error:
            raise SenderError(
                [f"agent {self.name}: no word for {SILENCE_S:g} s: it, its machine or its network is lost"]
            ) from error

    async def offset(self) -> Offset:
        """Measures the agent's clock."""
        best = Offset(0.0, float("inf"))
        for _ in range(QUESTIONS):
            asked_s = time.monotonic()
            await self.tell(messages.WhatTime())
            async with asyncio.timeout(QUESTION_S):
                told = await self.hear()
            answered_s = time.monotonic()
            if isinstance(told, messages.Clock):
                error_s = (answered_s - asked_s) / 2
                best = min(best, Offset(told.at_s - asked_s - error_s, error_s), key=lambda one: one.error_s)
        return best


class FleetSender:
    """A plan in the hands of agents that are ready to send it; as `run.Sender`."""

    lead_s = LEAD_S

    def __init__(self, parts: Parts, links: Sequence[_Link], offsets: Sequence[Offset]) -> None:
        self._parts = parts
        self._links = links
        self._offsets = offsets
        self._known = bytearray(len(parts.rows))
        self._told = Faced()
        self._processes = 0

    async def send(self, start_s: float | None = None, ended: Progress | None = None) -> Sent:
        """Sends everything and returns when all requests have ended. Once only.

        Args:
            start_s: our `time.monotonic()` of the start; `lead_s` from now, if None.
            ended: called with each row when its request has ended.
        """
        start_s = time.monotonic() + LEAD_S if start_s is None else start_s
        async with asyncio.TaskGroup() as group:
            for number in range(len(self._links)):
                group.create_task(self._follow(number, start_s, ended))
        rows = self._parts.rows
        unknown = [row for row, known in zip(rows, self._known, strict=True) if not known]
        lose(unknown, self._told.faults, ended)
        return Sent(rows, self._processes, self._told)

    def broken_off(self, at_s: float, ended: Progress) -> Sent:
        """As `Sender.broken_off`."""
        return Sent(so_far(self._parts.rows, self._known, at_s, ended), self._processes, self._told)

    async def _follow(self, number: int, start_s: float, ended: Progress | None) -> None:
        link, offset = self._links[number], self._offsets[number]
        if offset.error_s > MAX_ERROR_S:
            self._told.faults.append(
                f"agent {link.name}: its clock is known to {1e3 * offset.error_s:.1f} ms only, "
                f"{1e3 * MAX_ERROR_S:g} ms are needed"
            )
        try:
            bound_s = start_s - time.monotonic() + self._parts.end_s
            await link.tell(messages.Begin(start_s + offset.offset_s, bound_s))
            async with asyncio.timeout(bound_s + 2 * END_GRACE_S):
                await self._hear(number, ended)
            after = await link.offset()
        except (SenderError, ConnectionError) as error:
            self._told.faults.append(str(error))
        except TimeoutError:
            self._told.faults.append(f"agent {link.name}: did not end in time")
        else:
            self._told.notes.append(
                f"agent {link.name}: its clock was known to {1e3 * offset.error_s:.2f} ms and moved "
                f"{1e3 * abs(after.offset_s - offset.offset_s):.2f} ms in the run"
            )

    async def _hear(self, number: int, ended: Progress | None) -> None:
        """Takes an agent's rows until it has finished."""
        link, rows, step = self._links[number], self._parts.rows, len(self._links)
        while True:
            match await link.hear_soon():
                case messages.Rows(some):
                    for told in some:
                        row = messages.fill(rows, (number + told[0] * step, *told[1:]))
                        self._known[row.index] = 1
                        if ended is not None:
                            ended(row)
                case messages.Finished(processes, cpu_s, connections, moved, faults):
                    self._processes += processes
                    self._told.cpu_s += cpu_s
                    self._told.connections += connections
                    self._told.moved += moved
                    self._told.faults += [f"agent {link.name}: {fault}" for fault in faults]
                    return
                case _:
                    pass


@contextlib.asynccontextmanager
async def _ready_soon(link: _Link) -> AsyncIterator[None]:
    """Bounds what an agent takes to become ready; one whose machine dies would else be waited for."""
    try:
        async with asyncio.timeout(READY_S):
            yield
    except TimeoutError as error:
        raise SenderError([f"agent {link.name} was not ready within {READY_S:g} s"]) from error
    except ConnectionError as error:
        raise SenderError([f"agent {link.name}: the connection ended ({error})"]) from error


@contextlib.asynccontextmanager
async def prepared_on(
    agents: Sequence[str],
    secret: str,
    plan: Plan,
    target: Target,
    *,
    processes: Count = "auto",
    manner: Manner | None = None,
) -> AsyncIterator[FleetSender]:
    """Gives a plan to agents; they stop with the context.

    Args:
        agents: their addresses, `http(s)://host:port`.
        secret: theirs.
        plan: what is sent when.
        target: how.
        processes: on each machine.
        manner: how each request is sent.

    Raises:
        ValueError: a setting out of bounds.
        RouteError: an address that cannot be sent to.
        SenderError: an agent cannot be reached, refuses, or does not come up.
    """
    parts = Parts(plan, target, manner or Manner())
    if processes != "auto":
        parts.count(processes)
    links: list[_Link] = []
    async with contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        for agent in agents:
            try:
                async with asyncio.timeout(QUESTION_S):
                    socket = await stack.enter_async_context(
                        session.ws_connect(
                            agent.rstrip("/") + PATH,
                            headers={"Authorization": f"Bearer {secret}"},
                            max_msg_size=0,
                        )
                    )
            except aiohttp.WSServerHandshakeError as error:
                why = {401: "the secret is another", 409: "a run is under way"}
                told = why.get(error.status, f"it answers {error.status}")
                raise SenderError([f"agent {agent}: {told}"]) from error
            except TimeoutError as error:
                raise SenderError([f"agent {agent} did not answer within {QUESTION_S:g} s"]) from error
            except (aiohttp.ClientError, OSError) as error:
                raise SenderError([f"agent {agent} cannot be reached: {error}"]) from error
            links.append(_Link(agent, socket))
        for number, link in enumerate(links):
            part = await asyncio.to_thread(parts.part, number, len(links))
            async with _ready_soon(link):
                await link.tell(messages.Prepare(part, None if processes == "auto" else processes))
            del part
        for link in links:
            async with _ready_soon(link):
                await link.hear()
        try:
            offsets = await asyncio.gather(*(link.offset() for link in links))
        except (TimeoutError, ConnectionError) as error:
            raise SenderError([f"an agent did not tell its clock within {QUESTION_S:g} s"]) from error
        yield FleetSender(parts, links, offsets)
