"""Asks a replica over HTTP whether it is ready, and later whether it is alive.

One task per replica, run by `local.supervisor`, which turns answers into events. It must not
judge: how many misses are too many is the ledger's rule.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import aiohttp

from keystage.local.program import Program

TOO_MANY = 429
UNAVAILABLE = 503
SILENT = 0
"""In place of a status: nothing came in time."""
READY_PATH = "/_/ready"
HEALTH_PATH = "/_/health"
READY_EVERY_S = 0.05
READY_TIMEOUT_S = 5.0
"""Long: a loading program's socket already listens, and answers this probe as soon as it can."""
HEALTH_EVERY_S = 2.0
HEALTH_TIMEOUT_S = 2.0
BUSY_EVERY_S = 60.0
"""For one that is silent while it computes: each probe takes a place in the queue of its listening socket."""


async def follow(
    session: aiohttp.ClientSession,
    program: Program,
    address: str,
    answered: Callable[[], None],
    missed: Callable[[bool], None],
    is_at_work: Callable[[], bool],
) -> None:
    """Probes until cancelled: readiness until it answers once, then health.

    Args:
        session: client without connection reuse.
        program: what runs there.
        address: `host:port`.
        answered: called on readiness, then on every healthy answer.
        missed: called on every health probe without one; True: nothing came in time, neither answer nor
            refusal.
        is_at_work: whether it is known to have requests.
    """
    await _until_ready(session, program, address)
    answered()
    path = program.health_path or HEALTH_PATH
    while True:
        await asyncio.sleep(HEALTH_EVERY_S)
        status = await _status(session, f"http://{address}{path}", HEALTH_TIMEOUT_S)
        if is_well(program, status, is_stated=bool(program.health_path)) or status == TOO_MANY:
            answered()
            continue
        missed(status == SILENT)
        if status == SILENT:
            await _let_work(is_at_work)


async def _let_work(is_at_work: Callable[[], bool]) -> None:
    """Waits while it has requests, at most `BUSY_EVERY_S`."""
    waited_s = HEALTH_EVERY_S
    while is_at_work() and waited_s < BUSY_EVERY_S:
        await asyncio.sleep(HEALTH_EVERY_S)
        waited_s += HEALTH_EVERY_S


async def _until_ready(session: aiohttp.ClientSession, program: Program, address: str) -> None:
    path = program.ready_path or READY_PATH
    while True:
        status = await _status(session, f"http://{address}{path}", READY_TIMEOUT_S)
        if is_well(program, status, is_stated=bool(program.ready_path)):
            return
        await asyncio.sleep(READY_EVERY_S)


def is_well(program: Program, status: int | None, *, is_stated: bool) -> bool:
    """Whether a probe's answer says yes.

    Our own programs answer 200. A path that the deployer stated must answer 200..399, as Kubernetes has it.
    A foreign server without one may not have our paths at all: that it speaks HTTP is all that can be asked,
    but 503 and 429 are how OpenFaaS' watchdog says "not now".

    Args:
        program: what was asked.
        status: its answer, None or `SILENT` without one.
        is_stated: the path is the deployer's.
    """
    if status is None or status == SILENT:
        return False
    if program.answers_ready:
        return status == 200
    if is_stated:
        return 200 <= status < 400
    return status not in (TOO_MANY, UNAVAILABLE)


async def _status(session: aiohttp.ClientSession, url: str, timeout_s: float) -> int | None:
    try:
        async with session.get(
            url, timeout=aiohttp.ClientTimeout(total=timeout_s), allow_redirects=False
        ) as answer:
            return answer.status
    except TimeoutError:
        return SILENT
    except (aiohttp.ClientError, OSError):
        return None
