"""The sending processes as seen by who wants something sent: started, given their parts, heard, ended.

Comes after `run`, before `worker`. A process that dies, or does not end, is a fault in words; what the
others tell is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence

from keystage.loadgen.sending import messages
from keystage.loadgen.sending.row import Progress, Row

READY_S = 120.0
"""For a process to start and take its part in; hundreds of MiB of bodies on a busy machine included."""

END_GRACE_S = 30.0
"""After the last request has ended or timed out."""

_SAID_BYTES = 400


@dataclasses.dataclass(slots=True)
class Faced:
    """What the processes told beside rows.

    Attributes:
        cpu_s: processor time of all from start to end of the run.
        connections: connections made.
        moved: requests moved to another connection, uncounted, because no byte of them was processed.
        faults: what went wrong with the processes themselves, in words.
        notes: what else the reader of a report must know of them.
    """

    cpu_s: float = 0.0
    connections: int = 0
    moved: int = 0
    faults: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)


class SenderError(Exception):
    """Sending processes failed: the run is none.

    Attributes:
        faults: what happened, one entry a process.
        rows: every request; those whose end is unknown have the error class `generator`.
    """

    def __init__(self, faults: Sequence[str], rows: Sequence[Row] = ()) -> None:
        super().__init__("; ".join(faults))
        self.faults = list(faults)
        self.rows = list(rows)


class Processes:
    """Sending processes, one a part.

    Args:
        parts: makes what each is to send, one after another, so that memory holds one part at a time.
        rows: of the whole plan, filled in as they end.
    """

    def __init__(self, parts: Sequence[Callable[[], messages.Part]], rows: Sequence[Row]) -> None:
        self._parts = parts
        self._rows = rows
        self._known = bytearray(len(rows))
        self._ended: Progress | None = None
        self._processes: list[asyncio.subprocess.Process] = []
        self._said: list[int] = []
        self._told = Faced()

    @property
    def known(self) -> Sequence[int]:
        """For each request of the plan, 1 if its row is filled."""
        return self._known

    @property
    def told(self) -> Faced:
        """What the processes told so far."""
        return self._told

    @property
    def pids(self) -> list[int]:
        """Process ids, in the order of the parts."""
        return [process.pid for process in self._processes]

    async def start(self) -> None:
        """Starts all and returns when each has its part.

        Raises:
            SenderError: one cannot be started, or did not come up.
        """
        try:
            for _ in self._parts:
                await self._start_one()
        except OSError as error:
            raise SenderError([f"a sending process cannot be started: {error.strerror or error}"]) from error
        try:
            for number in range(len(self._parts)):
                await self._guarded(number, self._give)
            async with asyncio.timeout(READY_S):
                await self._each(self._hear_ready)
        except TimeoutError:
            self._told.faults.append(f"a sending process was not ready within {READY_S:g} s")
        if self._told.faults:
            raise SenderError(self._told.faults)

    async def send(self, start_s: float, bound_s: float, ended: Progress | None) -> tuple[Faced, list[Row]]:
        """Lets all send from `start_s` on, and returns when all have ended.

        Args:
            start_s: `time.monotonic()` of the start.
            bound_s: seconds from now after which every request must have ended.
            ended: called with each row that is filled.

        Returns:
            What was told, and the rows of which nothing was: none without faults.
        """
        self._ended = ended
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(messages.framed(messages.Start(start_s)))
        try:
            async with asyncio.timeout(bound_s + END_GRACE_S):
                await self._each(self._hear)
        except TimeoutError:
            self._told.faults.append(
                f"sending did not end within {END_GRACE_S:g} s after the last request's time-out"
            )
        return self._told, [row for row, known in zip(self._rows, self._known, strict=True) if not known]

    async def close(self) -> None:
        """Ends whatever still runs."""
        for process in self._processes:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)  # kill() may take its end from asyncio's watcher
        for process in self._processes:
            assert process.stdout is not None
            while await process.stdout.read(1 << 20):
                pass  # asyncio does not see the end of a process behind output that nobody reads
            await process.wait()
            if process.stdin is not None:
                process.stdin.close()
        for said in self._said:
            os.close(said)

    async def _start_one(self) -> None:
        said = os.memfd_create("keystage-sender")  # a pipe could fill and block, a disk be read-only
        self._said.append(said)
        self._processes.append(
            await asyncio.create_subprocess_exec(
                sys.executable, "-m", "keystage.loadgen.sending.worker",
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=said,
            )
        )  # fmt: skip

    async def _each(self, work: Callable[[int], Awaitable[None]]) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(len(self._processes)):
                group.create_task(self._guarded(number, work))

    async def _guarded(self, number: int, work: Callable[[int], Awaitable[None]]) -> None:
        """Works on one process; its early end is a fault."""
        try:
            await work(number)
        except (asyncio.IncompleteReadError, ConnectionError):
            told = await _last_words(self._processes[number], self._said[number])
            self._told.faults.append(
                f"sending process {number + 1} of {len(self._processes)} ended early: {told}"
            )

    async def _give(self, number: int) -> None:
        """Makes a part in a thread, for bodies may take their time, and hands it over."""
        content = await asyncio.to_thread(lambda: messages.framed(self._parts[number]()))
        stdin = self._processes[number].stdin
        assert stdin is not None
        stdin.write(content)
        del content
        async with asyncio.timeout(READY_S):
            await stdin.drain()

    async def _hear_ready(self, number: int) -> None:
        await _next(self._processes[number])

    async def _hear(self, number: int) -> None:
        while True:
            match await _next(self._processes[number]):
                case messages.Rows(rows):
                    for told in rows:
                        row = messages.fill(self._rows, told)
                        self._known[row.index] = 1
                        if self._ended is not None:
                            self._ended(row)
                case messages.Ended(cpu_s, connections, moved):
                    self._told.cpu_s += cpu_s
                    self._told.connections += connections
                    self._told.moved += moved
                    return
                case messages.Ready():
                    pass


async def _next(process: asyncio.subprocess.Process) -> messages.Told:
    assert process.stdout is not None
    (size,) = messages.LENGTH.unpack(await process.stdout.readexactly(messages.LENGTH.size))
    told: messages.Told = messages.told(await process.stdout.readexactly(size))
    return told


async def _last_words(process: asyncio.subprocess.Process, said: int) -> str:
    """How a process ended, and the last line that it wrote to the file `said`."""
    code = await process.wait()
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    written = os.pread(said, _SAID_BYTES, max(os.fstat(said).st_size - _SAID_BYTES, 0))
    lines = written.decode(errors="replace").strip().splitlines()
    return f"{how}: {lines[-1]}" if lines else how
