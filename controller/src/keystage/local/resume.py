"""`keystage up` after an upgrade: goes on where the former version left off, in the same process.

`python -m keystage.local.resume DESCRIPTOR` is what `local.handover` becomes. With `--check` it only says
whether it could: one JSON line with its version and the form that it takes. Exit codes as `local.up` has
them.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys

import msgspec

from keystage.local import handover
from keystage.local.api import Successor
from keystage.local.errors import LocalError
from keystage.local.up import say
from keystage.local.upgrades import version
from keystage.local.world import LocalWorld
from keystage.wire.descriptors import raise_descriptors
from keystage.wire.versions import VERSIONS


def itself() -> Successor:
    """What `--check` says."""
    return Successor(version(), handover.FORM, VERSIONS.least, VERSIONS.most)


async def go_on(kept: handover.Handover) -> int:
    """Takes over, renews every part, and waits for SIGTERM or SIGINT.

    Raises:
        LocalError: what was handed over cannot be used.
    """
    raise_descriptors()
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    async with LocalWorld.resumed(kept) as world:
        say(f"goes on as version {version()} of {sys.executable}")
        renewing = asyncio.create_task(world.upgrades.renew())
        await ended.wait()
        renewing.cancel()
        await asyncio.gather(renewing, return_exceptions=True)
        say("ending")
    return 0


def main() -> int:
    """Entry of the module; returns the exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if sys.argv[1:] == ["--check"]:
        sys.stdout.write(msgspec.json.encode(itself()).decode() + "\n")
        return 0
    try:
        return asyncio.run(go_on(handover.take_over(int(sys.argv[1]))))
    except LocalError as error:
        say(str(error))
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
