"""`keystage doctor` on machines that are broken for real: mounts, limits, folders, Redis, proxies."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.servers import RedisServer, free_port, need_program
from typer.testing import CliRunner

from keystage.cli import doctor_gateway
from keystage.cli.main import app
from keystage.local.world import LocalWorld

KEYSTAGE = (sys.executable, "-m", "keystage.cli.main")
WAIT_S = 60.0
NOBODY = 65534
LOOKS = f"""
import os, sys, msgspec
from pathlib import Path
from keystage.cli.doctor_home import state_folder

if os.geteuid() == 0:
    os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
sys.stdout.buffer.write(msgspec.json.encode([state_folder(Path(path)) for path in sys.argv[1:]]))
"""


def _checks(out: str) -> dict[str, dict[str, Any]]:
    """Findings by what was looked at."""
    told = json.loads(out)
    assert told["is_well"] == (told["counts"]["ok"] == len(told["checks"]))
    return {check["thing"]: check for check in told["checks"]}


def _doctor(home: Path, *arguments: str) -> dict[str, dict[str, Any]]:
    done = CliRunner().invoke(app, ["doctor", "--home", str(home), "--json", *arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return _checks(done.stdout)


def _process(
    *command: str, limits: Callable[[], None] | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        env={**os.environ, **variables},
        preexec_fn=limits,
        check=False,
    )


def _mounted(options: str, place: Path, home: Path) -> dict[str, dict[str, Any]]:
    """What it finds where a file system of memory is mounted at a place, in a namespace of its own."""
    mount = f"mount -t tmpfs -o {options} none '{place}' && exec \"$@\""
    inside = ("unshare", "--mount", "--map-root-user", "sh", "-c", mount, "sh")
    if shutil.which("unshare") is None or _process(*inside, "true").returncode:
        pytest.skip("this machine lets nobody mount in a namespace")
    return _checks(_process(*inside, *KEYSTAGE, "doctor", "--json", "--home", str(home)).stdout)


def test_a_dev_shm_of_one_mebibyte(tmp_path: Path) -> None:
    check = _mounted("size=1m", Path("/dev/shm"), tmp_path)["/dev/shm"]
    assert (check["level"], check["actual"]) == ("warn", "1 MiB free")
    assert "--shm-size" in check["advice"]


def test_a_dev_shm_that_cannot_be_written(tmp_path: Path) -> None:
    check = _mounted("ro", Path("/dev/shm"), tmp_path)["/dev/shm"]
    assert check["level"] == "warn"
    assert "not writable" in check["actual"]


@pytest.mark.parametrize("inside", ["", "state"])
def test_a_state_folder_on_a_read_only_file_system(tmp_path: Path, inside: str) -> None:
    home = tmp_path / inside
    check = _mounted("ro", tmp_path, home)[f"state folder {home}"]
    assert check["level"] == "fail"
    assert "on a read-only file system" in check["actual"]
    assert "mount a writable volume, or choose another folder with --home" in check["advice"]


@pytest.mark.parametrize("inside", ["", "state"])
def test_a_file_where_the_state_folder_should_be(tmp_path: Path, inside: str) -> None:
    (tmp_path / "file").touch()
    home = tmp_path / "file" / inside
    check = _doctor(home)[f"state folder {home}"]
    assert check["level"] == "fail"
    assert "no folder" in check["actual"]
    assert "remove that file, or choose another folder" in check["advice"]


@pytest.mark.parametrize("mode", [0o555, 0o000])
def test_a_state_folder_of_another_user(mode: int) -> None:
    """Asked by a process without rights over others' files, whoever runs the tests."""
    user = NOBODY if os.geteuid() == 0 else os.geteuid()
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        above = Path(name) / "above"
        above.mkdir()
        above.chmod(mode)
        try:
            done = _process(sys.executable, "-c", LOOKS, str(above), str(above / "new"))
        finally:
            above.chmod(0o700)
    assert done.returncode == 0, done.stderr
    own, new = json.loads(done.stdout)
    assert (own["level"], new["level"]) == ("fail", "fail")
    assert f"with mode {mode:04o}, and this is user {user}" in own["actual"]
    assert f"sudo chown -R {user} {above}, or choose another folder" in own["advice"]
    assert "chown" not in new["advice"]  # what is above it may be everybody's
    told = (
        f"sudo install -d -o {user} {above / 'new'}" if mode else "run it as the owner of the folders above"
    )
    assert told in new["advice"]


def test_files_that_another_user_left_in_the_state_folder() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can leave files that this user cannot write")
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        home.chmod(0o777)
        (home / "lock").touch(0o600)
        (home / "logs").mkdir(0o755)
        done = _process(sys.executable, "-c", LOOKS, str(home))
    (check,) = json.loads(done.stdout)
    assert check["level"] == "fail"
    assert check["actual"].startswith("lock, logs in it not writable (lock: of user 0, this is user ")
    assert "ran as another user before: sudo chown -R" in check["advice"]


def test_few_descriptors(tmp_path: Path) -> None:
    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))

    done = _process(*KEYSTAGE, "doctor", "--json", "--home", str(tmp_path), limits=few)
    check = _checks(done.stdout)["RLIMIT_NOFILE (hard)"]
    assert (check["level"], check["actual"]) == ("warn", "64")
    assert "ulimit -n" in check["advice"]


