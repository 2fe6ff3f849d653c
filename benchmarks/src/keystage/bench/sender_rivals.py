"""wrk, hey and locust as `bench sender` runs them: one command, looked at from outside.

Each is run longer than it is measured: its start, its imports and its first connections are no part of it.
Its processor time is that of its whole process tree within the window, from /proc; when its requests came
is what the target noted. It must not read what the tools say of themselves: they count in different ways.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from keystage.bench.config import BenchSettings
from keystage.bench.frame import BenchError

SPARE_S = 4.0
"""Run beyond the window, so that the tool does not end within it."""

_LOCUST_FILE = """
from locust import FastHttpUser, constant_throughput, task

class Caller(FastHttpUser):
    wait_time = constant_throughput({each_rps})
    insecure = True

    @task
    def call(self):
        self.client.post("/", data=b"x")
"""

_WRK_FILE = 'wrk.method = "POST"\nwrk.body = "x"\n'


@dataclasses.dataclass(frozen=True, slots=True)
class Rival:
    """A tool.

    Attributes:
        name: as the table shows it.
        is_paced: whether it can be asked for a rate.
        warm_s: from its start to the window.
        command: its arguments for a URL, a rate, seconds and a folder for files of its own.
    """

    name: str
    is_paced: bool
    warm_s: float
    command: Callable[[str, float, float, Path], list[str]]


@dataclasses.dataclass(frozen=True, slots=True)
class Window:
    """A stretch of a tool's run.

    Attributes:
        begin_s: `time.monotonic()`.
        end_s: `time.monotonic()`.
        cpu_s: processor time of the tool within it.
    """

    begin_s: float
    end_s: float
    cpu_s: float


def rivals() -> tuple[list[Rival], list[str]]:
    """The tools that are here, and the names of those that are not."""
    settings = BenchSettings()
    found: list[Rival] = []
    absent: list[str] = []
    for name, given in (("wrk", settings.wrk), ("hey", settings.hey), ("locust", settings.locust)):
        program = shutil.which(name) if given is None else str(given)
        if given is not None and not given.is_file():
            raise BenchError(f"KEYSTAGE_{name.upper()}={given}: no such file")
        if program is None:
            absent.append(name)
        else:
            found.append(_rival(name, program))
    return found, absent


def _rival(name: str, program: str) -> Rival:
    def wrk(url: str, _rate_rps: float, seconds: float, folder: Path) -> list[str]:
        script = folder / "post.lua"
        script.write_text(_WRK_FILE)
        return [program, "-t", "1", "-c", "64", "-d", f"{seconds:.0f}s", "-s", str(script), url]

    def hey(url: str, rate_rps: float, seconds: float, _folder: Path) -> list[str]:
        workers = 50 if rate_rps <= 5000 else 200
        each = ["-c", str(workers), "-q", f"{rate_rps / workers:g}", "-z", f"{seconds:.0f}s"]
        return [program, *each, "-m", "POST", "-d", "x", url]

    def locust(url: str, rate_rps: float, seconds: float, folder: Path) -> list[str]:
        users = 50 if rate_rps <= 5000 else 200
        file = folder / "locustfile.py"
        file.write_text(_LOCUST_FILE.format(each_rps=rate_rps / users))
        paced = ["-u", str(users), "-r", str(users), "-t", f"{seconds:.0f}s"]
        return [program, "-f", str(file), "--headless", "--only-summary", "-H", url.rstrip("/"), *paced]

    return {
        "wrk": Rival("wrk", False, 0.5, wrk),
        "hey": Rival("hey", True, 1.0, hey),
        "locust": Rival("locust", True, 4.0, locust),
    }[name]


def run(rival: Rival, url: str, rate_rps: float, window_s: float) -> Window:
    """Runs a tool and looks at a window of it.

    Raises:
        BenchError: it ended before its window did.
    """
    with tempfile.TemporaryDirectory(prefix="keystage-bench-") as name:
        seconds = rival.warm_s + window_s + SPARE_S
        command = rival.command(url, rate_rps, seconds, Path(name))
        with _running(command, Path(name)) as process:
            time.sleep(rival.warm_s)
            begin_s, before_s = time.monotonic(), _cpu_s(process.pid)
            time.sleep(window_s)
            end_s, after_s = time.monotonic(), _cpu_s(process.pid)
            if process.poll() is not None:
                told = (Path(name) / "said").read_text(errors="replace").strip()[-300:]
                raise BenchError(f"{rival.name} ended early with exit code {process.returncode}: {told}")
    return Window(begin_s, end_s, after_s - before_s)


@contextlib.contextmanager
def _running(command: list[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    with (folder / "said").open("wb") as said:
        process = subprocess.Popen(command, cwd=folder, stdout=said, stderr=subprocess.STDOUT)
        try:
            yield process
        finally:
            for child in _tree(process.pid):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            process.wait()


def _tree(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _cpu_s(pid: int) -> float:
    """Processor time of a process and all it started, seconds."""
    total_s = 0.0
    for process in _tree(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total_s += times.user + times.system
    return total_s
