"""On a machine with a GPU: the fork server leaves CUDA alone, and its children do not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.keysmanager_forks import Forks, mappings, random_bundle

from keystage.bundle import store
from keystage.keysmanager.api import Held, Progress
from keystage.models.base import Row
from keystage.models.loading import load_stage

pytestmark = pytest.mark.gpu
IDS = [3, 14, 15, 92, 65]
PATH = os.environ.get("PATH", os.defpath)
"""Kernels that no cache holds yet are linked where a replica first wants them; it has what it is given."""


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks() as running:
        yield running


def test_a_child_makes_a_context_of_its_own_and_its_parent_has_none(forks: Forks) -> None:
    for _ in range(2):
        replica = forks.spawn()
        assert replica.ask("has_cuda") is False
        assert replica.ask("cuda") == 4.0
        assert replica.ask("has_cuda") is True
    assert list(mappings(forks.process.pid, "/dev/nvidia")) == []
    opened = [str(fd.readlink()) for fd in Path(f"/proc/{forks.process.pid}/fd").iterdir()]
    assert [path for path in opened if "/dev/nvidia" in path] == []


@pytest.mark.parametrize("sharing", ["shared", "private"])
def test_a_forked_stage_on_the_device_equals_a_fresh_one(forks: Forks, tmp_path: Path, sharing: str) -> None:
    bundle = random_bundle(tmp_path, hidden=256, width=640, vocab=997)
    model = load_stage(bundle, store.load(bundle), 0, "cuda:0")
    model.open(1, len(IDS))
    expected = model.forward(torch.tensor(IDS), [Row(1, 0, len(IDS))], [0])[0].cpu()
    channel, held = forks.hold(bundle, prepare="none")
    assert isinstance(held, Held)
    replica = forks.spawn(channel, sharing="private" if sharing == "private" else "shared", PATH=PATH)
    assert replica.ask("load", str(bundle), 0, "cuda:0", "float32") == "cuda:0"
    found = torch.tensor(replica.ask("logits", IDS)[0])
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)
    replica.ask("release")
    phases = []
    while (received := replica.claim.receive()) is not None:
        assert isinstance(received[0], Progress)
        phases.append(received[0].phase)
    assert phases == ["forked", "mapped"]


def test_the_switch_keeps_parameters_on_the_host(forks: Forks, tmp_path: Path) -> None:
    bundle = random_bundle(tmp_path, hidden=256, width=640, vocab=997)
    channel, _ = forks.hold(bundle)
    replica = forks.spawn(channel, KEYSTAGE_DEVICE_COPY="0", PATH=PATH)
    assert replica.ask("load", str(bundle), 0, "cuda:0", "float32") == "cpu"
    assert len(list(mappings(replica.pid, "keystage-packed"))) > 0
