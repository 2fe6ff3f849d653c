"""`keystage doctor` as it is typed: on this machine, before gateways, without a cluster."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.kube.fixtures import FUNCTION_NAMESPACE, SYSTEM_NAMESPACE, Kube
from support.kube.fixtures import kube as kube
from support.openfaas_standin import PASSWORD, USER, StandIn
from typer.testing import CliRunner

from keystage.cli.doctor_kubernetes import ask
from keystage.cli.main import app

THINGS = {"seals", "/dev/shm", "host memory", "huge pages", "RLIMIT_MEMLOCK", "GPUs", "Python", "disk"}


def _doctor(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, dict[str, Any]], str]:
    done = CliRunner().invoke(app, ["doctor", "--home", str(tmp_path), "--json", *arguments])
    found = json.loads(done.stdout)["checks"] if done.stdout.startswith("{") else []
    return done.exit_code, {check["thing"]: check for check in found}, done.output


@pytest.fixture
def community() -> Iterator[StandIn]:
    gateway = StandIn("openfaas-ce")
    yield gateway
    gateway.end()


def _password(tmp_path: Path, text: str = PASSWORD, mode: int = 0o600) -> str:
    file = tmp_path / "password"
    file.write_text(text)
    file.chmod(mode)
    return str(file)


def test_this_machine(tmp_path: Path) -> None:
    code, found, _ = _doctor(tmp_path)
    assert set(found) >= THINGS
    assert found["seals"]["level"] == "ok"
    assert code == max({"ok": 0, "warn": 1, "fail": 2}[check["level"]] for check in found.values())
    assert list(tmp_path.iterdir()) == []


def test_lines_for_people(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["doctor", "--home", str(tmp_path)])
    *lines, count = done.stdout.splitlines()
    assert any(line.startswith("ok   machine: seals: needed ") for line in lines)
    assert count.endswith(" fail")


def test_a_stock_gateway(tmp_path: Path, community: StandIn) -> None:
    arguments = ("--gateway", community.url, "--user", USER, "--password-file", _password(tmp_path))
    code, found, _ = _doctor(tmp_path, *arguments)
    assert code >= 1
    assert found[community.url]["actual"].startswith("OpenFaaS Community Edition")
    assert {found[t]["level"] for t in ("placement", "in-place resize", "parked pods")} == {"warn"}
    assert all(line.startswith("GET ") for line in community.asked)


def test_wrong_credentials_fail_by_name(tmp_path: Path, community: StandIn) -> None:
    file = _password(tmp_path, "wrong", 0o644)
    code, found, _ = _doctor(tmp_path, "--gateway", community.url, "--user", USER, "--password-file", file)
    assert code == 2
    assert found[community.url]["level"] == "fail"
    assert "401" in found[community.url]["actual"]
    assert found[f"password file {file}"]["actual"] == "0644"


def test_a_gateway_that_is_not_there_fails_by_name(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    code, found, _ = _doctor(tmp_path, "--gateway", f"http://127.0.0.1:{port}")
    assert code == 2
    assert "refused" in found[f"http://127.0.0.1:{port}"]["actual"].lower()


def test_a_bad_address_is_refused(tmp_path: Path) -> None:
    code, found, output = _doctor(tmp_path, "--gateway", "127.0.0.1:8080")
    assert code == 2
    assert not found
    assert "must be http://" in output


def test_without_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "absent"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    code, found, _ = _doctor(tmp_path, "--kubernetes")
    assert code == 2
    assert found["API server"]["advice"] == "run in a pod, or set KUBECONFIG"


def test_what_is_absent_and_what_may_not_be_seen_are_told_apart(kube: Kube) -> None:
    cluster = kube.cluster(SYSTEM_NAMESPACE)
    absent = ask(cluster, FUNCTION_NAMESPACE)
    assert (absent.lease, absent.missing, absent.hidden) == ({}, (), ())
    kube.faults.fail(code=403, verb="get", resource="leases")
    kube.faults.fail(code=403, verb="create", resource="selfsubjectaccessreviews")
    hidden = ask(cluster, FUNCTION_NAMESPACE)
    assert (hidden.lease, hidden.missing, len(hidden.hidden)) == (None, None, 2)
