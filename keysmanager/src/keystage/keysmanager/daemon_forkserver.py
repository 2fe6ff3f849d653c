"""Keeps the fork server running: starts it, waits for its answers, starts it again when it ends.

Below `daemon`; `forkserver` is the program. Its holders and replicas live on when it ends (each has a
socket or an owner of its own), so an end costs only the forks that were under way. This module must
not import what the fork server imports.
"""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from keystage.keysmanager.api import Message
from keystage.keysmanager.channel import Told, pair
from keystage.keysmanager.daemon_forker import ANSWER_S, Forker, ForkerError, Life
from keystage.wire.threads import SPIN

log = logging.getLogger("keystage.keysmanager")

T = TypeVar("T", bound=Message)

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 10.0
SETTLED_S = 30.0
"""A fork server that lived this long had no fault of its own: the pauses begin anew."""
MAX_FAILURES = 4
"""Ends in a row after which requests are refused at once; it is tried again all the same."""
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Before its exec: a thread pool made at import could never be forked."""


class ForkServer:
    """The fork server of this daemon, whichever process it is just now.

    Args:
        env: environment without our own settings.

    Attributes:
        restarts: how often it had to be started again.
    """

    def __init__(self, env: Mapping[str, str], ended: Callable[[], None] = lambda: None) -> None:
        general = {k: v for k, v in env.items() if not k.startswith("KEYSTAGE_")}
        self._env = SPIN | general | _ONE_THREAD
        self._ended = ended
        self._forker: Forker | None = None
        self._popen: subprocess.Popen[bytes] | None = None
        self._life: Life | None = None
        self._closing = False
        self._present = asyncio.Event()
        self._failures = 0
        self._last_end = ""
        self.restarts = 0

    @property
    def pid(self) -> int:
        """Of the present process, 0 between two."""
        return self._popen.pid if self._popen is not None else 0

    async def run(self) -> None:
        """Keeps it alive until cancelled or closed."""
        pause_s = FIRST_PAUSE_S
        loop = asyncio.get_running_loop()
        while not self._closing:
            started_s = loop.time()
            try:
                life = self._start()
            except OSError as error:
                self._last_end = f"cannot be started: {error}"
            else:
                await life.ended.wait()
                self._reap()
            if self._closing:
                return
            log.warning("fork server %s", self._last_end)
            self.restarts += 1
            if loop.time() - started_s > SETTLED_S:
                pause_s, self._failures = FIRST_PAUSE_S, 0
            self._failures += 1
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def ask(self, message: Told, fds: Sequence[int], kind: type[T]) -> T:
        """Asks the fork server; one that is being started answers when it is done with its imports.

        Raises:
            ForkerError: refused, it ended, or it cannot be kept running.
        """
        while True:
            forker, life = await self._ready()
            try:
                return await forker.ask(message, fds, kind)
            except ForkerError as error:
                if not error.is_over:
                    raise
                life.kill()  # it can be asked nothing any more: the next one is started
                await life.ended.wait()
                if self._forker is forker:
                    self._present.clear()
                if error.is_unsure:
                    raise
            # Nothing was sent: the next one is asked. `MAX_FAILURES` bounds how often.

    async def _ready(self) -> tuple[Forker, Life]:
        while not self._present.is_set():
            if self._failures >= MAX_FAILURES:
                raise ForkerError(f"the fork server ended {self._failures} times in a row: {self._last_end}")
            try:
                async with asyncio.timeout(ANSWER_S):
                    await self._present.wait()
            except TimeoutError:
                raise ForkerError(f"no fork server in {ANSWER_S:.0f} s: {self._last_end}") from None
        assert self._forker is not None
        assert self._life is not None
        return self._forker, self._life

    async def close(self) -> None:
        """Ends it."""
        self._closing = True
        if self._forker is not None:
            self._forker.close()
        if self._life is not None:
            await self._life.end()
        if self._popen is not None:
            self._reap()

    def _start(self) -> Life:
        ours, theirs = pair()
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "keystage.keysmanager.forkserver", str(theirs.fileno())],
                env=self._env,
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self._forker = Forker(ours, f"fork server {self._popen.pid}")
        self._life = Life(self._popen.pid)
        self._present.set()
        return self._life

    def _reap(self) -> None:
        assert self._popen is not None
        code = self._popen.wait()
        self._last_end = f"{self._popen.pid} ended with code {code}"
        self._present.clear()
        if self._forker is not None:
            self._forker.close()
        if self._life is not None:
            self._life.close()
        self._forker = self._popen = self._life = None
        self._ended()
