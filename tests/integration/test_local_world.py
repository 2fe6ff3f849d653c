"""Real processes under a real supervisor."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path

import aiohttp
import msgspec
import psutil
import pytest
from support.local_function import PYTHON, function
from support.shared_memory import shared_names

from keystage.local.api import Deployment, View
from keystage.local.client import starts
from keystage.local.errors import CorruptState, NotReady, PortInUse
from keystage.local.ledger import Bounds
from keystage.local.up import UpOptions
from keystage.local.up import run as run_up
from keystage.local.world import LocalWorld

UP = """
import sys
from pathlib import Path
import msgspec
from keystage.bundle.api import emulated
from keystage.local.pipeline import deployments_for
from keystage.local.up import UpOptions, run
from support.local_function import PYTHON, function
home, bundle = Path(sys.argv[1]), Path(sys.argv[1] + "-bundle")
bundle.mkdir(exist_ok=True)
pipeline = emulated("demo", 1, execution="single-pass")
(bundle / "pipeline.json").write_bytes(msgspec.json.encode(pipeline))
functions = deployments_for(bundle, pipeline, device="emulated:alpha=0,beta=0")
sys.exit(run(UpOptions(home=home, gateway_port=int(sys.argv[2]), deployments=(function(), *functions))))
"""

PROCESSES = 7
"""Gateway, controller, router, stage, a foreign function with its guard, and the sweeper."""


def wait_until(condition: Callable[[], bool], within_s: float = 15.0) -> None:
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.01)


def bounded(work: Coroutine[None, None, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60.0))


def world(tmp_path: Path, **bounds: float) -> LocalWorld:
    return LocalWorld(tmp_path / "state", gateway_port=None, controller=False, bounds=Bounds(**bounds))


@pytest.fixture
def start_up(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(home: str = "state", port: int = 0) -> subprocess.Popen[str]:
        env = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[1])}
        process = subprocess.Popen(
            [sys.executable, "-c", UP, str(tmp_path / home), str(port)],
            env=env,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def until_line(process: subprocess.Popen[str], text: str) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if text in line:
            return
    raise AssertionError(f"ended with {process.wait()} without saying {text!r}")


def test_functions_start_serve_scale_and_end(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path) as w:
            await w.deploy(function())
            (first,) = await w.wait_ready("echo")
            await w.scale("echo", 3)
            ready = await w.wait_ready("echo", 3)
            assert ready[0] == first
            async with aiohttp.ClientSession() as session:
                for replica in ready:
                    async with session.get(f"http://{replica.address}/x") as answer:
                        assert (await answer.json())["replica"] == replica.replica
            await w.scale("echo", 1)
            while len(w.replicas("echo")) > 1:
                await w.supervisor.watch(w.supervisor.view().version, 5.0)
            assert w.replicas("echo") == [first]
            pids = [r.pid for r in ready]
            run_folder = w.home.run
        assert not any(psutil.pid_exists(pid) for pid in pids)
        assert not run_folder.exists()

    bounded(run())


def test_crash_loop_backs_off_and_names_the_last_line(tmp_path: Path) -> None:
    bad = Deployment(service="bad", envProcess=PYTHON + " -c \"import sys; print('x'); sys.exit('no luck')\"")

    async def run() -> None:
        async with world(tmp_path) as w:
            await w.deploy(bad, function())
            while not any(r.state == "failed" and r.restarts >= 3 for r in w.replicas("bad")):
                await w.supervisor.watch(w.supervisor.view().version, 5.0)
            (record,) = w.replicas("bad")
            assert record.reason == "exit code 1: no luck"
            assert record.replica == "bad-2"  # two restarts came before: at once, and after 0.5 s
            with pytest.raises(NotReady, match=r"0 of 1 replicas ready after 0 s \(bad-2 failed exit code 1"):
                await w.wait_ready("bad", 1, 0.0)
            await w.wait_ready("echo")
            lines = w.supervisor.log("bad", tail=None, since_s=0.0)
            assert [(replica, line) for _, replica, line in lines][:2] == [
                ("bad-0", "x"),
                ("bad-0", "no luck"),
            ]

    bounded(run())


def test_program_that_does_not_exist_is_a_failure_with_a_reason(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path) as w:
            await w.deploy(Deployment(service="none", envProcess="/no/such/program"))
            while not any(r.state == "failed" for r in w.replicas("none")):
                await w.supervisor.watch(w.supervisor.view().version, 5.0)
            assert "/no/such/program cannot be started: No such file" in w.replicas("none")[0].reason

    bounded(run())


def test_killed_replica_comes_back_under_a_new_name(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path) as w:
            await w.deploy(function())
            (first,) = await w.wait_ready("echo")
            children = psutil.Process(first.pid).children(recursive=True)
            os.kill(first.pid, signal.SIGKILL)
            while w.replicas("echo") == [first]:
                await w.supervisor.watch(w.supervisor.view().version, 5.0)
            (second,) = await w.wait_ready("echo")
            assert (second.replica, second.restarts) == ("echo-1", 1)
            assert children
            assert not any(c.is_running() and c.status() != psutil.STATUS_ZOMBIE for c in children)

    bounded(run())


def test_replica_that_will_not_stop_is_killed_after_its_drain_time(tmp_path: Path) -> None:
    stubborn = (
        'python -c "import signal,http.server as h; signal.signal(signal.SIGTERM, signal.SIG_IGN); '
        "h.HTTPServer(('127.0.0.1', $PORT), h.SimpleHTTPRequestHandler).serve_forever()\""
    )

    async def run() -> None:
        async with world(tmp_path) as w:
            deployment = Deployment(service="s", envProcess=stubborn, envVars={"KEYSTAGE_DRAIN_S": "0.2"})
            await w.deploy(deployment)
            (record,) = await w.wait_ready("s")
            await w.remove("s")
            assert [r.state for r in w.replicas("s")] == ["draining"]
            while w.replicas("s"):
                await w.supervisor.watch(w.supervisor.view().version, 5.0)
            assert not psutil.pid_exists(record.pid)

    bounded(run())


def test_functions_come_back_with_the_next_run(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path) as w:
            await w.deploy(function())
            await w.scale("echo", 2)
            await w.wait_ready("echo", 2)
        async with world(tmp_path) as w:
            await w.wait_ready("echo", 2)
            await w.deploy(function())
            assert w.function("echo").generation == 1
        (tmp_path / "state" / "functions.json").write_text("[\n{]\n")
        with pytest.raises(CorruptState, match=r"functions\.json, line 2: "):
            async with world(tmp_path):
                pass
        assert not (tmp_path / "state" / "run").exists()

    bounded(run())


def test_control_socket_speaks_the_contract(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path) as w:
            connector = aiohttp.UnixConnector(path=str(w.home.control))
            async with aiohttp.ClientSession("http://up", connector=connector) as session:

                async def ask(method: str, path: str, body: object = None) -> tuple[int, bytes]:
                    data = body if isinstance(body, bytes) else msgspec.json.encode(body)
                    async with session.request(method, path, data=data) as answer:
                        return answer.status, await answer.read()

                status, body = await ask("PUT", "/functions/echo", function())
                assert (status, json.loads(body)["generation"]) == (200, 1)
                watch = asyncio.create_task(ask("GET", f"/watch?since={w.supervisor.view().version}"))
                view = msgspec.json.decode((await watch)[1], type=View)
                assert view.functions[0].deployment == function()
                assert (
                    json.loads((await ask("PUT", "/functions/echo/replicas", {"replicas": 0}))[1])["desired"]
                    == 0
                )
                status, body = await ask("PUT", "/functions/echo/intent", {"wake": True})
                assert (status, json.loads(body)["wake"]) == (200, True)
                for method, path, sent, status, said in [
                    ("PUT", "/functions/echo", b"{", 400, "body is no Deployment"),
                    ("PUT", "/functions/other", function(), 400, "does not match"),
                    ("PUT", "/functions/echo/replicas", {"replicas": "2"}, 400, "$.replicas"),
                    ("PUT", "/functions/echo/replicas", {"replicas": -1}, 400, "not -1"),
                    ("PUT", "/functions/no/replicas", {"replicas": 1}, 404, "function no is not deployed"),
                    ("GET", "/functions/no", None, 404, "function no"),
                    ("GET", "/functions/no/logs", None, 404, "function no"),
                    ("GET", "/functions/echo/logs?tail=x", None, 400, "tail"),
                    ("DELETE", "/functions/no", None, 404, "function no"),
                    ("PUT", "/key-stages", {"pipeline": "p"}, 400, "body is no KeyStageList"),
                ]:
                    got, body = await ask(method, path, sent)
                    assert got == status
                    assert said in json.loads(body)["error"]
                assert (await ask("PUT", "/key-stages", {"pipeline": "p", "stages": [1, 0]}))[0] == 204
                assert json.loads((await ask("GET", "/nodes"))[1]) == []  # no KeysManager in this world
                (start,) = json.loads((await ask("GET", "/starts"))[1])
                assert (start["replica"], start["via"]) == ("echo-0", "process")
                assert start["wanted_at_s"] <= start["forked_at_s"]
                told = await asyncio.to_thread(starts, w.home.path)
                assert [msgspec.to_builtins(s) for s in told] == [start]
                assert await ask("DELETE", "/functions/echo") == (204, b"")
                assert json.loads((await ask("GET", "/functions"))[1]) == []

    bounded(run())


def test_port_in_use_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        async def run() -> None:
            with pytest.raises(PortInUse, match=f"port {port} of 127.0.0.1 is in use"):
                async with LocalWorld(tmp_path / "state", gateway_port=port, controller=False):
                    pass

        bounded(run())
    assert not (tmp_path / "state" / "run").exists()


def test_up_refuses_a_second_one_and_a_taken_port_with_their_exit_codes(
    tmp_path: Path, start_up: Callable[..., subprocess.Popen[str]]
) -> None:
    first = start_up()
    until_line(first, "demo-stage-0 is ready")
    second = start_up()
    assert second.wait(20) == 4
    assert second.stderr is not None
    assert f"in use by process {first.pid}" in second.stderr.read()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        third = start_up("other", taken.getsockname()[1])
        assert third.wait(20) == 3
    run = Path((tmp_path / "state" / "run").read_text().strip())
    children = psutil.Process(first.pid).children(recursive=True)
    assert len(children) == PROCESSES
    first.send_signal(signal.SIGTERM)
    assert first.wait(20) == 0
    assert not any(child.is_running() for child in children)
    assert not run.exists()


@pytest.mark.slow
def test_nothing_survives_a_killed_supervisor_and_the_next_one_starts(
    tmp_path: Path, start_up: Callable[..., subprocess.Popen[str]]
) -> None:
    shared = shared_names()
    up = start_up()
    until_line(up, "demo-stage-0 is ready")
    run = Path((tmp_path / "state" / "run").read_text().strip())
    children = psutil.Process(up.pid).children(recursive=True)
    assert len(children) == PROCESSES
    up.kill()
    up.wait()
    wait_until(lambda: not any(c.is_running() and c.status() != psutil.STATUS_ZOMBIE for c in children), 5.0)
    assert shared_names() == shared
    wait_until(lambda: not run.exists(), 5.0)
    again = start_up()
    until_line(again, "demo-stage-0 is ready")
    again.send_signal(signal.SIGINT)
    assert again.wait(20) == 0


def test_bad_settings_are_named_by_up_and_by_the_gateway_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KEYSTAGE_WAKE_S", "soon")
    assert run_up(UpOptions(home=tmp_path / "state", gateway_port=0)) == 5
    assert "KEYSTAGE_WAKE_S=soon: Input should be a valid number" in capfd.readouterr().err
    assert not (tmp_path / "state" / "run").exists()
    monkeypatch.setenv("KEYSTAGE_KEYSMANAGER_OFF", "0")
    assert run_up(UpOptions(home=tmp_path / "state", gateway_port=0, nodes=0)) == 2
    assert "nodes must be in 1..16, not 0" in capfd.readouterr().err
    monkeypatch.setenv("KEYSTAGE_DRAIN_S", "-1")
    assert run_up(UpOptions(home=tmp_path / "state", gateway_port=0)) == 2
    assert "KEYSTAGE_DRAIN_S=-1: Input should be greater than or equal to 0" in capfd.readouterr().err


def test_guard_passes_exit_codes_on() -> None:
    code = "import sys; from keystage.local.lifeline import guard; import os; r, w = os.pipe(); "
    for program, expected in (("sys.exit(7)", 7), ("os.kill(os.getpid(), 9)", 137)):
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                code + f"sys.exit(guard([sys.executable, '-c', 'import os, sys; {program}'], r))",
            ],
            check=False,
            process_group=0,
        )
        assert done.returncode == expected
