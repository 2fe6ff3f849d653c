"""A replica's life in a forked child: clean up, take stock, run the function's main.

Entered from `fork_spawn` in the child; the function (`keystage.worker.app`, `keystage.router.app`)
goes on as if it had been started as a program, but for the `Supply` it is given. The claim tells the
daemon how far the start is; nothing here waits for the daemon, which may be gone.
"""

from __future__ import annotations

import importlib
import inspect
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from keystage.keysmanager import fork_child
from keystage.keysmanager.api import Progress, Spawn
from keystage.keysmanager.channel import Channel
from keystage.keysmanager.daemon_needs import DEVICE_COPY
from keystage.keysmanager.fork_spawn import tell
from keystage.keysmanager.hold_stock import Stock
from keystage.keysmanager.hold_supply import Fetch, StockSupply, fetch_from


def run(message: Spawn, fds: Sequence[int], stock: Stock | None) -> int:
    """Lives a replica's life; returns its exit code.

    Args:
        message: what it is told.
        fds: lifeline, output, HTTP socket, claim, and the pipe for `fork_spawn.tell`.
        stock: what the forker holds, None: nothing.
    """
    fork_child.attach_output(fds[1])
    lifeline, http, claim_fd, pipe = fork_child.keep_only([fds[0], *fds[2:]])
    try:
        fork_child.lead_group()
        fork_child.reset_signals()
        fork_child.rename(f"ks:{message.replica}")
        env = {**message.env, "KEYSTAGE_LIFELINE_FD": str(lifeline), "KEYSTAGE_HTTP": f"fd://{http}"}
        fork_child.replace_environment(env)
        fork_child.reseed()
        fork_child.set_threads(_threads(env))
        sys.argv = [message.module, message.replica]
        main = main_of(message.module)
    except Exception as error:  # noqa: BLE001  # whatever it is, the forker must hear of it
        tell(pipe, f"no {type(error).__name__}: {error}")
        return 1
    tell(pipe, "ok")
    os.close(pipe)
    claim = Channel(socket.socket(fileno=claim_fd))
    claim.try_send(Progress(phase="forked", at_s=time.monotonic()))
    supply = StockSupply(
        claim,
        stock,
        is_private=message.sharing == "private",
        copies_to_device=env.get(DEVICE_COPY) != "0",
        fetch=_fetch(env, stock),
        device=env.get("KEYSTAGE_DEVICE", ""),
    )
    return _finished(main, supply)


def _fetch(env: Mapping[str, str], stock: Stock | None) -> Fetch | None:
    """How the child gets what its forker lacks.

    A worker of one stage that was forked without a holder was refused one: it does not ask again.
    """
    daemon, bundle = env.get("KEYSTAGE_KEYSMANAGER"), env.get("KEYSTAGE_BUNDLE")
    has_several = "-" in env.get("KEYSTAGE_STAGES", "")
    if not (daemon and bundle) or not (has_several or stock is not None):
        return None
    return fetch_from(daemon, bundle)


def _threads(env: Mapping[str, str]) -> int:
    value = env.get("KEYSTAGE_THREADS", "1")
    if not value.isdigit():
        raise ValueError(f"KEYSTAGE_THREADS={value!r}: expected a number")
    return int(value)


def main_of(module: str) -> Callable[..., Any]:
    """The module's `main`.

    Raises:
        ImportError: no such module, or it has none.
    """
    main = getattr(importlib.import_module(module), "main", None)
    if not callable(main):
        raise ImportError(f"module {module} has no main()")
    found: Callable[..., Any] = main
    return found


def _finished(main: Callable[..., Any], supply: StockSupply) -> int:
    """Runs `main` to its end, as the interpreter would: a traceback for a bug, buffers written."""
    try:
        takes_supply = "supply" in inspect.signature(main).parameters
        code = _code(main(supply) if takes_supply else main())
    except SystemExit as stop:
        code = _code(stop.code)
    except BaseException:  # noqa: BLE001  # the end of this process: nobody is above
        traceback.print_exc()
        code = 1
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # its reader is gone
            code = code or 1
    return code


def _code(result: object) -> int:
    if result is None:
        return 0
    if isinstance(result, int):
        return result & 0xFF
    print(result, file=sys.stderr)  # noqa: T201  # as `sys.exit(text)` does
    return 1
