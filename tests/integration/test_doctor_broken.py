"""`keystage doctor` on set-ups that are broken, each in one way: it finds the cause and says the cure."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.local_function import function
from support.report_gateway import PASSWORD, ReportGateway
from support.reports import report
from typer.testing import CliRunner

from keystage.cli import doctor_gpu, doctor_versions
from keystage.cli.main import app
from keystage.local.world import LocalWorld

HOLD = """
import socket, sys

listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
sys.stdin.read()
"""


def _doctor(home: Path, *arguments: str) -> dict[str, dict[str, Any]]:
    """Findings by what was looked at."""
    done = CliRunner().invoke(app, ["doctor", "--home", str(home), "--json", *arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code in (0, 1, 2)
    return {check["thing"]: check for check in json.loads(done.stdout)["checks"]}


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Iterator[ReportGateway]:
    """It says it is of this command's version."""
    monkeypatch.setattr(doctor_versions, "own", lambda: "0.1.0")
    one = ReportGateway()
    one.functions = [{"name": "echo", "replicas": 1, "availableReplicas": 1}]
    yield one
    one.end()


def _asked(gateway: ReportGateway, tmp_path: Path, password: str = PASSWORD) -> dict[str, dict[str, Any]]:
    file = tmp_path / "password"
    file.write_text(password)
    file.chmod(0o600)
    return _doctor(tmp_path / "state", "--gateway", gateway.url, "--password-file", str(file))


def test_a_set_up_that_is_well_has_no_findings_about_the_gateway(
    gateway: ReportGateway, tmp_path: Path
) -> None:
    found = _asked(gateway, tmp_path)
    ours = [check for check in found.values() if check["area"] == "gateway"]
    assert {check["level"] for check in ours} == {"ok"}
    assert {"clocks", "versions", "controller's report", "time-outs of functions without their own"} <= set(
        found
    )


def test_a_function_that_may_take_longer_than_its_gateway_waits(tmp_path: Path) -> None:
    """A real gateway whose time-out is the smallest on the way."""

    async def inside() -> dict[str, dict[str, Any]]:
        home = tmp_path / "state"
        env = {"KEYSTAGE_TIMEOUT_S": "30"}
        async with (
            asyncio.timeout(100),
            LocalWorld(home, gateway_port=0, controller=False, env=env) as world,
        ):
            await world.deploy(function("slow", exec_timeout="20m"))
            while True:  # until the gateway has heard of it
                found = await asyncio.to_thread(_doctor, home, "--gateway", world.gateway_url)
                if "time-outs of slow" in found:
                    return found

    check = asyncio.run(inside())["time-outs of slow"]
    assert check["level"] == "warn"
    assert check["actual"].startswith("the shortest is KEYSTAGE_TIMEOUT_S 30 s of the gateway; on the way: ")
    assert "exec_timeout 1200 s of slow" in check["actual"]
    assert (
        "raise KEYSTAGE_TIMEOUT_S to 1200 s or more, or lower exec_timeout of slow to 30 s" in check["advice"]
    )


def test_a_wrong_password(tmp_path: Path) -> None:
    """A real gateway, and the password of another one."""

    async def inside() -> tuple[str, dict[str, dict[str, Any]]]:
        home = tmp_path / "state"
        async with asyncio.timeout(100), LocalWorld(home, gateway_port=0, controller=False) as world:
            file = tmp_path / "password"
            file.write_text("of another one")
            file.chmod(0o644)
            arguments = ("--gateway", world.gateway_url, "--password-file", str(file))
            return world.gateway_url, await asyncio.to_thread(_doctor, home, *arguments)

    url, found = asyncio.run(inside())
    assert found[url]["level"] == "fail"
    assert "401" in found[url]["actual"]
    assert "credentials/ of its state folder" in found[url]["advice"]
    assert "kubectl -n keystage get secret basic-auth" in found[url]["advice"]
    assert "chmod 600" in found[f"password file {tmp_path / 'password'}"]["advice"]


def test_a_port_that_somebody_else_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout is not None
        port = other.stdout.readline().strip()
        monkeypatch.setenv("KEYSTAGE_GATEWAY_PORT", port)
        check = _doctor(tmp_path)[f"port {port} of 127.0.0.1"]
        assert check["level"] == "warn"
        assert f"process {other.pid} (" in check["actual"]
        assert "end that program, or choose another port with --port" in check["advice"]
    finally:
        other.communicate()
    assert _doctor(tmp_path)[f"port {port} of 127.0.0.1"]["actual"] == "free"


