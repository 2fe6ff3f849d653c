"""The device plugin's process: GPUs of this node, in units of GiB, for the kubelet.

    python -m keystage.keysmanager.device_plugin

Beside the KeysManager in its DaemonSet. Each round it looks whether the kubelet is another one than before
(it empties the folder when it starts, and knows no plugin then) and serves and registers anew; now and then
it looks at the GPUs. A node without GPUs, or whose driver comes later, costs a look every `gpu_poll_s`.

Exit codes: 0 ended by SIGTERM or SIGINT; 2 bad configuration, or the kubelet's folder is not there; 1 a bug.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import grpc.aio
from pydantic import ValidationError

from keystage.keysmanager import device_plugin_api as api
from keystage.keysmanager import device_plugin_gpus as gpus
from keystage.keysmanager.device_plugin_config import DevicePluginConfig
from keystage.keysmanager.device_plugin_server import GpuServer

log = logging.getLogger("keystage.device_plugin")

LOOK_S = 1.0
"""Between two looks at the kubelet's socket."""
REGISTER_S = 5.0
"""Bound of one registration; the kubelet calls back before it answers."""

Reader = Callable[[], tuple[tuple[gpus.NodeGpu, ...], str]]


class DevicePlugin:
    """Keeps one server per GPU registered with the kubelet.

    Args:
        folder: the kubelet's.
        read: shows the GPUs; may block.
        gpu_poll_s: seconds between two looks at them.
        look_s: seconds between two looks at the kubelet.
    """

    def __init__(self, folder: Path, read: Reader, gpu_poll_s: float, look_s: float = LOOK_S) -> None:
        self._folder = folder
        self._read = read
        self._gpu_poll_s = gpu_poll_s
        self._look_s = look_s
        self._inventory = gpus.Inventory()
        self._servers: dict[int, GpuServer] = {}
        self._registered: dict[int, tuple[int, ...]] = {}
        self._told = ""

    async def run(self) -> None:
        """Rounds until it is cancelled.

        Raises:
            OSError: the folder cannot be written.
        """
        looked_s = float("-inf")
        try:
            while True:
                if time.monotonic() - looked_s >= self._gpu_poll_s:
                    looked_s = time.monotonic()
                    shown, missing = await asyncio.to_thread(self._read)
                    self._see(shown, missing)
                await self._serve()
                await asyncio.sleep(self._look_s)
        finally:
            await asyncio.gather(*(server.stop() for server in self._servers.values()))

    def _see(self, shown: tuple[gpus.NodeGpu, ...], missing: str) -> None:
        if missing != self._told:
            self._told = missing
            log.info("GPUs: %d shown; %s", len(shown), missing or "none is missing")
        for gpu in self._inventory.see(shown):
            if gpu.index in self._servers:
                if self._servers[gpu.index].gpu.is_healthy != gpu.is_healthy:
                    log.warning("GPU %d is %s", gpu.index, "back" if gpu.is_healthy else "no longer shown")
                self._servers[gpu.index].change(gpu)
            else:
                self._servers[gpu.index] = GpuServer(gpu, self._folder)

    async def _serve(self) -> None:
        """Every GPU whose socket is gone, or that this kubelet does not know, is served and registered."""
        kubelet = _identity(self._folder / api.KUBELET_SOCKET)
        for index, server in self._servers.items():
            if not server.socket.exists():
                await server.stop()
                await server.start()
                self._registered.pop(index, None)
            if kubelet and self._registered.get(index) != kubelet and await self._register(server):
                self._registered[index] = kubelet

    async def _register(self, server: GpuServer) -> bool:
        address = f"unix:{self._folder / api.KUBELET_SOCKET}"
        async with grpc.aio.insecure_channel(address) as channel:
            call = channel.unary_unary(f"/{api.REGISTRATION}/Register", api.encode, api.Empty.FromString)
            try:
                await call(server.request(), timeout=REGISTER_S)
            except (
                grpc.aio.AioRpcError
            ) as error:  # it is just starting, or refuses: the next round tries again
                log.warning(
                    "%s is not registered: %s: %s", server.resource, error.code().name, error.details()
                )
                return False
        log.info("registered %s: %d GiB of %s", server.resource, server.gpu.gib, server.gpu.uuid)
        return True


def _identity(socket: Path) -> tuple[int, ...]:
    """Which socket this is; empty: there is none."""
    try:
        found = socket.stat()
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_ctime_ns


def main() -> int:
    """Runs the plugin until it is told to end; returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        config = DevicePluginConfig()
    except ValidationError as error:
        print(f"keystage device plugin: {error}", file=sys.stderr)  # noqa: T201
        return 2
    try:
        asyncio.run(_run(config))
    except OSError as error:
        print(f"keystage device plugin: {error}", file=sys.stderr)  # noqa: T201
        return 2
    return 0


async def _run(config: DevicePluginConfig) -> None:
    if not config.device_plugins.is_dir():
        raise NotADirectoryError(
            f"the kubelet's folder {config.device_plugins} is not there (KEYSTAGE_DEVICE_PLUGINS)"
        )
    emulated = gpus.parse_emulated(config.emulated_gpus)
    read: Reader = (lambda: (emulated, "")) if emulated else gpus.read
    plugin = asyncio.create_task(DevicePlugin(config.device_plugins, read, config.gpu_poll_s).run())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, plugin.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await plugin


if __name__ == "__main__":
    sys.exit(main())
