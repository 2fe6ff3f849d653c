"""Delivers the answer of an asynchronous call to its `X-Callback-Url`.

Called by `gateway.queue_runner` when a call is done or given up. Tried several times with back-off;
no redirect is followed, so that the allow-list holds. Logs name host and call, never the whole address.
"""

from __future__ import annotations

import asyncio
import logging
import random

import aiohttp
import yarl

from keystage.gateway.backend import BadRequest
from keystage.gateway.queue import Call
from keystage.gateway.queue_address import CallbackRules
from keystage.gateway.queue_attempt import Outcome
from keystage.gateway.queue_backoff import Backoff
from keystage.wire.redis_address import shown

ANSWER_S = 10.0
_TRANSIENT = frozenset({408, 425, 429})
_log = logging.getLogger(__name__)


class Callbacks:
    """Sends answers.

    Args:
        rules: where they may go.
        backoff: how often, and how long between.
    """

    def __init__(self, rules: CallbackRules, backoff: Backoff) -> None:
        self._rules = rules
        self._backoff = backoff
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Opens the connection pool."""
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=ANSWER_S), cookie_jar=aiohttp.DummyCookieJar()
        )

    async def stop(self) -> None:
        """Closes the connection pool."""
        if self._session is not None:
            await self._session.close()

    async def deliver(self, call: Call, outcome: Outcome) -> bool:
        """Posts the answer; whether the receiver took it (status below 300)."""
        try:
            self._rules.check(call.callback)  # it may have been accepted under other rules
            url = yarl.URL(call.callback)
        except (BadRequest, ValueError):
            _log.warning("call %r: its callback is not allowed here", call.id)
            return False
        said = ""
        for failures in range(1, self._backoff.attempts + 1):
            is_taken, is_final, said = await self._post(url, call, outcome)
            if is_taken:
                return True
            if is_final:
                break
            if failures < self._backoff.attempts:
                await asyncio.sleep(self._backoff.delay_s(failures, random.random()))
        _log.warning("call %r: its callback at %s was given up: %s", call.id, shown(call.callback), said)
        return False

    async def _post(self, url: yarl.URL, call: Call, outcome: Outcome) -> tuple[bool, bool, str]:
        """One try: (taken, no use to try again, what happened)."""
        assert self._session is not None, "start() comes first"
        headers = {
            "Content-Type": outcome.content_type or "application/octet-stream",
            "X-Call-Id": call.id,
            "X-Duration-Seconds": f"{outcome.seconds:.6f}",
            "X-Function-Status": str(outcome.status),
            "X-Function-Name": call.function,
            "X-Start-Time": str(call.start_ns),
        }
        try:
            async with self._session.post(
                url, data=outcome.body, headers=headers, allow_redirects=False
            ) as answer:
                status = answer.status
        except aiohttp.InvalidURL:
            return False, True, "its address cannot be used"
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            # The text of some errors repeats the address; their kind is enough.
            return False, False, type(error).__name__
        is_final = status < 500 and status not in _TRANSIENT
        return status < 300, is_final, f"status {status}"
