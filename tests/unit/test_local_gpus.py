"""GPUs of one machine are shared out among replicas whose functions do not say which they want."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from keystage.controller.platforms.local_cap import Machine, gpu_cap_of
from keystage.keysmanager import inventory
from keystage.keysmanager.api import Gpu
from keystage.local.gpus import DEVICE, NEXT_DEVICE, Gpus


def given(gpus: Gpus, living: dict[str, str], replica: str, function: str) -> tuple[str, str]:
    """The device of a new replica, and of the function's next one."""
    living[replica] = function
    found = gpus.assign(replica, function, "cuda", living)
    assert found.keys() == {DEVICE, NEXT_DEVICE}
    return found[DEVICE], found[NEXT_DEVICE]


def test_stages_of_a_pipeline_get_a_gpu_each_and_a_promise_is_kept() -> None:
    gpus, living = Gpus(4), dict[str, str]()
    first = [given(gpus, living, f"s{n}-0", f"s{n}") for n in range(4)]
    assert [device for device, _ in first] == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    promised = first[1][1]
    assert promised != "cuda:1"
    assert given(gpus, living, "s1-1", "s1")[0] == promised


def test_no_two_replicas_of_a_function_share_a_gpu_while_another_has_none() -> None:
    gpus, living = Gpus(3), dict[str, str]()
    given(gpus, living, "other", "other")
    devices = [given(gpus, living, f"s-{n}", "s")[0] for n in range(3)]
    assert sorted(devices) == ["cuda:0", "cuda:1", "cuda:2"]
    assert devices[-1] == "cuda:0"  # where the other one is
    del living["s-1"]
    assert given(gpus, living, "s-3", "s")[0] == devices[1]


@pytest.mark.parametrize(("count", "device"), [(0, "cuda"), (1, "cuda"), (4, "cuda:1"), (4, "cpu"), (4, "")])
def test_nothing_is_chosen_where_there_is_no_choice(count: int, device: str) -> None:
    assert Gpus(count).assign("r", "f", device, {"r"}) == {}


@pytest.mark.parametrize(
    ("shown", "count"),
    [(None, 4), ("", 0), ("2", 1), ("0,1,2,3,4,5", 4), ("1,-1,2", 1), (" 0 , 3 ", 2), ("GPU-a,GPU-b,", 2)],
)
def test_gpus_are_counted_as_processes_see_them(
    monkeypatch: pytest.MonkeyPatch, shown: str | None, count: int
) -> None:
    seen = tuple(Gpu(index=n, uuid=f"GPU-{n}", name="g", total_bytes=1, free_bytes=1) for n in range(4))
    monkeypatch.setattr("keystage.keysmanager.inventory.gpus", lambda: (seen, ""))
    environment = {} if shown is None else {"CUDA_VISIBLE_DEVICES": shown}
    assert inventory.visible(environment) == count


def test_a_machine_without_nvml_has_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = ModuleType("pynvml")

    class NVMLError(Exception):
        pass

    def init() -> None:
        raise NVMLError("no driver")

    broken.NVMLError, broken.nvmlInit = NVMLError, init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pynvml", broken)
    assert inventory.visible({}) == 0


def test_the_cap_is_a_replica_for_each_gpu_unless_one_is_named() -> None:
    assert gpu_cap_of(Machine(8, 1, 4), "cuda")[0] == 4
    assert "4 GPUs" in gpu_cap_of(Machine(8, 1, 4), "cuda")[1]
    for gpus, device in ((4, "cuda:2"), (1, "cuda"), (0, "cuda")):
        cap, reason = gpu_cap_of(Machine(8, 1, gpus), device)
        assert (cap, "share one GPU" in reason) == (1, True)