@pytest.mark.parametrize("command", ["doctor", "status"])
def test_a_variable_that_cannot_be_read_is_one_line(command: str) -> None:
    done = _process(*KEYSTAGE, command, "--json", KEYSTAGE_GATEWAY_PORT="abc")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("keystage: KEYSTAGE_GATEWAY_PORT=abc: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "password", "level", "actual", "advice"),
    [
        ((), "right", "ok", "", ""),
        ((), "another", "fail", "invalid username-password pair", "user or password in KEYSTAGE_REDIS"),
        (
            ("--appendonly", "no", "--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru"),
            "right",
            "warn",
            "no append-only file, maxmemory-policy allkeys-lru",
            "CONFIG SET appendonly yes; it may evict accepted calls: CONFIG SET maxmemory-policy noeviction",
        ),
    ],
)
def test_a_redis(
    tmp_path: Path, options: tuple[str, ...], password: str, level: str, actual: str, advice: str
) -> None:
    with RedisServer(tmp_path / "r", "--requirepass", "right", *options, tcp=True) as server:
        address = f"redis://:{password}@127.0.0.1:{server.place}/0"
        check = _doctor(tmp_path / "state", "--redis", address)[f"Redis at {server.address}"]
    assert check["level"] == level
    assert actual in check["actual"]
    assert advice in check["advice"]
    assert password not in str(check)


def test_a_redis_that_is_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv("KEYSTAGE_REDIS", f"redis://:secret@127.0.0.1:{port}/0")
    check = _doctor(tmp_path)[f"Redis at redis://127.0.0.1:{port}"]
    assert check["level"] == "fail"
    assert "refused" in check["actual"]
    assert "asynchronous calls get 503 until it answers: start it" in check["advice"]
    monkeypatch.setenv("KEYSTAGE_REDIS", "secret")
    check = _doctor(tmp_path)["KEYSTAGE_REDIS"]
    assert check["level"] == "fail"
    assert "secret" not in str(check)


@pytest.fixture
def silent() -> Iterator[tuple[str, list[socket.socket]]]:
    """An address where connections are taken and nothing is ever said, and what was taken."""
    taken: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            while True:
                try:
                    taken.append(listener.accept()[0])
                except OSError:
                    return

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", taken
        listener.shutdown(socket.SHUT_RDWR)
    for connection in taken:
        connection.close()


def test_a_gateway_that_says_nothing_is_waited_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent: tuple[str, list[socket.socket]]
) -> None:
    url, taken = silent
    monkeypatch.setattr(doctor_gateway, "ANSWER_S", 0.3)
    check = _doctor(tmp_path, "--gateway", url)[url]
    assert (check["level"], check["actual"]) == ("fail", "timed out")
    assert len(taken) == 1


def _nginx(folder: Path, behind: str) -> tuple[subprocess.Popen[bytes], str]:
    """An nginx that waits 30 s for what is behind it, and its address."""
    program, port = need_program("nginx"), free_port()
    places = "".join(f"{kind}_temp_path {folder}/{kind};" for kind in ("proxy", "fastcgi", "uwsgi", "scgi"))
    (folder / "nginx.conf").write_text(
        f"daemon off; pid {folder}/pid; events {{}}\n"
        f"http {{ access_log off; client_body_temp_path {folder}/body; {places}\n"
        f"server {{ listen 127.0.0.1:{port};"
        f" location / {{ proxy_pass {behind}; proxy_read_timeout 30s; }} }} }}\n"
    )
    command = (program, "-c", str(folder / "nginx.conf"), "-e", str(folder / "error.log"))
    return subprocess.Popen(command), f"http://127.0.0.1:{port}"


async def _listens(url: str) -> None:
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
            except OSError:
                await asyncio.sleep(0.05)
            else:
                writer.close()
                return


def test_a_proxy_that_gives_up_before_the_gateway(tmp_path: Path) -> None:
    """A real nginx, a real gateway; who waits how long stands in the chain, the shortest by name."""

    async def inside() -> list[dict[str, Any]]:
        home = tmp_path / "state"
        async with asyncio.timeout(100), LocalWorld(home, gateway_port=0, controller=False) as world:
            proxy, url = _nginx(tmp_path, world.gateway_url)
            try:
                await _listens(url)
                found = []
                for address, more in (
                    (world.gateway_url, ()),
                    (url, ()),
                    (url, ("--proxy-timeout", "30")),
                    (url, ("--proxy-timeout", "601")),
                ):
                    checks = await asyncio.to_thread(_doctor, home, "--gateway", address, *more)
                    found.append(checks["time-outs of functions without their own"])
            finally:
                proxy.terminate()
                proxy.wait(WAIT_S)
            return found

    direct, guessed, told, patient = asyncio.run(inside())
    gateway = "KEYSTAGE_TIMEOUT_S 600 s of the gateway"
    assert (direct["level"], direct["actual"]) == ("ok", f"the shortest is {gateway}; on the way: {gateway}")
    assert guessed["level"] == told["level"] == "warn"
    assert guessed["actual"].startswith("the shortest is proxy_read_timeout 60 s of proxy nginx")
    assert "(unless it was changed)" in guessed["actual"]
    assert told["actual"].startswith("the shortest is proxy_read_timeout 30 s of proxy nginx")
    assert "raise proxy_read_timeout to 600 s or more, or lower KEYSTAGE_TIMEOUT_S" in told["advice"]
    assert patient["level"] == "ok"
