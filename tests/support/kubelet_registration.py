"""The kubelet's side of the device plugin protocol: a real gRPC server and client on UNIX sockets."""

from __future__ import annotations

import queue
import threading
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc

from keystage.keysmanager import device_plugin_api as api

WAIT_S = 60.0


class Kubelet:
    """Takes registrations in a folder and, like the real one, calls the plugin back before it answers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.registered: queue.Queue[tuple[str, str, str]] = queue.Queue()
        self.refuse = threading.Event()
        self._server: grpc.Server | None = None

    def start(self) -> None:
        """As the real one: everything in the folder is removed first."""
        for file in self.folder.glob("*.sock"):
            file.unlink()
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        method = grpc.unary_unary_rpc_method_handler(
            self._register, api.RegisterRequest.FromString, api.encode
        )
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("v1beta1.Registration", {"Register": method}),)
        )
        self._server.add_insecure_port(f"unix:{self.folder / 'kubelet.sock'}")
        self._server.start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop(0).wait()
            self._server = None

    def plugin(self, endpoint: str) -> Plugin:
        return Plugin(self.folder / endpoint)

    def _register(self, request: Any, context: Any) -> Any:
        if self.refuse.is_set():
            context.abort(grpc.StatusCode.UNAVAILABLE, "still starting")
        plugin = self.plugin(request.endpoint)
        plugin.options()
        plugin.close()
        self.registered.put((request.version, request.endpoint, request.resource_name))
        return api.Empty()


class Plugin:
    """What the kubelet asks of a plugin."""

    def __init__(self, socket: Path) -> None:
        self._channel = grpc.insecure_channel(f"unix:{socket}")

    def options(self) -> Any:
        call = self._channel.unary_unary(
            "/v1beta1.DevicePlugin/GetDevicePluginOptions", api.encode, api.DevicePluginOptions.FromString
        )
        return call(api.Empty(), timeout=WAIT_S, wait_for_ready=True)

    def watch(self) -> Any:
        """Answers of ListAndWatch, one by one."""
        call = self._channel.unary_stream(
            "/v1beta1.DevicePlugin/ListAndWatch", api.encode, api.ListAndWatchResponse.FromString
        )
        return call(api.Empty(), timeout=WAIT_S, wait_for_ready=True)

    def allocate(self, *containers: list[str]) -> Any:
        call = self._channel.unary_unary(
            "/v1beta1.DevicePlugin/Allocate", api.encode, api.AllocateResponse.FromString
        )
        asked = [api.ContainerAllocateRequest(devices_ids=ids) for ids in containers]
        return call(api.AllocateRequest(container_requests=asked), timeout=WAIT_S, wait_for_ready=True)

    def close(self) -> None:
        self._channel.close()
