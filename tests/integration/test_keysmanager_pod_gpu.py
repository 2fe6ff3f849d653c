"""Parked pods on a GPU: through the arena that was prepared, beside it, and without a KeysManager."""

from __future__ import annotations

import tempfile
import time
import urllib.request
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from support.keysmanager_daemon import node_of
from support.keysmanager_forks import random_bundle
from support.pods import Cgroups, Key, Pod, cgroup_root, free_port
from support.processes import WAIT_S, get

from keystage.bundle import store
from keystage.keysmanager.pod_api import Activated, Activation, Grant
from keystage.models.base import Row
from keystage.models.loading import load_stage

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]
HIDDEN = 512


def expected(bundle: Path, stage: int, x: torch.Tensor) -> torch.Tensor:
    """What the stage computes on the CPU."""
    pipeline = store.load(bundle)
    model = load_stage(bundle, pipeline, stage, "cpu")
    model.open(1, 8)
    return model.forward(x, [Row(1, 0, len(x))], [0])


@pytest.mark.skipif(cgroup_root() is None, reason="cgroups cannot be made here")
@pytest.mark.timeout(300)
def test_a_parked_pod_fills_its_arena_or_makes_another(capsys: pytest.CaptureFixture[str]) -> None:
    with tempfile.TemporaryDirectory(prefix="ks", dir="/tmp") as name:
        folder = Path(name)
        bundle = random_bundle(folder / "b", hidden=HIDDEN, width=1536, layers=12, vocab=1024, stages=4)
        key, port, cgroups = Key(folder), free_port(), Cgroups()
        (folder / "km").mkdir()
        path = folder / "km" / "pods.sock"
        manager = {
            "KEYSTAGE_KEYSMANAGER_PODS": str(path), "KEYSTAGE_KEYSMANAGER_LISTEN": f"127.0.0.1:{port}",
            "KEYSTAGE_WIRE_KEY_FILE": str(key.path),
        }  # fmt: skip
        env = {
            "KEYSTAGE_PIPELINE": "random", "KEYSTAGE_BUNDLE": str(bundle), "KEYSTAGE_DEVICE": "cuda",
            "KEYSTAGE_WIRE_KEY_FILE": str(key.path), "KEYSTAGE_WIRE_HOST": "127.0.0.1",
            "KEYSTAGE_ROUTER": f"tcp://127.0.0.1:{free_port()}", "KEYSTAGE_PARKED": "1",
        }  # fmt: skip
        started: list[Pod] = []
        try:
            with node_of(folder / "km", **manager):
                made = [cgroups.pod() for _ in range(2)]
                for _, cgroup in made:
                    started.append(Pod(folder, {**env, "KEYSTAGE_KEYSMANAGER_PODS": str(path)}, cgroup))
                started.append(Pod(folder, env))
                until_s = time.monotonic() + 120
                while not all(pod.is_ready() for pod in started):
                    assert time.monotonic() < until_s, started[0].log.read_text()
                    time.sleep(0.05)
                grants = [Grant(pod_uid=uid, bundle=str(bundle), stages=(0, 1)) for uid, _ in made]
                put = urllib.request.Request(
                    f"http://127.0.0.1:{port}/v1/grants",
                    msgspec.json.encode(grants),
                    key.headers,
                    method="PUT",
                )
                urllib.request.urlopen(put, timeout=WAIT_S).close()
                for pod, stage, source in zip(
                    started, (1, 0, 2), ({"disk", "memory"},) * 2 + ({""},), strict=True
                ):
                    wanted = Activation(
                        function="f", env={"KEYSTAGE_STAGES": str(stage)}, decided_at_s=time.time()
                    )
                    request = urllib.request.Request(
                        f"{pod.url}/_/activate", msgspec.json.encode(wanted), key.headers
                    )
                    begun_s = time.monotonic()
                    with urllib.request.urlopen(request, timeout=60) as answer:
                        told = msgspec.json.decode(answer.read(), type=Activated)
                    took_s = time.monotonic() - begun_s
                    with capsys.disabled():
                        print(f"stage {stage}: {took_s:.3f} s, {told}")
                    assert told.source in source, pod.log.read_text()
                    is_first = stage == 0
                    x = torch.tensor([5, 6, 7]) if is_first else torch.randn(3, HIDDEN)
                    body = save_tensors({"ids" if is_first else "hidden": x})
                    status, given = get(f"{pod.url}/", body)
                    assert status == 200, given
                    (hidden,) = load_tensors(given).values()
                    assert torch.allclose(hidden, expected(bundle, stage, x), rtol=1e-2, atol=1e-2)
                    assert ("copied" in pod.log.read_text()) is (source != {""})
                for pod in started:
                    code, took_s = pod.end()
                    with capsys.disabled():
                        print(f"ended in {took_s:.2f} s")
                    assert (code, took_s < 2.0) == (0, True)
        finally:
            for pod in started:
                pod.close()
            cgroups.close()
