"""CPU cores of running replicas: which ones, and how a running worker learns of them.

Before it: the ledger says how many cores a replica shall have. After it: the process' threads run on
these cores only, and a worker computes with as many threads, without a restart. Whole cores are given
out (a part of one counts as one); where there are too few, replicas share the least used.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Iterable
from pathlib import Path

import aiohttp
import msgspec
import psutil

from keystage.local.program import threads_of
from keystage.wire.bearer import SCHEME, read_token
from keystage.wire.errors import WireError
from keystage.wire.threads import THREADS_PATH, Threads

log = logging.getLogger(__name__)

TELL_TIMEOUT_S = 2.0
TRIES = 5
RETRY_S = 0.5


class Pins:
    """Which cores each replica has.

    Args:
        usable: cores this machine lets us use.
    """

    def __init__(self, usable: Iterable[int]) -> None:
        self._usable = sorted(usable)
        self._held: dict[str, frozenset[int]] = {}

    def assign(self, replica: str, cores: float) -> frozenset[int]:
        """Gives a replica cores: those it has first, then the least used ones; all if it wants more."""
        before = self._held.pop(replica, frozenset())
        used = {core: sum(core in held for held in self._held.values()) for core in self._usable}
        order = sorted(self._usable, key=lambda core: (used[core], core not in before, core))
        self._held[replica] = frozenset(order[: threads_of(cores)])
        return self._held[replica]

    def forget(self, replica: str) -> None:
        """A replica is gone."""
        self._held.pop(replica, None)


def pin(pid: int, cores: frozenset[int]) -> None:
    """Lets every thread of a process run on these cores only; threads made later inherit it.

    A machine may forbid it, or have taken cores from us since: then the process runs where it may, which
    costs speed and nothing else.
    """
    try:
        for thread in psutil.Process(pid).threads():
            with contextlib.suppress(ProcessLookupError):  # ended meanwhile
                os.sched_setaffinity(thread.id, cores)
    except (psutil.NoSuchProcess, ProcessLookupError):
        return
    except (psutil.Error, OSError) as error:
        log.warning("process %d was not given cores %s: %s", pid, sorted(cores), error)


async def tell(session: aiohttp.ClientSession, address: str, threads: int, token_file: Path) -> None:
    """Tells a running worker its new number of threads; one that does not answer keeps the old one."""
    body = msgspec.json.encode(Threads(threads))
    try:
        headers = {"Authorization": f"{SCHEME}{read_token(token_file)}"}
    except WireError as error:
        log.warning("%s was not told its %d threads: %s", address, threads, error)
        return
    timeout = aiohttp.ClientTimeout(total=TELL_TIMEOUT_S)
    said = ""
    for _ in range(TRIES):
        try:
            async with session.put(
                f"http://{address}{THREADS_PATH}", data=body, headers=headers, timeout=timeout
            ) as answer:
                if answer.status < 500:
                    if answer.status >= 300:
                        log.warning(
                            "%s refused %d threads: %s", address, threads, (await answer.text())[:200]
                        )
                    return
                said = f"status {answer.status}"
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            said = str(error) or type(error).__name__
        await asyncio.sleep(RETRY_S)
    log.warning("%s was not told its %d threads: %s", address, threads, said)
