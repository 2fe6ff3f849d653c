"""The KeysManager's process: configuration, the daemon and its doors, and an orderly end.

    python -m keystage.keysmanager.app

Exit codes: 0 ended by SIGTERM, SIGINT or its owner; 2 bad configuration; 3 another daemon has the socket;
1 a bug. Its end, however it comes, ends its fork server, holders and idle standbys, never a replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor

from aiohttp import web
from pydantic import ValidationError

from keystage.keysmanager import door, inventory, peer_server
from keystage.keysmanager.catalog import Catalog
from keystage.keysmanager.config import KeysManagerConfig
from keystage.keysmanager.daemon import Daemon
from keystage.keysmanager.daemon_ahead import Ahead
from keystage.keysmanager.daemon_key_standbys import KeyStandbys
from keystage.keysmanager.daemon_requests import Requests
from keystage.keysmanager.daemon_rounds import Rounds
from keystage.keysmanager.disk_cache import DiskCache
from keystage.keysmanager.history import History
from keystage.keysmanager.ledger import LedgerSettings
from keystage.keysmanager.loader import Loader, LoaderSettings
from keystage.keysmanager.pod_grants import Grants, PodPort
from keystage.keysmanager.revocations import Revocations
from keystage.keysmanager.server import Server, SocketTaken
from keystage.wire.bearer import Bearer
from keystage.wire.descriptors import raise_descriptors
from keystage.wire.endpoints import EndpointError, check_lifeline, listen
from keystage.wire.upkeep import one_heap

log = logging.getLogger("keystage.keysmanager")

END_S = 5.0
"""From the wish to end until the process does, whatever hangs."""

THREADS = 8
"""For reads of /proc, opens, plans and copies; asyncio's own pool grows with the machine's cores, to 32."""

FIRST_PROCESS = (
    "this daemon is process 1 of its namespace: the kernel ends every replica there when it ends, and nobody "
    "else reaps them; run it under an init (docker run --init, shareProcessNamespace)"
)


def main() -> int:
    """Runs the daemon until it is told to end; returns the exit code."""
    one_heap()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        config = KeysManagerConfig()
        token = config.bearer()
    except (ValidationError, ValueError) as error:
        print(f"keystage keysmanager: {error}", file=sys.stderr)  # noqa: T201
        return 2
    raise_descriptors()  # a thousand connections, and a few for every replica
    _warn_first_process(os.getpid())
    try:
        return asyncio.run(_run(config, token))
    except (SocketTaken, EndpointError, OSError) as error:
        print(f"keystage keysmanager: {error}", file=sys.stderr)  # noqa: T201
        return 3


async def _run(config: KeysManagerConfig, token: Bearer) -> int:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS, "keysmanager"))
    check_lifeline(config.lifeline_fd)
    for folder in (config.keysmanager_state, config.keysmanager.parent):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if config.keysmanager_pods is not None:
        config.keysmanager_pods.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
    cache = (
        DiskCache(config.keysmanager_state / "parameters", config.keysmanager_cache_bytes)
        if config.keysmanager_cache_bytes
        else None
    )
    catalog = Catalog(config.keysmanager_state / "bundles")
    loader = Loader(LoaderSettings(config.peers, token, config.home_is_remote), cache)
    history = History(config.keysmanager_state / "history.json")
    history.load()
    revocations = Revocations(config.keysmanager_state / "revoked")
    gpus, _ = await asyncio.to_thread(inventory.gpus)
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    settings = LedgerSettings(prepare="none" if gpus and not is_hidden else "cpu")
    daemon = Daemon(settings, catalog, loader, history, revocations, dict(os.environ))
    for identity in revocations.read():
        daemon.revoke(identity)
    ahead = Ahead(daemon.ledger, daemon.names, daemon.loads, daemon.standbys, config.standby_register_bytes)
    rounds = Rounds(daemon, config.node, config.keysmanager_memory, ahead.registered)
    key_standbys = KeyStandbys(
        daemon.ledger,
        daemon.names,
        daemon.standbys,
        config.standbys_per_key_stage if gpus else 0,
        rounds.is_short,
    )
    grants = Grants() if config.keysmanager_pods is not None else None
    requests = Requests(
        daemon,
        catalog,
        config.keysmanager.absolute(),
        see_memory=rounds.see_memory,
        status=rounds.status,
        metrics=rounds.metrics,
        revoke=loader.drop,
        find_copy=cache.find if cache is not None else lambda _: None,
        learn=key_standbys.learn,
        grants=grants,
    )
    servers = [Server(config.keysmanager.absolute(), requests)]
    if config.keysmanager_pods is not None and grants is not None:
        port = PodPort(requests, grants, daemon.go)
        servers.append(Server(config.keysmanager_pods.absolute(), port, door.PODS))
    started: list[Server] = []
    runner: web.AppRunner | None = None
    try:
        for server in servers:
            server.start()
            started.append(server)
        if config.keysmanager_listen:
            runner = await peer_server.start(
                peer_server.make_app(requests, token), listen(config.keysmanager_listen)
            )
        daemon.go(daemon.forkserver.run())
        rounds.begin(requests.renew_list)
        daemon.go(ahead.run())
        daemon.go(key_standbys.run())
        daemon.go(_prewarm(requests, history))
        return await _until_end(daemon, config.lifeline_fd)
    finally:
        if runner is not None:
            await runner.cleanup()
        for server in started:
            await server.stop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await daemon.close()
                key_standbys.close()
                await loader.close()
        history.save()


async def _prewarm(requests: Requests, history: History) -> None:
    """What was kept here before is loaded before anybody asks, until the first list comes."""
    names = history.names()
    if names and not requests.has_list:
        log.info("prewarming %d stages from the history", len(names))
        await requests.set_list(names)


async def _until_end(daemon: Daemon, lifeline_fd: int | None) -> int:
    """Waits for SIGTERM, SIGINT, the owner's end, or a bug."""
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked.set)
    if lifeline_fd is not None:
        loop.add_reader(lifeline_fd, _read_lifeline, lifeline_fd, asked)
    ending = asyncio.create_task(asked.wait())
    await asyncio.wait((ending, daemon.failed), return_when=asyncio.FIRST_COMPLETED)
    if lifeline_fd is not None:
        loop.remove_reader(lifeline_fd)
    ending.cancel()
    if daemon.failed.done():
        print(f"keystage keysmanager: {daemon.failed.result()}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


def _read_lifeline(fd: int, ended: asyncio.Event) -> None:
    if not os.read(fd, 1):
        ended.set()


def _warn_first_process(pid: int) -> None:
    if pid == 1:
        log.warning(FIRST_PROCESS)


if __name__ == "__main__":
    sys.exit(main())
