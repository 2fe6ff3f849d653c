"""The device plugin before a kubelet: both sides speak real gRPC on UNIX sockets."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from support.kubelet_registration import WAIT_S, Kubelet
from support.processes import wait_for

from keystage.keysmanager.device_plugin import DevicePlugin
from keystage.keysmanager.device_plugin_gpus import NodeGpu

GPUS = (NodeGpu(0, "GPU-a", 3, 4, numa=1), NodeGpu(1, "GPU-b", 1, 2))


@pytest.fixture
def kubelet(tmp_path: Path) -> Iterator[Kubelet]:
    kubelet = Kubelet(tmp_path)
    yield kubelet
    kubelet.stop()


class World:
    """The plugin on an event loop of its own, over GPUs that the test changes."""

    def __init__(self, folder: Path) -> None:
        self.shown = GPUS
        self._plugin = DevicePlugin(folder, lambda: (self.shown, ""), gpu_poll_s=0.02, look_s=0.02)
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(self._plugin.run())
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._wait())

    async def _wait(self) -> None:
        await asyncio.wait((self._task,))

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.stop()


def _registrations(kubelet: Kubelet) -> set[tuple[str, str, str]]:
    return {kubelet.registered.get(timeout=WAIT_S) for _ in GPUS}


BOTH = {
    ("v1beta1", "keystage-gpu0.sock", "keystage.dev/gpu0"),
    ("v1beta1", "keystage-gpu1.sock", "keystage.dev/gpu1"),
}


def test_registers_lists_and_allocates(kubelet: Kubelet, world: World) -> None:
    kubelet.start()
    assert _registrations(kubelet) == BOTH
    plugin = kubelet.plugin("keystage-gpu0.sock")
    options = plugin.options()
    assert not options.pre_start_required
    assert not options.get_preferred_allocation_available
    devices = next(plugin.watch()).devices
    assert len({device.ID for device in devices}) == 4
    assert {device.health for device in devices} == {"Healthy"}
    assert {node.ID for device in devices for node in device.topology.nodes} == {1}
    units = [device.ID for device in devices]
    first, second = plugin.allocate(units[:3], units[3:]).container_responses
    assert dict(first.envs) == dict(second.envs) == {"NVIDIA_VISIBLE_DEVICES": "GPU-a"}
    assert ("/dev/nvidia3", "/dev/nvidia3", "rw") in {
        (device.container_path, device.host_path, device.permissions) for device in first.devices
    }
    with pytest.raises(grpc.RpcError) as refused:
        plugin.allocate(["GPU-b-0"])
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "GPU-b-0" in refused.value.details()
    plugin.close()


def test_a_lost_gpu_becomes_unhealthy_and_comes_back(kubelet: Kubelet, world: World) -> None:
    kubelet.start()
    _registrations(kubelet)
    lost, other = kubelet.plugin("keystage-gpu0.sock"), kubelet.plugin("keystage-gpu1.sock")
    watch = lost.watch()
    units = [device.ID for device in next(watch).devices]
    world.shown = (dataclasses.replace(GPUS[1], index=0),)
    assert {device.health for device in next(watch).devices} == {"Unhealthy"}
    with pytest.raises(grpc.RpcError) as refused:
        lost.allocate(units[:1])
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert {device.health for device in next(other.watch()).devices} == {"Healthy"}
    world.shown = GPUS
    assert {device.health for device in next(watch).devices} == {"Healthy"}
    lost.close()
    other.close()


def test_registers_anew_when_the_kubelet_restarts(kubelet: Kubelet, world: World) -> None:
    kubelet.start()
    assert _registrations(kubelet) == BOTH
    kubelet.stop()
    kubelet.start()  # removes the plugin's sockets
    assert _registrations(kubelet) == BOTH
    plugin = kubelet.plugin("keystage-gpu1.sock")
    assert len(next(plugin.watch()).devices) == 2
    plugin.close()


def test_waits_for_a_kubelet_that_refuses_at_first(kubelet: Kubelet, world: World) -> None:
    kubelet.refuse.set()
    kubelet.start()
    wait_for(lambda: (kubelet.folder / "keystage-gpu0.sock").exists(), "the plugin's socket")
    kubelet.refuse.clear()
    assert _registrations(kubelet) == BOTH


def test_process_serves_emulated_gpus_and_leaves_nothing(kubelet: Kubelet) -> None:
    kubelet.start()
    environment = {
        **os.environ,
        "KEYSTAGE_DEVICE_PLUGINS": str(kubelet.folder),
        "KEYSTAGE_EMULATED_GPUS": "2x3",
    }
    process = subprocess.Popen([sys.executable, "-m", "keystage.keysmanager.device_plugin"], env=environment)
    try:
        assert _registrations(kubelet) == BOTH
        plugin = kubelet.plugin("keystage-gpu1.sock")
        units = [device.ID for device in next(plugin.watch()).devices]
        (answer,) = plugin.allocate(units).container_responses
        assert len(units) == 3
        assert dict(answer.envs) == {"NVIDIA_VISIBLE_DEVICES": "void"}
        assert not answer.devices
        plugin.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0
    finally:
        process.kill()
        process.wait(WAIT_S)
    assert sorted(path.name for path in kubelet.folder.glob("keystage-*")) == []


@pytest.mark.gpu
def test_process_serves_the_gpus_that_this_machine_has(kubelet: Kubelet) -> None:
    """Units add up to each GPU's memory, and a share of one names that GPU and device nodes that exist."""
    kubelet.start()
    asked = "--query-gpu=index,uuid,memory.total"
    told = subprocess.check_output(["nvidia-smi", asked, "--format=csv,noheader,nounits"], text=True)
    gpus = [line.split(", ") for line in told.splitlines()]
    environment = {**os.environ, "KEYSTAGE_DEVICE_PLUGINS": str(kubelet.folder)}
    process = subprocess.Popen([sys.executable, "-m", "keystage.keysmanager.device_plugin"], env=environment)
    try:
        served = {kubelet.registered.get(timeout=WAIT_S)[2] for _ in gpus}
        assert served == {f"keystage.dev/gpu{index}" for index, _, _ in gpus}
        for index, uuid, mib in gpus:
            plugin = kubelet.plugin(f"keystage-gpu{index}.sock")
            devices = next(plugin.watch()).devices
            assert len(devices) == int(mib) // 1024
            assert {device.health for device in devices} == {"Healthy"}
            (answer,) = plugin.allocate([device.ID for device in devices][:5]).container_responses
            assert dict(answer.envs) == {"NVIDIA_VISIBLE_DEVICES": uuid}
            paths = [Path(device.host_path) for device in answer.devices]
            assert Path("/dev/nvidiactl") in paths
            assert all(path.exists() for path in paths)
            plugin.close()
    finally:
        process.kill()
        process.wait(WAIT_S)


def test_process_without_the_folder_says_which(tmp_path: Path) -> None:
    environment = {**os.environ, "KEYSTAGE_DEVICE_PLUGINS": str(tmp_path / "absent")}
    done = subprocess.run(
        [sys.executable, "-m", "keystage.keysmanager.device_plugin"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert done.returncode == 2
    assert str(tmp_path / "absent") in done.stderr
