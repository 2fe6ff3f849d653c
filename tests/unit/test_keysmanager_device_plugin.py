"""Which GPUs are advertised, and the bytes of the protocol."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from keystage.keysmanager import device_plugin_api as api
from keystage.keysmanager.device_plugin_config import DevicePluginConfig
from keystage.keysmanager.device_plugin_gpus import GIB, Inventory, NodeGpu, parse_emulated, read
from keystage.keysmanager.device_plugin_server import RESOURCE
from keystage.kubernetes.api import GPU_RESOURCE


class NvmlError(Exception):
    """As `pynvml.NVMLError`."""


class Nvml:
    """NVML as its Python package shows it, over a list of cards; None is one that fell off the bus."""

    NVMLError = NvmlError

    def __init__(self, cards: list[dict[str, object] | None]) -> None:
        self.cards = cards
        self.open = 0

    def nvmlInit(self) -> None:  # noqa: N802
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> dict[str, object]:  # noqa: N802
        card = self.cards[index]
        if card is None:
            raise NvmlError("GPU is lost")
        return card

    def nvmlDeviceGetMigMode(self, card: dict[str, object]) -> list[int]:  # noqa: N802
        if "mig" not in card:
            raise NvmlError("Not Supported")
        return [1, 1]

    def nvmlDeviceGetUUID(self, card: dict[str, object]) -> object:  # noqa: N802
        return card["uuid"]

    def nvmlDeviceGetMinorNumber(self, card: dict[str, object]) -> object:  # noqa: N802
        return card["minor"]

    def nvmlDeviceGetMemoryInfo(self, card: dict[str, object]) -> object:  # noqa: N802
        return SimpleNamespace(total=card["total"])

    def nvmlDeviceGetNumaNodeId(self, card: dict[str, object]) -> object:  # noqa: N802
        return card.get("numa", -1)


def test_bytes_are_those_of_the_protocol() -> None:
    # Written out by hand from the .proto file: field number * 8 + wire type, length, content.
    request = api.RegisterRequest(
        version="v1beta1", endpoint="a.sock", resource_name="k/gpu0", options=api.DevicePluginOptions()
    )
    assert request.SerializeToString() == (
        b"\x0a\x07v1beta1" + b"\x12\x06a.sock" + b"\x1a\x06k/gpu0" + b"\x22\x00"
    )
    device = api.Device(ID="u-0", health="Healthy", topology=api.TopologyInfo(nodes=[api.NUMANode(ID=1)]))
    inner = b"\x0a\x03u-0" + b"\x12\x07Healthy" + b"\x1a\x04\x0a\x02\x08\x01"
    assert api.ListAndWatchResponse(devices=[device]).SerializeToString() == b"\x0a\x14" + inner
    answer = api.ContainerAllocateResponse(
        envs={"A": "b"}, devices=[api.DeviceSpec(container_path="/d", host_path="/h", permissions="rw")]
    )
    assert answer.SerializeToString() == (
        b"\x0a\x06\x0a\x01A\x12\x01b" + b"\x1a\x0c\x0a\x02/d\x12\x02/h\x1a\x02rw"
    )
    asked = api.AllocateRequest.FromString(b"\x0a\x08\x0a\x02u0\x0a\x02u1")
    assert [list(c.devices_ids) for c in asked.container_requests] == [["u0", "u1"]]


@pytest.mark.parametrize(("text", "sizes"), [("", []), ("2x80", [80, 80]), ("1x24, 1x40", [24, 40])])
def test_emulated(text: str, sizes: list[int]) -> None:
    found = parse_emulated(text)
    assert [gpu.gib for gpu in found] == sizes
    assert [gpu.index for gpu in found] == list(range(len(sizes)))
    assert len({gpu.uuid for gpu in found}) == len(sizes)


@pytest.mark.parametrize("text", ["2", "x80", "2x", "-1x80", "0x80", "2x0", "2 x 80", "65x1", "60x1,5x1"])
def test_bad_emulated_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    with pytest.raises(ValueError, match="emulated GPUs"):
        parse_emulated(text)
    monkeypatch.setenv("KEYSTAGE_EMULATED_GPUS", text)
    with pytest.raises(ValidationError, match="emulated GPUs"):
        DevicePluginConfig()


def test_reads_minor_numbers_and_whole_gib() -> None:
    nvml = Nvml(
        [
            {"uuid": b"GPU-a", "minor": 3, "total": 80 * GIB - 1, "numa": 1},
            None,
            {"uuid": "GPU-c", "minor": 0, "total": 24 * GIB, "mig": True},
            {"uuid": "GPU-d", "minor": 1, "total": 24 * GIB},
        ]
    )
    found, missing = read(nvml)
    assert found == (NodeGpu(0, "GPU-a", 3, 79, numa=1), NodeGpu(3, "GPU-d", 1, 24))
    assert missing == "GPU 1: GPU is lost; GPU 2 is in MIG mode"
    assert nvml.open == 0


def test_without_driver_says_why() -> None:
    class Dead(Nvml):
        def nvmlInit(self) -> None:  # noqa: N802
            raise NvmlError("Driver Not Loaded")

    assert read(Dead([])) == ((), "no GPUs are seen: NVML does not start: Driver Not Loaded")


def test_a_lost_gpu_stays_unhealthy_and_numbers_stay() -> None:
    first, second = NodeGpu(0, "a", 0, 80), NodeGpu(1, "b", 1, 80)
    inventory = Inventory()
    assert inventory.see((first, second)) == (first, second)
    # The first one fell off the bus: NVML calls the second one 0 now.
    lost = dataclasses.replace(first, is_healthy=False)
    assert inventory.see((dataclasses.replace(second, index=0),)) == (lost, second)
    # A third one is put in: its wanted number is taken.
    third = NodeGpu(0, "c", 2, 40)
    assert inventory.see((third, second))[2] == dataclasses.replace(third, index=2)
    assert inventory.see((first, second, third))[0] == first


def test_the_controller_asks_for_the_resource_that_is_advertised() -> None:
    assert RESOURCE == GPU_RESOURCE
