"""From an API server's refusals to the gateway's errors, and calls of it off the event loop.

Used by everything of this part that asks the API server. The server's own words are kept: they name the
verb, the resource and the account that a right is missing for.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import Executor
from typing import ParamSpec, TypeVar

from keystage.gateway.backend import BackendUnavailable, BadRequest, GatewayError, TooLarge
from keystage.kubernetes.errors import ClusterError, Invalid

P = ParamSpec("P")
T = TypeVar("T")
_TOO_LARGE = 413


def gateway_error(error: ClusterError) -> GatewayError:
    """The gateway's error for one of the API server's that the caller did not expect."""
    if error.status == _TOO_LARGE:
        return TooLarge(str(error))
    if isinstance(error, Invalid):
        return BadRequest(str(error))
    return BackendUnavailable(str(error))


async def in_thread(executor: Executor, call: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """Runs a blocking exchange in a thread.

    Raises:
        GatewayError: the server refused, or is not there.
    """
    work = functools.partial(call, *args, **options)
    try:
        return await asyncio.get_running_loop().run_in_executor(executor, work)
    except ClusterError as error:
        raise gateway_error(error) from error
