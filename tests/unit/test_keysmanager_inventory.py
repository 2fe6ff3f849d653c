"""GPUs as NVML tells them, and a reason where it tells none."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from types import SimpleNamespace

import pytest

from keystage.keysmanager import inventory
from keystage.keysmanager.api import Gpu


class Nvml:
    """The few calls of `pynvml` that are used, on a machine with two GPUs of which one is lost."""

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        self.is_open = False

    def nvmlInit(self) -> None:  # noqa: N802
        self.is_open = True

    def nvmlShutdown(self) -> None:  # noqa: N802
        assert self.is_open
        self.is_open = False

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        if index == 1:
            raise self.NVMLError("GPU is lost")
        return index

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(total=100, free=60)

    def nvmlDeviceGetUUID(self, handle: int) -> bytes:  # noqa: N802
        return b"GPU-1"

    def nvmlDeviceGetName(self, handle: int) -> str:  # noqa: N802
        return "H"


def test_a_lost_gpu_does_not_hide_the_others() -> None:
    nvml = Nvml()
    assert inventory.gpus(nvml) == (
        (Gpu(index=0, uuid="GPU-1", name="H", total_bytes=100, free_bytes=60),),
        "GPU 1: GPU is lost",
    )
    assert not nvml.is_open


def test_a_driver_that_does_not_answer_is_a_reason() -> None:
    class Broken(Nvml):
        def nvmlDeviceGetCount(self) -> int:  # noqa: N802
            raise self.NVMLError("driver not loaded")

    nvml = Broken()
    assert inventory.gpus(nvml) == ((), "no GPUs are seen: NVML: driver not loaded")
    assert not nvml.is_open


def test_without_the_package_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    found, reason = inventory.gpus()
    assert found == ()
    assert "nvidia-ml-py" in reason


@pytest.mark.skipif(importlib.util.find_spec("pynvml") is None, reason="nvidia-ml-py is not installed")
def test_the_real_one_tells_gpus_or_why_not_and_needs_no_torch() -> None:
    script = (
        "import sys; from keystage.keysmanager import inventory; found, reason = inventory.gpus();"
        "assert bool(found) != bool(reason), (found, reason);"
        "assert all(0 <= g.free_bytes <= g.total_bytes for g in found);"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