def test_the_port_of_the_own_gateway_is_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def inside() -> tuple[str, dict[str, dict[str, Any]]]:
        home = tmp_path / "state"
        async with asyncio.timeout(100), LocalWorld(home, gateway_port=0, controller=False) as world:
            port = world.gateway_url.rpartition(":")[2]
            monkeypatch.setenv("KEYSTAGE_GATEWAY_PORT", port)
            return port, await asyncio.to_thread(_doctor, home)

    port, found = asyncio.run(inside())
    check = found[f"port {port} of 127.0.0.1"]
    assert (check["level"], check["actual"]) == ("ok", f"held by the gateway of {tmp_path / 'state'}")
    files = [
        check for thing, check in found.items() if thing.startswith(str(tmp_path / "state" / "credentials"))
    ]
    assert [check["level"] for check in files] == ["ok"] * 4


def test_credentials_that_are_damaged(tmp_path: Path) -> None:
    folder = tmp_path / "credentials"
    folder.mkdir()
    (folder / "basic-auth-user").write_text("admin")
    (folder / "basic-auth-user").chmod(0o644)
    (folder / "basic-auth-password").write_text("\n")
    found = _doctor(tmp_path)
    assert "chmod 600" in found[str(folder / "basic-auth-user")]["advice"]
    assert found[str(folder / "basic-auth-password")]["actual"] == "empty"
    assert "remove the file and restart" in found[str(folder / "basic-auth-password")]["advice"]
    assert found[str(folder / "wire-key")]["level"] == "fail"


@pytest.mark.parametrize("ahead_s", [90.0, -90.0])
def test_clocks_that_differ(gateway: ReportGateway, tmp_path: Path, ahead_s: float) -> None:
    gateway.ahead_s = ahead_s
    found = _asked(gateway, tmp_path)
    check = found["clocks"]
    assert check["level"] == "warn"
    assert "this machine" in check["actual"]
    assert "the gateway" in check["actual"]
    assert re.search(rf"the gateway {'[+]' if ahead_s > 0 else '-'}(89|90|91)\.", check["actual"])
    assert "timedatectl set-ntp true" in check["advice"]
    assert "first that of this machine" in check["advice"]  # gateway and controller agree
    assert found["controller's report"]["level"] == "ok"  # another clock does not make it old


def test_parts_of_different_versions(gateway: ReportGateway, tmp_path: Path) -> None:
    gateway.fixed = report(version="0.0.9")
    check = _asked(gateway, tmp_path)["versions"]
    assert (check["level"], check["actual"]) == (
        "warn",
        "this command 0.1.0, the gateway 0.1.0, the controller 0.0.9",
    )
    assert "0.1.0 is not that of the controller" in check["advice"]
    assert "helm upgrade" in check["advice"]


def test_a_controller_that_is_gone(gateway: ReportGateway, tmp_path: Path) -> None:
    gateway.refusal = (503, "no controller has reported yet")
    check = _asked(gateway, tmp_path)["controller's report"]
    assert check["level"] == "warn"
    assert "no controller has reported yet" in check["actual"]
    assert "logs/_controller.log" in check["advice"]


class _Broken(Exception):
    """NVML's error."""


def _nvml(error: str) -> Any:
    """NVML on a machine whose driver is broken: it does not start."""

    def init() -> None:
        raise _Broken(error)

    return types.SimpleNamespace(nvmlInit=init, NVMLError=_Broken, nvmlShutdown=lambda: None)


@pytest.mark.parametrize(
    ("error", "cure"),
    [
        ("Driver/library version mismatch", "restart the machine, or unload the module"),
        ("NVML Shared Library Not Found", "--gpus all"),
        ("Driver Not Loaded", "modprobe nvidia"),
        ("Insufficient Permissions", "may not open /dev/nvidia"),
    ],
)
def test_a_gpu_whose_driver_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str, cure: str
) -> None:
    monkeypatch.setattr(doctor_gpu, "DEVICES", tmp_path)
    (tmp_path / "nvidia0").touch()
    check = doctor_gpu.gpus(_nvml(error))
    assert check.level == "fail"
    assert error in check.actual
    assert cure in check.advice
    (tmp_path / "nvidia0").unlink()
    assert doctor_gpu.gpus(_nvml(error)).level == "ok"  # no GPU, no driver needed


def test_a_driver_older_than_torch() -> None:
    check = doctor_gpu.driver(("535.161.08", (12, 2)), (13, 0))
    assert (check.level, check.actual) == ("fail", "535.161.08, CUDA up to 12.2")
    assert "upgrade the driver, or install a torch that was built for CUDA 12" in check.advice
    for built in ((12, 8), (0, 0)):
        assert doctor_gpu.driver(("535.161.08", (12, 2)), built).level == "ok"
