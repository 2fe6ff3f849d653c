"""The program of a stage pod: parked, activated, refused, ended. Real processes, sockets, cgroups, models."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.keysmanager_bundles import folder_server
from support.keysmanager_daemon import Node, children, node_of, state_of
from support.pods import Cgroups, Key, Pod, cgroup_root, free_port
from support.processes import WAIT_S, get, wait_for
from support.tiny_llama import tiny_model, write_folder

from keystage.bundle import store
from keystage.bundle.split import split
from keystage.keysmanager.api import StageName
from keystage.keysmanager.pod_api import Activated, Activation, Grant

AT_ONCE_S = 8.0
"""Of a process that ends when it is told to, however slow the machine; a drain would take a minute."""
STAGES = 3
PROMPT = [3, 17, 40, 5]
SIZES = {"hidden_size": 192, "intermediate_size": 384}
"""Large enough for matrices that holders share."""
NO_TORCH = {"KEYSTAGE_DEVICE": "emulated"}
"""Starts in a third of the time, for what does not concern parameters."""


class World:
    """A bundle, a router, and what pods of it need."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bundle = split(
            write_folder(tiny_model(**SIZES), folder / "model"), STAGES, "parameters", folder / "b", "t"
        )
        self.key = Key(folder)
        self.started: list[Pod] = []
        self.router = f"tcp://127.0.0.1:{free_port()}"
        self.url = f"http://127.0.0.1:{free_port()}"
        self.env = {
            "KEYSTAGE_PIPELINE": "t",
            "KEYSTAGE_BUNDLE": str(self.bundle),
            "KEYSTAGE_ROUTER": self.router,
            "KEYSTAGE_WIRE_HOST": "127.0.0.1",
            "KEYSTAGE_WIRE_KEY_FILE": str(self.key.path),
            "KEYSTAGE_DEVICE": "cpu",
            "KEYSTAGE_DTYPE": "fp32",
        }
        self.router_process: subprocess.Popen[bytes] | None = None

    def start_router(self, **env: str) -> None:
        """Starts the router, once."""
        if self.router_process is None:
            self.router_process = subprocess.Popen(
                [sys.executable, "-m", "keystage.router.app"],
                env={
                    **os.environ, **self.env, "KEYSTAGE_HTTP": self.url.removeprefix("http://"),
                    "KEYSTAGE_RUN": str(self.folder / "router-run"), **env,
                },
            )  # fmt: skip
            wait_for(lambda: get(f"{self.url}/_/ready")[0] == 200, "router")

    def pod(self, cgroup: Path | None = None, prefix: tuple[str, ...] = (), **env: str) -> Pod:
        """Starts a pod."""
        pod = Pod(self.folder, {**self.env, **env}, cgroup, prefix)
        self.started.append(pod)
        return pod

    def parked(self, cgroup: Path | None = None, **env: str) -> Pod:
        """A pod that waits."""
        pod = self.pod(cgroup, KEYSTAGE_PARKED="1", **env)
        pod.wait_ready()
        return pod

    def activate(self, pod: Pod, body: bytes | None = None, token: str = "", **env: str) -> tuple[int, bytes]:
        """POST /_/activate; status and body."""
        wanted = Activation(function="f", env=env, decided_at_s=time.time())
        request = urllib.request.Request(
            f"{pod.url}/_/activate",
            msgspec.json.encode(wanted) if body is None else body,
            {"Authorization": f"Bearer {token or self.key.token}"},
        )
        try:
            with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    def activated(self, pod: Pod, stages: str, **env: str) -> Activated:
        """The answer to an activation that succeeds."""
        status, body = self.activate(pod, KEYSTAGE_STAGES=stages, **env)
        assert status == 200, (body, pod.log.read_text())
        return msgspec.json.decode(body, type=Activated)

    def complete(self) -> list[int]:
        """Six greedy tokens of the pipeline."""
        body = {"model": "t", "prompt": PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": True,
                "return_token_ids": True}  # fmt: skip
        status, answer = get(f"{self.url}/v1/completions", json.dumps(body).encode())
        assert status == 200, answer
        ids: list[int] = json.loads(answer)["choices"][0]["token_ids"]
        return ids

    def close(self) -> None:
        """Ends all."""
        for pod in self.started:
            pod.close()
        self.started.clear()


