"""The KeysManager's socket for pods: who gets what. Real daemon, real cgroups, real processes in them."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.keysmanager_daemon import Node, node_of, write_bundle
from support.pods import TESTS, Cgroups, Key, cgroup_root, free_port, within
from support.processes import WAIT_S, wait_for

from keystage.keysmanager.pod_api import Grant

pytestmark = pytest.mark.skipif(cgroup_root() is None, reason="cgroups cannot be made here")


class World:
    """A daemon with a socket for pods, a bundle, and pods."""

    def __init__(self, node: Node, key: Key, address: str, bundle: Path, cgroups: Cgroups) -> None:
        self.node, self.key, self.address, self.bundle, self.cgroups = node, key, address, bundle, cgroups
        self.socket = node.folder / "pods" / "pods.sock"

    def grant(self, *grants: Grant, token: str = "") -> int:
        """Tells the daemon; its status."""
        return self.put(msgspec.json.encode(grants), token or self.key.token)[0]

    def put(self, body: bytes, token: str) -> tuple[int, bytes]:
        """PUT /v1/grants."""
        request = urllib.request.Request(
            f"{self.address}/v1/grants", body, {"Authorization": f"Bearer {token}"}, method="PUT"
        )
        try:
            with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    def granted(self, uid: str, *stages: int) -> Grant:
        """A grant for stages of the bundle."""
        return Grant(pod_uid=uid, bundle=str(self.bundle), stages=stages)

    def start(self, cgroup: Path | None, *arguments: str) -> subprocess.Popen[str]:
        """A process in a pod (or in none) that asks."""
        command = [
            sys.executable,
            "-m",
            "support.pod_asker",
            str(self.socket),
            self.bundle.as_uri(),
            *arguments,
        ]
        return subprocess.Popen(
            command if cgroup is None else within(cgroup, command),
            env={**os.environ, "PYTHONPATH": f"{TESTS}:{os.environ.get('PYTHONPATH', '')}"},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip

    def ask(self, cgroup: Path | None, *arguments: str) -> dict[str, Any]:
        """What came of it."""
        output, _ = self.start(cgroup, *arguments).communicate(timeout=WAIT_S)
        told: dict[str, Any] = json.loads(output)
        return told

    def claims(self) -> int:
        """Consumers that map something now."""
        status = asyncio.run(self.node.client.status())
        return sum(holder.claims for holder in status.holders)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("pods")
    write_bundle(folder / "b", "p", [300_000, 200_001], 1)
    key, port, cgroups = Key(folder), free_port(), Cgroups()
    env = {
        "KEYSTAGE_KEYSMANAGER_PODS": str(folder / "pods" / "pods.sock"),
        "KEYSTAGE_KEYSMANAGER_LISTEN": f"127.0.0.1:{port}",
        "KEYSTAGE_WIRE_KEY_FILE": str(key.path),
    }
    try:
        with node_of(folder, **env) as node:
            yield World(node, key, f"http://127.0.0.1:{port}", folder / "b", cgroups)
    finally:
        cgroups.close()


def test_a_pod_gets_what_was_granted_to_it_and_cannot_write_it(world: World) -> None:
    uid, cgroup = world.cgroups.pod()
    assert world.grant(world.granted(uid, 0)) == 204
    told = world.ask(cgroup, "0")
    assert told["status"] == 200
    assert told["first"] == (world.bundle / "stage-00.safetensors").read_bytes()[:16].hex()
    done = [way for way, refusal in told["writes"].items() if not refusal]
    assert not done, told["writes"]
    assert len(told["writes"]) == 11
    assert world.ask(cgroup, "0")["first"] == told["first"]


@pytest.mark.slow
def test_another_stage_another_pod_and_no_pod_are_refused_by_name(world: World) -> None:
    uid, cgroup = world.cgroups.pod()
    other, others_cgroup = world.cgroups.pod()
    world.grant(world.granted(uid, 0), Grant(pod_uid=other, bundle="file:///elsewhere", stages=(0, 1)))
    told = world.ask(cgroup, "1")
    assert (told["status"], told["reason"]) == (
        403,
        f"stage 1 of {world.bundle.as_uri()} is not granted to pod {uid}",
    )
    assert world.ask(others_cgroup, "0")["status"] == 403
    stranger = world.ask(None, "0")
    assert stranger["status"] == 403
    assert "belongs to no pod" in stranger["reason"]
    assert world.ask(cgroup, "0")["status"] == 200


def test_a_grant_on_its_way_is_waited_for(world: World) -> None:
    uid, cgroup = world.cgroups.pod()
    world.grant()
    asking = world.start(cgroup, "0")
    time.sleep(0.3)  # the process starts meanwhile; earlier or later must both do
    world.grant(world.granted(uid, 0))
    output, _ = asking.communicate(timeout=WAIT_S)
    assert json.loads(output)["status"] == 200
    assert world.ask(cgroup, "1")["after_s"] >= 0.9  # one that never comes is waited for as long


def test_a_pod_may_ask_for_nothing_else(world: World) -> None:
    uid, cgroup = world.cgroups.pod()
    world.grant(world.granted(uid, 0))
    answers = world.ask(cgroup, "0", "others")["answers"]
    assert [(name, status) for name, _, status in answers] == [
        ("Fork", 403), ("KeyStages", 403), ("Invalidate", 403), ("Evict", 403), ("Standbys", 403),
        ("StatusAsked", 403), ("Progress", 403), ("Refused", 400),
    ]  # fmt: skip
    assert {answer for _, answer, _ in answers} == {"Refused"}
    assert world.ask(cgroup, "0")["status"] == 200


def test_one_pod_cannot_take_the_connections_of_others(world: World) -> None:
    uid, cgroup = world.cgroups.pod()
    other, others_cgroup = world.cgroups.pod()
    world.grant(world.granted(uid, 0), world.granted(other, 0))
    told = world.ask(cgroup, "0", "many")
    assert (told["open"], told["status"]) == (8, 503)
    assert f"8 connections of pod {uid} are open, 8 are allowed" == told["reason"]
    assert world.ask(others_cgroup, "0")["status"] == 200


@pytest.mark.slow
def test_a_silent_connection_is_closed_and_a_claim_is_kept(world: World) -> None:
    uid, cgroup = world.cgroups.pod()
    world.grant(world.granted(uid, 0))
    holding = world.start(cgroup, "0", "hold")
    assert holding.stdout is not None
    assert json.loads(holding.stdout.readline())["status"] == 200
    told = world.ask(cgroup, "0", "silent")
    assert told["received"] == "None"
    assert 4.0 < told["after_s"] < 15.0
    assert world.claims() == 1  # older than the silent one, and still there
    world.grant()  # what a pod holds it keeps
    assert world.claims() == 1
    holding.communicate(timeout=WAIT_S)
    wait_for(lambda: world.claims() == 0, "the claim ended with its process")


@pytest.mark.parametrize(
    ("body", "token", "status"),
    [
        (b"[]", "wrong", 401),
        (b"{}", "", 400),
        (b'[{"pod_uid":"u","bundle":"b"}]', "", 400),
        (b'[{"pod_uid":"u","bundle":"b","stages":["x"]}]', "", 400),
        (b"\xff", "", 400),
    ],
)
def test_grants_need_the_token_and_their_form(world: World, body: bytes, token: str, status: int) -> None:
    uid, cgroup = world.cgroups.pod()
    world.grant(world.granted(uid, 0))
    assert world.put(body, token or world.key.token)[0] == status
    assert world.ask(cgroup, "0")["status"] == 200  # the list before still holds


def test_the_socket_is_for_everybody_who_sees_it_and_the_own_one_is_not(world: World) -> None:
    assert world.socket.stat().st_mode & 0o777 == 0o666
    assert world.node.socket.stat().st_mode & 0o777 == 0o600
    assert world.socket.parent.stat().st_mode & 0o005 == 0o005


@pytest.mark.slow
def test_a_node_that_serves_no_pods_says_so(tmp_path: Path) -> None:
    key, port = Key(tmp_path), free_port()
    env = {
        "KEYSTAGE_KEYSMANAGER_LISTEN": f"127.0.0.1:{port}",
        "KEYSTAGE_WIRE_KEY_FILE": str(key.path),
        "KEYSTAGE_KEYSMANAGER_PODS": "",
    }
    with node_of(tmp_path, **env) as node:
        world = World(node, key, f"http://127.0.0.1:{port}", tmp_path, Cgroups())
        status, body = world.put(b"[]", key.token)
    assert status == 409
    assert b"KEYSTAGE_KEYSMANAGER_PODS is not set" in body
