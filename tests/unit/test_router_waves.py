"""How many waves a path has: one for each device that can work at the same time."""

from __future__ import annotations

import pytest

from keystage.router.paths import waves_over
from keystage.wire.api import WIRE_VERSION, Hello


def _hello(name: str, device: str, node: str = "here") -> Hello:
    return Hello(WIRE_VERSION, "p", (0,), name, "b", device, 1, 16, 1, name, 1, node, True)


@pytest.mark.parametrize(
    ("devices", "waves"),
    [
        (["cuda:0"] * 8, 1),
        (["cuda:0", "cuda:1", "cuda:0", "cuda:1"], 2),
        (["cpu"] * 4, 2),
        (["cpu"], 1),
        (["emulated"] * 3, 3),
        (["cuda:0", "cpu", "cpu", "cpu"], 3),
    ],
)
def test_one_wave_for_each_device(devices: list[str], waves: int) -> None:
    workers = [_hello(f"w{i}", device) for i, device in enumerate(devices)]
    assert waves_over(workers, "here", cores=2) == waves


def test_equal_devices_of_two_nodes_are_two_and_a_worker_twice_on_a_path_is_one() -> None:
    first, second = _hello("a", "cuda:0"), _hello("b", "cuda:0", "there")
    assert waves_over([first, second, first], "here", cores=2) == 2
    assert waves_over([_hello(f"c{i}", "cpu", "there") for i in range(5)], "here", cores=2) == 5
