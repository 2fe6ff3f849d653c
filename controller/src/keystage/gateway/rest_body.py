"""Request bodies and JSON answers of the management API.

Shared by `gateway.rest_functions` and `gateway.rest_system`. A value of a body must never come
into a message: a body may be a secret.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, TypeVar

import msgspec
from fastapi import Request, Response

from keystage.gateway.backend import BadRequest, TooLarge
from keystage.wire.unreadable import UNREADABLE

MAX_BODY_BYTES = 1 << 20
DRAIN_BYTES = 64 << 20
DRAIN_S = 5.0
"""Of what is too large so much is still taken, and thrown away: a client that is cut off while it sends
never reads why."""
MAX_WHOLE = 2.0**53
"""Below it a floating-point number stands for one integer alone."""
T = TypeVar("T")


def json_answer(value: Any) -> Response:
    """A value as a JSON answer."""
    return Response(msgspec.json.encode(value), media_type="application/json")


async def read_body(request: Request, kind: type[T], most_bytes: int = MAX_BODY_BYTES) -> T:
    """Decodes a bounded JSON body; `null` members count as absent, as Go programs send them.

    Args:
        request: whose.
        kind: what it must be.
        most_bytes: its bound.

    Raises:
        TooLarge: it is beyond the bound.
        BadRequest: it is no such body; names the member at fault.
    """
    body = bytearray()
    chunks = request.stream()
    async for chunk in chunks:
        body += chunk
        if len(body) > most_bytes:
            seen = len(body)
            body.clear()
            await _drain(chunks)
            raise TooLarge(f"request body has {seen} bytes or more, at most {most_bytes} are taken")
    try:
        value = msgspec.json.decode(body)
        if isinstance(value, dict):
            value = {key: _whole(member) for key, member in value.items() if member is not None}
        return msgspec.convert(value, kind)
    except UNREADABLE as error:
        raise BadRequest(f"body is no {kind.__name__}: {error}") from error


async def _drain(chunks: AsyncIterator[bytes]) -> None:
    left = DRAIN_BYTES
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_S):
            async for chunk in chunks:
                left -= len(chunk)
                if left < 0:
                    return


def _whole(member: Any) -> Any:
    """A number without a fraction as an integer: JSON has one kind of numbers."""
    if isinstance(member, float) and member.is_integer() and abs(member) < MAX_WHOLE:
        return int(member)
    return member