@pytest.fixture(scope="module")
def shared() -> Iterator[World]:
    with tempfile.TemporaryDirectory(prefix="ks", dir="/tmp") as name:
        world = World(Path(name))
        yield world
        if world.router_process is not None:
            world.router_process.kill()
            world.router_process.wait(WAIT_S)


@pytest.fixture
def world(shared: World) -> Iterator[World]:
    yield shared
    shared.close()


@pytest.fixture(scope="module")
def node(shared: World) -> Iterator[tuple[Node, str, Path]]:
    """A KeysManager that serves pods: it, its address, its socket for pods."""
    folder = shared.folder / "km"
    folder.mkdir()
    port, path = free_port(), folder / "pods" / "pods.sock"
    env = {
        "KEYSTAGE_KEYSMANAGER_PODS": str(path),
        "KEYSTAGE_KEYSMANAGER_LISTEN": f"127.0.0.1:{port}",
        "KEYSTAGE_WIRE_KEY_FILE": str(shared.key.path),
    }
    with node_of(folder, **env) as found:
        yield found, f"http://127.0.0.1:{port}", path


def expected() -> list[int]:
    """What transformers say that the model says."""
    import torch

    model = tiny_model(**SIZES)
    with torch.no_grad():
        out = model.generate(
            torch.tensor([PROMPT]), max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0
        )
    ids: list[int] = out[0, len(PROMPT) :].tolist()
    return ids


@pytest.mark.slow
@pytest.mark.skipif(cgroup_root() is None, reason="cgroups cannot be made here")
def test_parked_pods_become_a_pipeline_on_parameters_of_the_keysmanager(
    world: World, node: tuple[Node, str, Path]
) -> None:
    manager, address, path = node
    world.start_router()
    cgroups = Cgroups()
    try:
        made = [cgroups.pod() for _ in range(STAGES)]
        env = {"KEYSTAGE_KEYSMANAGER_PODS": str(path), "KEYSTAGE_BUNDLE": str(world.bundle)}
        pods = [world.parked(cgroup, **env) for _, cgroup in made]
        grants = [
            Grant(pod_uid=uid, bundle=str(world.bundle), stages=(n,)) for n, (uid, _) in enumerate(made)
        ]
        put = urllib.request.Request(
            f"{address}/v1/grants", msgspec.json.encode(grants), world.key.headers, method="PUT"
        )
        with urllib.request.urlopen(put, timeout=WAIT_S) as answer:
            assert answer.status == 204
        names = [StageName(world.bundle.as_uri(), stage) for stage in range(STAGES)]
        asyncio.run(manager.client.key_stages(names))
        identities = [stage.identity for stage in store.load(world.bundle).stages]
        wait_for(lambda: _held(manager, identities), "all stages are held")
        begun_s = time.time()
        for stage, pod in enumerate(pods):
            told = world.activated(pod, str(stage))
            assert (told.via, told.source, told.note) == ("standby", "memory", "")
            # Its matrices are the holder's pages, for all pods of the node.
            assert "memfd:keystage-packed" in Path(f"/proc/{pod.process.pid}/maps").read_text()
            reached = [told.phases[p] for p in ("begun", "mapped", "forward", "ready")]
            assert begun_s - 1 < reached[0] <= reached[1] <= reached[2] <= reached[3] < time.time() + 1
            assert get(f"{pod.url}/_/ready") == (200, b"ready")
            assert json.loads(get(f"{pod.url}/_/start")[1])["ready_s"] > 0
        wait_for(lambda: _ready_stages(world.url) == set(range(STAGES)), "the router knows all stages")
        assert world.complete() == expected()
        for pod in pods:
            code, took_s = pod.end()
            assert (code, took_s < AT_ONCE_S) == (0, True)
    finally:
        world.close()
        cgroups.close()


def _held(manager: Node, identities: list[str]) -> bool:
    holders = asyncio.run(manager.client.status()).holders
    return {h.identity for h in holders if h.state == "ready" and h.pid} >= set(identities)


def _ready_stages(url: str) -> set[int]:
    replicas = json.loads(get(f"{url}/_/stats")[1])["replicas"]
    return {stage for r in replicas if r["state"] == "ready" for stage in r["stages"]}


