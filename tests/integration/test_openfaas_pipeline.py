"""A real pipeline behind a stand-in for a stock gateway, steered by the real controller over REST alone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from support.openfaas_standin import PASSWORD, USER, Imagined, StandIn
from support.openfaas_world import IMAGE, OpenFaasWorld, OwnGateway, ce_with_processes
from typer.testing import CliRunner

from keystage.bundle import store
from keystage.bundle.api import emulated
from keystage.bundle.stack_yml import stack_yml
from keystage.cli.main import app
from keystage.controller.app import main
from keystage.local.pipeline import deployments_for


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="ksp-", dir="/tmp"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def world(folder: Path) -> Iterator[OpenFaasWorld]:
    made = ce_with_processes(folder)
    yield made
    made.end()
    made.platform.close()


@pytest.fixture
def gateway() -> Iterator[StandIn]:
    made = StandIn("openfaas-ce", Imagined())
    yield made
    made.end()


@pytest.fixture
def password(tmp_path: Path) -> Path:
    path = tmp_path / "password"
    path.write_text(PASSWORD + "\n")
    return path


def deploy(world: OpenFaasWorld, folder: Path) -> None:
    """A router and two stages of 40 ms an item, one item at a time."""
    bundle = folder / "p"
    bundle.mkdir()
    pipeline = emulated("p", 2, execution="single-pass")
    store.write(bundle, pipeline)
    device = "emulated:alpha=0.04,beta=0.0"
    for deployment in deployments_for(
        bundle, pipeline, device=device, slots=1, slo={"deadline_s": 0.5}, env={"KEYSTAGE_MAX_BATCH": "1"}
    ):
        world.deploy(msgspec.structs.replace(deployment, image=IMAGE))


def until(holds: Callable[[], bool], what: str, limit_s: float = 60.0) -> None:
    end_s = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end_s, what
        time.sleep(0.05)


def environment(gateway: str, home: Path, password: Path) -> dict[str, str]:
    general = {k: v for k, v in os.environ.items() if not k.startswith("KEYSTAGE_")}
    ours = {
        "KEYSTAGE_GATEWAY": gateway,
        "KEYSTAGE_GATEWAY_USER": USER,
        "KEYSTAGE_GATEWAY_PASSWORD_FILE": str(password),
        "KEYSTAGE_HOME": str(home),
    }
    return general | ours


def ask(world: OpenFaasWorld, count: int) -> list[int]:
    """So many calls at once, through the gateway."""
    statuses: list[int] = []

    def call() -> None:
        url = f"{world.gateway.url}/function/p"
        with urllib.request.urlopen(urllib.request.Request(url, b"x" * 64), timeout=60) as answer:
            statuses.append(answer.status)

    threads = [threading.Thread(target=call) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return statuses


@pytest.mark.slow
def test_a_backlog_behind_a_stock_gateway_becomes_replicas_within_its_bound(
    world: OpenFaasWorld, folder: Path, password: Path
) -> None:
    deploy(world, folder)
    until(lambda: all(world.runner.available(n) for n in ("p", "p-stage-0", "p-stage-1")), "stages are ready")

    def workers() -> list[int]:
        return [len(stage.workers) for view in world.platform.observe().pipelines for stage in view.stages]

    until(lambda: workers() == [1, 1], "the router knows its workers")
    (view,) = world.platform.observe().pipelines
    assert (view.missing, view.slo.deadline_s) == ("", 0.5)
    assert [stage.scale.function for stage in view.stages] == ["p-stage-0", "p-stage-1"]
    home = folder / "controller"
    controller = subprocess.Popen(
        [sys.executable, "-m", "keystage.controller.app"],
        env=environment(world.gateway.url, home, password),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        until(lambda: (home / "decisions.jsonl").exists(), "the controller decides")
        statuses = ask(world, 150)
        assert statuses == [200] * 150
        assert max(world.gateway.highest[n] for n in ("p-stage-0", "p-stage-1")) > 1
        assert max(world.gateway.highest.values()) <= 5
    finally:
        controller.terminate()
        _, text = controller.communicate(timeout=30)
    assert controller.returncode == 0, text
    assert "is OpenFaaS Community Edition" in text
    assert PASSWORD not in text
    assert "takes at most 5 replicas of a function" in (home / "decisions.jsonl").read_text()


# ---------------------------------------------------------------- which world the controller steers


def run_controller(monkeypatch: pytest.MonkeyPatch, **env: str) -> int:
    for name in list(os.environ):
        if name.startswith("KEYSTAGE_"):
            monkeypatch.delenv(name)
    for name, value in env.items():
        monkeypatch.setenv(f"KEYSTAGE_{name}", value)
    return main()


@pytest.mark.parametrize(
    ("env", "text"),
    [
        ({}, "set KEYSTAGE_CONTROL .* or KEYSTAGE_GATEWAY .* not both: neither is"),
        ({"CONTROL": "/s", "GATEWAY": "http://x"}, "not both: both are set"),
        ({"GATEWAY": "x:8080"}, "'x:8080' must be http://HOST"),
        (
            {"GATEWAY": "http://127.0.0.1:9", "GATEWAY_PASSWORD_FILE": "/none"},
            "/none cannot be read: No such",
        ),
    ],
)
def test_a_controller_without_one_world_ends_with_the_reason(
    env: dict[str, str], text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_controller(monkeypatch, **env) == 2
    assert re.search(text, capsys.readouterr().err)


def test_our_own_gateway_is_not_steered_twice(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = OwnGateway(folder)
    try:
        file = folder / "pass"
        file.write_text(own.local.credentials[1])
        code = run_controller(
            monkeypatch, GATEWAY=own.url, GATEWAY_PASSWORD_FILE=str(file), HOME=str(folder / "h")
        )
    finally:
        own.end()
    assert code == 2
    assert "is a Keystage gateway, whose own controller sets replica numbers" in capsys.readouterr().err


def test_check_gateway_finds_nothing_at_our_own(folder: Path) -> None:
    own = OwnGateway(folder)
    try:
        file = folder / "pass"
        file.write_text(own.local.credentials[1])
        stack = folder / "stack.yml"
        stack.write_text(stack_yml(emulated("p", 20, execution="looping"), folder, own.url))
        code, text = check(str(stack), "--password-file", str(file))
    finally:
        own.end()
    assert code == 0, text
    assert "Keystage (provider keystage" in text
    assert "21 functions looked at: 0 findings, 0 notices" in text


# ---------------------------------------------------------------- keystage check-gateway


def check(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["check-gateway", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_check_gateway_tells_what_it_is(gateway: StandIn, password: Path) -> None:
    code, text = check("--gateway", gateway.url, "--password-file", str(password))
    assert code == 0
    assert "OpenFaaS Community Edition (provider faas-netes-ce 0.18.17, orchestration kubernetes" in text
    assert "takes at most 15 functions, 1 to 5 replicas each" in text


def test_check_gateway_tells_what_bites_and_deploys_nothing(
    gateway: StandIn, password: Path, tmp_path: Path
) -> None:
    stack = tmp_path / "stack.yml"
    pipeline = emulated("p", 15, execution="single-pass")
    stack.write_text(stack_yml(pipeline, tmp_path, gateway.url))
    code, text = check(str(stack), "--password-file", str(password))
    assert code == 1
    assert "refused: functions in all: bound 15, asked 16 (0 deployed already)" in text
    assert "dropped: function p-stage-3: KEYSTAGE_ROUTER: bound tcp://HOST:PORT" in text
    assert "notice: function p: streaming" in text
    assert not any(line.startswith(("PUT", "POST", "DELETE")) for line in gateway.asked)
    stack.write_text("functions:\n  f: {image: ghcr.io/example/f:1}\n")
    code, text = check(str(stack), "--gateway", gateway.url, "--password-file", str(password))
    assert code == 0
    assert "1 functions looked at: 0 findings, 1 notices" in text


def test_check_gateway_ends_badly_with_the_reason(gateway: StandIn, password: Path, tmp_path: Path) -> None:
    code, text = check("--gateway", gateway.url)
    assert (code, "answered 401" in text, "credentials are missing or wrong" in text) == (3, True, True)
    code, text = check("--gateway", "http://127.0.0.1:9", "--timeout", "2")
    assert (code, "got no answer" in text) == (3, True)
    for address in ("gateway:8080", "http://[::1"):
        code, text = check("--gateway", address)
        assert (code, "must be http://HOST" in text) == (2, True), address
    code, text = check(str(tmp_path / "none.yml"), "--gateway", gateway.url)
    assert (code, "none.yml cannot be read" in text) == (2, True)
    code, text = check("--gateway", gateway.url, "--password-file", str(tmp_path / "none"))
    assert (code, "none cannot be read" in text) == (2, True)
