"""A CUDA context that an illegal access broke is told from an ordinary failure: in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

BREAKS = """
import torch
from keystage.worker.device_health import DeviceLostError, room

device = torch.device("cuda:0")
table = torch.zeros(4, device=device)
assert "bytes free" in room(device, "a shape that does not fit", ValueError("no"))
try:
    table[torch.tensor([1 << 20], device=device)].cpu()
except RuntimeError as error:
    try:
        room(device, "module m, 3 messages", error)
    except DeviceLostError as lost:
        print("lost:", lost)
"""


def test_a_broken_context_is_named() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", BREAKS], capture_output=True, text=True, timeout=120, check=False
    )
    assert "lost: module m, 3 messages: " in ended.stdout, ended.stderr[-2000:]