@pytest.mark.slow
def test_without_a_keysmanager_the_bundle_is_read_and_the_note_says_why(world: World) -> None:
    world.start_router()
    silent = world.folder / "nobody.sock"
    first = world.parked()
    second = world.parked(KEYSTAGE_KEYSMANAGER_PODS=str(silent))
    third = world.pod(KEYSTAGE_STAGES="2")  # a pod that was never parked
    told = world.activated(first, "0")
    assert (told.source, told.note) == (
        "", "no KeysManager on this node (KEYSTAGE_KEYSMANAGER_PODS is not set)",
    )  # fmt: skip
    told = world.activated(second, "1")
    assert told.source == ""
    assert told.note.startswith(f"no KeysManager at {silent}")
    third.wait_ready()
    assert world.activate(third, KEYSTAGE_STAGES="2")[0] == 404
    wait_for(lambda: _ready_stages(world.url) == set(range(STAGES)), "the router knows all stages")
    assert world.complete() == expected()


@pytest.mark.slow
@pytest.mark.skipif(cgroup_root() is None, reason="cgroups cannot be made here")
def test_a_refusal_is_a_note(world: World, node: tuple[Node, str, Path]) -> None:
    cgroups = Cgroups()
    try:
        uid, cgroup = cgroups.pod()
        pod = world.parked(cgroup, KEYSTAGE_KEYSMANAGER_PODS=str(node[2]))
        told = world.activated(pod, "1")
        assert told.source == ""
        assert told.note == f"stage 1 of {world.bundle.as_uri()} is not granted to pod {uid}"
    finally:
        world.close()
        cgroups.close()


def test_an_activation_is_proved_well_formed_and_done_once(world: World) -> None:
    pod = world.parked(**NO_TORCH)
    assert json.loads(get(f"{pod.url}/_/ready")[1]) == {"parked": True}
    assert get(f"{pod.url}/_/health") == (200, b"parked")
    assert get(f"{pod.url}/")[0] == 503
    assert get(f"{pod.url}/_/activate")[0] == 401
    assert world.activate(pod, token="another", KEYSTAGE_STAGES="0")[0] == 401
    good = {"function": "f", "env": {"KEYSTAGE_STAGES": "0"}, "decided_at_s": 1.0}
    for body in (
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        json.dumps({**good, "env": {}}).encode(),
        json.dumps({**good, "env": {"KEYSTAGE_STAGES": "x"}}).encode(),
        json.dumps({**good, "env": {"KEYSTAGE_STAGES": "0", "LD_PRELOAD": "/x"}}).encode(),
        json.dumps({**good, "env": {"KEYSTAGE_STAGES": "0", "KEYSTAGE_X": "a\0b"}}).encode(),
        json.dumps({**good, "decided_at_s": "now"}).encode(),
    ):
        assert world.activate(pod, body)[0] == 400, body
    assert world.activate(pod, b"x" * 300_000)[0] == 413
    assert json.loads(get(f"{pod.url}/_/ready")[1]) == {"parked": True}
    world.activated(pod, "0")
    assert world.activate(pod, KEYSTAGE_STAGES="0")[0] == 409
    assert world.activate(pod, token="another", KEYSTAGE_STAGES="0")[0] == 401


def test_an_activation_that_fails_gives_the_worker_s_reason_and_ends_the_pod(world: World) -> None:
    pod = world.parked(**NO_TORCH)
    status, body = world.activate(pod, KEYSTAGE_STAGES="7")
    assert status == 500
    assert f"t has stages 0..{STAGES - 1}" in body.decode()
    assert pod.process.wait(WAIT_S) == 2
    pod = world.parked(**NO_TORCH)
    status, body = world.activate(pod, KEYSTAGE_STAGES="0", KEYSTAGE_BUNDLE="/nowhere")
    assert status == 500
    assert "/nowhere/pipeline.json" in body.decode()
    assert pod.process.wait(WAIT_S) == 2
    pod = world.parked(**NO_TORCH)
    status, body = world.activate(pod, KEYSTAGE_STAGES="0", KEYSTAGE_MAX_BATCH="none")
    assert status == 500
    assert "KEYSTAGE_MAX_BATCH=none" in body.decode()
    assert pod.process.wait(WAIT_S) == 2


def test_sigterm_ends_a_parked_pod_at_once_whatever_it_does(world: World) -> None:
    importing = world.pod(KEYSTAGE_PARKED="1")
    wait_for(lambda: get(f"{importing.url}/_/health")[0] == 200, "its face")
    code, took_s = importing.end()
    assert (code, took_s < AT_ONCE_S) == (0, True)
    parked = world.parked(**NO_TORCH)
    code, took_s = parked.end()
    assert (code, took_s < AT_ONCE_S) == (0, True)


