"""Secrets, time limits and readiness of real replicas under a real supervisor."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shlex
import subprocess
import sys
from collections.abc import Coroutine
from pathlib import Path

import msgspec
import pytest
from support.local_function import PYTHON, function

from keystage.bundle.api import emulated
from keystage.local import private_mount
from keystage.local.api import Deployment
from keystage.local.errors import BadSecret
from keystage.local.pipeline import deployments_for
from keystage.local.private_mount import SECRETS, show
from keystage.local.world import LocalWorld

READER = """
import hashlib, http.server, os, sys
folder = os.environ["secret_mount_path"]
for name in sorted(os.listdir(folder)):
    value = open(os.path.join(folder, name), "rb").read()
    print(name, hashlib.sha256(value).hexdigest(), flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), http.server.SimpleHTTPRequestHandler).serve_forever()
"""


def reader(*secrets: str, **labels: str) -> Deployment:
    command = f"{PYTHON} -c {shlex.quote(READER)} $PORT"
    return Deployment(service="reader", envProcess=command, secrets=list(secrets), labels=labels)


def bounded(work: Coroutine[None, None, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60.0))


def world(tmp_path: Path) -> LocalWorld:
    return LocalWorld(tmp_path / "state", gateway_port=None, controller=False)


async def told(w: LocalWorld, replica: str, lines: int) -> list[str]:
    """What a replica printed, once it is so much, without its server's log."""
    while True:
        rows = w.supervisor.log("reader", tail=None, since_s=0.0)
        found = [
            line for _, who, line in rows if who == replica and not line.startswith(("127.", "keystage: "))
        ]
        if len(found) >= lines:
            return found
        await asyncio.sleep(0.02)


def digest(value: bytes) -> str:
    return hashlib.sha256(value).hexdigest()


def test_a_replica_reads_its_own_secrets_as_they_were_when_it_started(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path) as w:
            secrets = w.supervisor.secrets
            for name in ("a", "b", "other"):
                secrets.put(name, b"value of " + name.encode())
            with pytest.raises(BadSecret, match="function reader: secret gone does not exist"):
                await w.deploy(reader("a", "gone"))
            await w.deploy(reader("a", "b"))
            (first,) = await w.wait_ready("reader")
            before = [f"a {digest(b'value of a')}", f"b {digest(b'value of b')}"]
            assert await told(w, first.replica, 2) == before
            if not SECRETS.is_dir():
                why = "keystage: secrets are in the folder of secret_mount_path alone: "
                said = [line for _, _, line in w.supervisor.log("reader", tail=None, since_s=0.0)]
                assert said[0] == f"{why}{SECRETS} does not exist on this machine"

            secrets.put("a", b"new")
            await w.scale("reader", 2)
            second = (await w.wait_ready("reader", 2))[1]
            assert await told(w, second.replica, 2) == [f"a {digest(b'new')}", before[1]]
            folder = w.home.replica_secrets
            assert (folder / first.replica / "a").read_bytes() == b"value of a"

            secrets.delete("b")
            await w.scale("reader", 3)
            while not any(r.state == "failed" for r in w.replicas("reader")):
                await w.supervisor.watch(w.supervisor.view().version, 5.0)
            reasons = [r.reason for r in w.replicas("reader") if r.state == "failed"]
            assert reasons == ["was not started: function reader: secret b does not exist: create it first"]
            assert {r.replica for r in w.replicas("reader") if r.state == "ready"} == {
                first.replica,
                second.replica,
            }

            await w.scale("reader", 0)
            while w.replicas("reader"):
                await w.supervisor.watch(w.supervisor.view().version, 5.0)
            assert list(folder.iterdir()) == []
            assert b"value of" not in msgspec.json.encode(w.supervisor.view())
            kept = [f for f in w.home.path.rglob("*") if f.is_file() and f.parent.name != "secrets"]
            assert [f.name for f in kept if b"value of" in f.read_bytes()] == []
            run_folder = w.home.run
        assert not run_folder.exists()

    bounded(run())


