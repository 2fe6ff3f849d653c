"""`keystage async dead-letters`: what the asynchronous queue gave up, and how it is tried once more.

It talks to Redis, not to a gateway: dead letters of a queue in memory are in the gateway's log alone.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Annotated

import typer

from keystage.cli.errors import fail

if TYPE_CHECKING:
    from keystage.gateway.queue_redis import DeadLetter, RedisQueue

app = typer.Typer(help="Look after asynchronous calls.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Look after asynchronous calls."""


@app.command(name="dead-letters")
def dead_letters(
    redis: Annotated[
        str, typer.Option(envvar="KEYSTAGE_REDIS", show_default=False, help="address, as the gateway has it")
    ] = "",
    function: Annotated[str, typer.Option(help="only this function's")] = "",
    replay: Annotated[bool, typer.Option("--replay", help="put them back into the queue")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object a line")] = False,
) -> None:
    """List calls that were given up, with the reason; with --replay, run them anew."""
    from keystage.gateway.queue import Bounds, QueueUnavailable
    from keystage.gateway.queue_redis import RedisQueue
    from keystage.wire.redis_address import check_redis, shown

    if not redis:
        fail("no Redis is named: give --redis or KEYSTAGE_REDIS (a queue in memory keeps no dead letters)", 2)
    try:
        check_redis(redis)
        queue = RedisQueue(redis, Bounds(1, 1), lease_s=1.0)
        letters = asyncio.run(_look(queue, function, replay=replay, as_json=as_json))
    except ValueError as error:
        fail(f"--redis: {error}", 2)
    except QueueUnavailable as error:
        fail(f"the queue in Redis at {shown(redis)} cannot be asked: {error.__cause__}", 1)
    if not letters and not as_json:
        typer.echo("no dead letters")


async def _look(queue: RedisQueue, function: str, *, replay: bool, as_json: bool) -> int:
    """Prints every letter, page by page; how many there were."""
    count = 0
    last = "-"
    try:
        while letters := await queue.dead_letters(last):
            last = letters[-1].entry
            for letter in letters:
                if function in ("", letter.function):
                    count += 1
                    done = await _replay(queue, letter) if replay else ""
                    typer.echo(_object(letter, done) if as_json else f"{_line(letter)}{done}")
    finally:
        await queue.stop()
    return count


async def _replay(queue: RedisQueue, letter: DeadLetter) -> str:
    if letter.call is None:
        return "  (stays: it cannot be decoded)"
    return "  (back in the queue)" if await queue.replay(letter) else "  (gone meanwhile)"


def _line(letter: DeadLetter) -> str:
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(int(letter.entry.partition("-")[0]) / 1000))
    called = letter.call.id if letter.call is not None else "?"
    return f"{at}  {letter.function}  {called}  {letter.reason}"


def _object(letter: DeadLetter, done: str) -> str:
    """A letter as JSON, without the call's body: it may hold what nobody else is to read."""
    import json

    return json.dumps(
        {
            "entry": letter.entry,
            "at_s": int(letter.entry.partition("-")[0]) / 1000,
            "function": letter.function,
            "call": letter.call.id if letter.call is not None else None,
            "reason": letter.reason,
            "replay": done.strip(" ()"),
        }
    )