@pytest.mark.slow
def test_a_home_over_http_is_fetched_by_pod_and_router(world: World) -> None:
    """Without a KeysManager: the description while parked, the stage's file once it is known."""
    with folder_server(world.bundle) as home:
        pod = world.parked(KEYSTAGE_BUNDLE=home)
        told = world.activated(pod, "1")
        assert told.source == ""
        left = sorted(path.name for path in world.folder.glob("r*/bundles/*/*"))
        assert left == ["pipeline.json"]  # the stage's file went once it was in the stage
        whole = world.pod(KEYSTAGE_BUNDLE=home, KEYSTAGE_STAGES="0-2")
        whole.wait_ready()
        url = f"http://127.0.0.1:{free_port()}"
        env = {
            "KEYSTAGE_BUNDLE": home,
            "KEYSTAGE_ROUTER": f"tcp://127.0.0.1:{free_port()}",
            "KEYSTAGE_HTTP": url.removeprefix("http://"),
            "KEYSTAGE_RUN": str(world.folder / "home-run"),
        }
        router = subprocess.Popen(
            [sys.executable, "-m", "keystage.router.app"], env={**os.environ, **world.env, **env}
        )
        try:
            wait_for(lambda: get(f"{url}/_/ready")[0] == 200, "a router with a home")
        finally:
            router.kill()
            router.wait(WAIT_S)
    gone = world.pod(KEYSTAGE_BUNDLE="http://127.0.0.1:9/b", KEYSTAGE_PARKED="1")
    assert gone.process.wait(WAIT_S) == 2
    assert "http://127.0.0.1:9/b/pipeline.json" in gone.log.read_text()


@pytest.mark.parametrize(
    ("env", "named"),
    [
        ({"KEYSTAGE_PARKED": "1", "KEYSTAGE_WIRE_KEY_FILE": ""}, "KEYSTAGE_WIRE_KEY_FILE"),
        ({"KEYSTAGE_STAGES": ""}, "neither KEYSTAGE_STAGES nor KEYSTAGE_PARKED"),
        ({"KEYSTAGE_PARKED": "1", "KEYSTAGE_WIRE_KEY_FILE": "/nowhere"}, "/nowhere cannot be read"),
        ({"KEYSTAGE_STAGES": "0", "KEYSTAGE_HTTP": "x"}, "cannot listen on 'x'"),
        ({"KEYSTAGE_STAGES": "x"}, "KEYSTAGE_STAGES='x'"),
    ],
)
def test_bad_settings_end_it_by_name(world: World, env: dict[str, str], named: str) -> None:
    pod = world.pod(**env)
    assert pod.process.wait(WAIT_S) == 2
    assert named in pod.log.read_text()


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a PID namespace")
def test_as_process_one_it_reaps_what_it_inherits_and_ends_on_sigterm(world: World) -> None:
    pod = world.pod(
        prefix=("unshare", "--pid", "--fork", "--kill-child", "--mount-proc"),
        KEYSTAGE_PARKED="1",
        KEYSTAGE_DEVICE="emulated",
    )
    pod.wait_ready()
    (first,) = children(pod.process.pid)
    assert Path(f"/proc/{first}/status").read_text().split("NSpid:")[1].split()[:2][1] == "1"
    # An orphan within the namespace: its parent ends at once, it a moment later.
    enter = ["nsenter", "-t", str(first), "-p", "-m", "sh", "-c", "(sleep 0.2 & echo $!) | cat"]
    subprocess.run(enter, check=True, capture_output=True, timeout=WAIT_S)
    wait_for(lambda: not children(first), "its orphans are reaped")
    begun_s = time.monotonic()
    os.kill(first, 15)
    wait_for(lambda: state_of(first) in ("", "Z"), "process 1 ended")
    assert time.monotonic() - begun_s < AT_ONCE_S


def test_an_emulated_stage_needs_no_torch(world: World) -> None:
    from keystage.bundle.api import emulated

    folder = world.folder / "em"
    folder.mkdir()
    (folder / "pipeline.json").write_bytes(msgspec.json.encode(emulated("em", 2, execution="looping")))
    pod = world.parked(KEYSTAGE_DEVICE="emulated", KEYSTAGE_BUNDLE=str(folder), KEYSTAGE_PIPELINE="em")
    told: Any = world.activated(pod, "0-1")
    assert (told.via, told.source) == ("standby", "")
    assert "libtorch" not in Path(f"/proc/{pod.process.pid}/maps").read_text()