def test_router_and_stage_have_theirs_too(tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    pipeline = emulated("demo", 1, execution="single-pass")
    (bundle / "pipeline.json").write_bytes(msgspec.json.encode(pipeline))
    deployments = deployments_for(bundle, pipeline, device="emulated:alpha=0,beta=0")

    async def run() -> None:
        async with world(tmp_path) as w:
            w.supervisor.secrets.put("key", b"1")
            for deployment in deployments:
                await w.deploy(msgspec.structs.replace(deployment, secrets=["key"]))
            for deployment in deployments:
                (replica,) = await w.wait_ready(deployment.service)
                folder = w.home.replica_secrets / replica.replica
                assert (folder / "key").read_bytes() == b"1"
                environment = Path(f"/proc/{replica.pid}/environ").read_bytes().split(b"\0")
                assert f"secret_mount_path={folder}".encode() in environment
                assert f"OPENFAAS_NAME={deployment.service}".encode() in environment
                assert b"exec_timeout=10m0s" in environment

    bounded(run())


SLOW_TO_BE_READY = """
import http.server, sys
asked = []
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        asked.append(self.path)
        is_ready = self.path == "/up" and asked.count("/up") > 3
        self.send_response(200 if is_ready or self.path == "/well" else 503 if self.path == "/up" else 500)
        self.end_headers()
        print(self.path, flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_the_path_that_a_deployer_states_decides_on_readiness(tmp_path: Path) -> None:
    command = f"{PYTHON} -c {shlex.quote(SLOW_TO_BE_READY)} $PORT"
    annotations = {"com.openfaas.ready.http.path": "/up", "com.openfaas.health.http.path": "/well"}
    stated = Deployment(service="reader", envProcess=command, annotations=annotations)

    async def run() -> None:
        async with world(tmp_path) as w:
            await w.deploy(stated)
            (replica,) = await w.wait_ready("reader")
            lines = await told(w, replica.replica, 5)
            assert lines[:5] == ["/up", "/up", "/up", "/up", "/well"]
            await w.deploy(msgspec.structs.replace(stated, annotations={}))  # answers 500 there: it is open
            (replica,) = await w.wait_ready("reader")
            assert await told(w, replica.replica, 1) == ["/_/ready"]

    bounded(run())


def test_an_echo_is_ready_by_its_open_port(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path) as w:
            await w.deploy(function())
            await w.wait_ready("echo")

    bounded(run())


MOUNT = """
import sys
from pathlib import Path
from keystage.local.private_mount import show
folder, at = sys.argv[1:]
fault = show(folder, Path(at))
if fault:
    sys.exit(fault)
print((Path(at) / "key").read_text(), sorted(p.name for p in Path(at).iterdir()))
"""


def test_a_mount_of_its_own_is_seen_by_nobody_else(tmp_path: Path) -> None:
    folder, at = tmp_path / "mine", tmp_path / "var"
    folder.mkdir()
    at.mkdir()
    (folder / "key").write_text("value")
    (at / "host").write_text("host")
    done = subprocess.run(
        [sys.executable, "-c", MOUNT, str(folder), str(at)], capture_output=True, text=True, check=False
    )
    if may_mount():
        assert "no mount namespace" in done.stderr
        return
    assert done.stdout == "value ['key']\n"
    assert [f.name for f in at.iterdir()] == ["host"]


AT_THE_MOUNT = """
import http.server, os, sys
for path in (sys.argv[2], os.environ["secret_mount_path"]):
    print({name: open(os.path.join(path, name)).read() for name in sorted(os.listdir(path))}, flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), http.server.SimpleHTTPRequestHandler).serve_forever()
"""


def may_mount() -> str:
    """Why a process of ours may have no mount namespace; empty when it may."""
    user = ["--user", "--map-current-user", "--keep-caps"] if os.getuid() else []
    words = ["unshare", "--mount", *user, "true"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.stderr.strip() if done.returncode else ""


def test_a_replica_finds_its_secrets_where_openfaas_mounts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In a container that may make no mount namespace a replica sees what is there, and its own folder.
    seen = "{'host': 'host'}" if may_mount() else "{'key': 'value'}"
    at = tmp_path / "var"
    at.mkdir()
    (at / "host").write_text("host")
    assert Path("/var/openfaas/secrets") == private_mount.SECRETS
    monkeypatch.setattr(private_mount, "SECRETS", at)
    command = f"{PYTHON} -c {shlex.quote(AT_THE_MOUNT)} $PORT {at}"
    deployment = Deployment(service="reader", envProcess=command, secrets=["key"])

    async def run() -> None:
        async with world(tmp_path) as w:
            w.supervisor.secrets.put("key", b"value")
            w.supervisor.secrets.put("other", b"of another")
            await w.deploy(deployment)
            (replica,) = await w.wait_ready("reader")
            assert (await told(w, replica.replica, 2))[-2:] == [seen, "{'key': 'value'}"]
            assert [f.name for f in at.iterdir()] == ["host"]

    bounded(run())


def test_without_the_folder_on_the_host_nothing_is_mounted(tmp_path: Path) -> None:
    namespace = Path("/proc/self/ns/mnt").readlink()
    assert show(str(tmp_path), tmp_path / "absent") == f"{tmp_path}/absent does not exist on this machine"
    assert Path("/proc/self/ns/mnt").readlink() == namespace
