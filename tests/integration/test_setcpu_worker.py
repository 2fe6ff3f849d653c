"""A real worker gets other threads and cores while it runs: same process, same results."""

from __future__ import annotations

import asyncio
import functools
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load, save
from support.processes import WAIT_S, EmulatedFunction, get, wait_for
from support.tiny_llama import tiny_model, write_folder

from keystage.bundle.split import split
from keystage.bundle.store import load as load_bundle
from keystage.controller.domain.decision import SetCpu, SetReplicas
from keystage.controller.platforms.local import LocalPlatform
from keystage.local.pipeline import deployments_for
from keystage.local.world import LocalWorld

STAGE = "tiny-stage-1"


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="kst-", dir="/tmp"))
    yield path
    shutil.rmtree(path)


def threads(address: str) -> int:
    status, body = get(f"http://{address}/_/threads")
    assert status == 200
    return int(msgspec.json.decode(body)["threads"])


def _has_threads(address: str, count: int) -> bool:
    return threads(address) == count


def affinities(pid: int) -> set[frozenset[int]]:
    """The different core sets of a process' threads."""
    return {frozenset(os.sched_getaffinity(t.id)) for t in psutil.Process(pid).threads()}


def put_threads(url: str, body: bytes, token: str = "") -> int:
    import urllib.error
    import urllib.request

    request = urllib.request.Request(f"{url}/_/threads", data=body, method="PUT")
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


async def steer(folder: Path, bundle: Path) -> None:
    async with LocalWorld(folder / "home", gateway_port=None, controller=False) as world:
        platform = LocalPlatform(world.home.control, world.home.path, timeout_s=5.0)
        pipeline = load_bundle(bundle)
        shape = (5, pipeline.hidden_size)
        hidden = torch.from_numpy(np.random.default_rng(1).normal(size=shape).astype(np.float32))
        await world.deploy(*deployments_for(bundle, pipeline))
        (before,) = await world.wait_ready(STAGE, 1, 60.0)
        url = f"http://{before.address}/"
        first = await asyncio.to_thread(get, url, save({"hidden": hidden}))
        assert first[0] == 200, first
        assert await asyncio.to_thread(threads, before.address) == 1
        usable = os.sched_getaffinity(0)
        for cores in (1, min(2, len(usable)), 2):
            await asyncio.to_thread(platform.apply, [SetCpu(STAGE, float(cores))])
            has_them = functools.partial(_has_threads, before.address, cores)
            await asyncio.to_thread(wait_for, has_them, f"{cores} threads")
            sets = affinities(before.pid)
            assert len(sets) == 1
            assert len(next(iter(sets))) == min(cores, len(usable))
            status, body = await asyncio.to_thread(get, url, save({"hidden": hidden}))
            assert status == 200
            for name, value in load(first[1]).items():
                torch.testing.assert_close(load(body)[name], value, rtol=1e-5, atol=1e-6)
        (after,) = world.replicas(STAGE)
        assert (after.pid, after.restarts, after.state) == (before.pid, 0, "ready")
        await asyncio.to_thread(platform.apply, [SetReplicas(STAGE, 2)])
        both = await world.wait_ready(STAGE, 2, 60.0)
        assert [await asyncio.to_thread(threads, r.address) for r in both] == [2, 2]
        assert world.function(STAGE).cores == 2.0
        platform.close()


@pytest.mark.slow
def test_a_running_worker_gets_threads_and_cores_without_a_restart(folder: Path) -> None:
    bundle = split(write_folder(tiny_model(), folder / "model"), 2, "uniform", folder / "bundle", "tiny")
    asyncio.run(steer(folder, bundle))


def test_threads_are_asked_for_over_http_and_nonsense_is_refused(folder: Path) -> None:
    function = EmulatedFunction(folder, "looping", 1)
    try:
        token = "only-the-supervisor-knows"
        file = folder / "token"
        file.write_text(token)
        file.chmod(0o600)
        process, url = function.start(
            "worker", "w0", KEYSTAGE_STAGES="0", KEYSTAGE_INTERNAL_TOKEN_FILE=str(file)
        )
        for wrong in ("", token + "x", token[:-1]):
            assert put_threads(url, b'{"threads": 2}', wrong) == 401
        assert get(f"{url}/_/threads") == (200, b'{"threads":1}')
        assert put_threads(url, b'{"threads": 3}', token) == 202
        wait_for(lambda: get(f"{url}/_/threads") == (200, b'{"threads":3}'), "three threads")
        for body in (b'{"threads": 0}', b'{"threads": 1025}', b"{", b'{"threads": "2"}'):
            assert put_threads(url, body, token) == 400
        assert put_threads(url, b" " * 2000, token) == 413
        assert get(f"{url}/_/threads", b"{}")[0] == 405
        assert get(f"{url}/_/threads") == (200, b'{"threads":3}')
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0
    finally:
        function.stop()
