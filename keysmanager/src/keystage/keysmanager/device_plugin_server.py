"""One GPU as a resource of the node: the server that the kubelet asks.

Made by `device_plugin` for each GPU. The resource `keystage.dev/gpu<n>` has one device per GiB of the GPU's
memory, so that stages share a GPU by what they need of it; which GiB a pod gets means nothing. Every holder
gets the GPU's device nodes and its UUID; how much memory it then uses is not enforced by the hardware, it is
what the pod was scheduled by. A container with units of two GPUs is not served: NVIDIA_VISIBLE_DEVICES can
name but one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from keystage.keysmanager import device_plugin_api as api
from keystage.keysmanager.device_plugin_gpus import NodeGpu

RESOURCE = "keystage.dev/gpu"
CONTROL_NODES = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools")
"""What CUDA opens besides the GPU's own node."""
STOP_S = 0.5
"""Open streams have so long to end."""


class GpuServer:
    """Serves one GPU on a socket of its own.

    Args:
        gpu: what is served; see `change`.
        folder: the kubelet's folder.
        control_nodes: device nodes given with the GPU's own; those that are not there are left out.
    """

    def __init__(self, gpu: NodeGpu, folder: Path, control_nodes: Iterable[str] = CONTROL_NODES) -> None:
        self.gpu = gpu
        self.socket = folder / f"keystage-gpu{gpu.index}.sock"
        self._control_nodes = tuple(control_nodes)
        self._server: grpc.aio.Server | None = None
        self._changed: asyncio.Event = asyncio.Event()
        self._is_stopping = False

    @property
    def resource(self) -> str:
        """Name of its resource."""
        return f"{RESOURCE}{self.gpu.index}"

    def change(self, gpu: NodeGpu) -> None:
        """Tells everybody who watches what the GPU is now."""
        if gpu != self.gpu:
            self.gpu = gpu
            self._wake()

    async def start(self) -> None:
        """Listens; the socket of one that served before is replaced.

        Raises:
            OSError: the folder cannot be written.
        """
        self.socket.unlink(missing_ok=True)
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((self._handlers(),))
        try:
            server.add_insecure_port(f"unix:{self.socket}")
        except RuntimeError as error:
            raise OSError(f"cannot listen on {self.socket}: {error}") from error
        self._is_stopping = False
        await server.start()
        self._server = server

    async def stop(self) -> None:
        """Ends the streams, and takes the socket away."""
        self._is_stopping = True
        self._wake()
        if self._server is not None:
            await self._server.stop(STOP_S)
            self._server = None
        with contextlib.suppress(OSError):
            self.socket.unlink(missing_ok=True)

    def request(self) -> Any:
        """What the kubelet is told of it."""
        return api.RegisterRequest(
            version=api.VERSION,
            endpoint=self.socket.name,
            resource_name=self.resource,
            options=api.DevicePluginOptions(),
        )

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _handlers(self) -> grpc.GenericRpcHandler:
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        return grpc.method_handlers_generic_handler(
            api.DEVICE_PLUGIN,
            {
                "GetDevicePluginOptions": unary(self._options, api.Empty.FromString, api.encode),
                "ListAndWatch": stream(self._list_and_watch, api.Empty.FromString, api.encode),
                "Allocate": unary(self._allocate, api.AllocateRequest.FromString, api.encode),
            },
        )

    async def _options(self, request: Any, context: Any) -> Any:
        """No preferred allocation (all units are equal), no pre-start."""
        return api.DevicePluginOptions()

    async def _list_and_watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        while not self._is_stopping:
            changed = self._changed  # before the answer is made: a change meanwhile is told next
            yield self._devices()
            await changed.wait()

    async def _allocate(self, request: Any, context: Any) -> Any:
        units = set(self._units())
        answers = []
        for container in request.container_requests:
            unknown = sorted(set(container.devices_ids) - units)
            if unknown:
                await context.abort(
                    grpc.StatusCode.INVALID_ARGUMENT,
                    f"{self.resource} has no units {', '.join(unknown[:3])}; there are {len(units)}",
                )
            if not self.gpu.is_healthy:
                await context.abort(
                    grpc.StatusCode.UNAVAILABLE, f"GPU {self.gpu.index} ({self.gpu.uuid}) is no longer shown"
                )
            answers.append(self._answer())
        return api.AllocateResponse(container_responses=answers)

    def _answer(self) -> Any:
        if self.gpu.minor is None:  # emulated: the vendor's runtime, where there is one, adds nothing
            return api.ContainerAllocateResponse(envs={"NVIDIA_VISIBLE_DEVICES": "void"})
        nodes = [f"/dev/nvidia{self.gpu.minor}", *(n for n in self._control_nodes if Path(n).exists())]
        return api.ContainerAllocateResponse(
            envs={"NVIDIA_VISIBLE_DEVICES": self.gpu.uuid},
            devices=[api.DeviceSpec(container_path=n, host_path=n, permissions="rw") for n in nodes],
        )

    def _units(self) -> list[str]:
        return [f"{self.gpu.uuid}-{number}" for number in range(self.gpu.gib)]

    def _devices(self) -> Any:
        health = api.HEALTHY if self.gpu.is_healthy else api.UNHEALTHY
        topology = None
        if self.gpu.numa is not None:
            topology = api.TopologyInfo(nodes=[api.NUMANode(ID=self.gpu.numa)])
        devices = [api.Device(ID=unit, health=health, topology=topology) for unit in self._units()]
        return api.ListAndWatchResponse(devices=devices)
