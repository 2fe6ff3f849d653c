"""Asks a replica over HTTP whether it is ready, and later whether it is alive.

One task per replica, run by `local.supervisor`, which turns answers into events. It must not
judge: how many misses are too many is the ledger's rule.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import aiohttp

from keystage.local.program import Program

READY_PATH = "/_/ready"
HEALTH_PATH = "/_/health"
READY_EVERY_S = 0.05
READY_TIMEOUT_S = 5.0
"""Long: a loading program's socket already listens, and answers this probe as soon as it can."""
HEALTH_EVERY_S = 2.0
HEALTH_TIMEOUT_S = 2.0


async def follow(
    session: aiohttp.ClientSession,
    program: Program,
    address: str,
    answered: Callable[[], None],
    missed: Callable[[], None],
) -> None:
    """Probes until cancelled: readiness until it answers once, then health.

    Args:
        session: client without connection reuse.
        program: what runs there.
        address: `host:port`.
        answered: called on readiness, then on every healthy answer.
        missed: called on every health probe without one.
    """
    await _until_ready(session, program, address)
    answered()
    while True:
        await asyncio.sleep(HEALTH_EVERY_S)
        status = await _status(session, f"http://{address}{HEALTH_PATH}", HEALTH_TIMEOUT_S)
        if status is not None and (status < 300 or _is_foreign_answer(program, status)):
            answered()
        else:
            missed()


async def _until_ready(session: aiohttp.ClientSession, program: Program, address: str) -> None:
    while True:
        status = await _status(session, f"http://{address}{READY_PATH}", READY_TIMEOUT_S)
        if status is not None and (status == 200 or _is_foreign_answer(program, status)):
            return
        await asyncio.sleep(READY_EVERY_S)


def _is_foreign_answer(program: Program, status: int) -> bool:
    # A foreign server may not have our paths; that it speaks HTTP is all that can be asked.
    return not program.answers_ready and (status < 300 or status in (401, 403, 404, 405, 501))


async def _status(session: aiohttp.ClientSession, url: str, timeout_s: float) -> int | None:
    try:
        async with session.get(
            url, timeout=aiohttp.ClientTimeout(total=timeout_s), allow_redirects=False
        ) as answer:
            return answer.status
    except (aiohttp.ClientError, OSError, TimeoutError):
        return None
