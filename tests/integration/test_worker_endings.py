"""How workers end, as their router reads it: last words, exit status, signal, no memory."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.processes import EmulatedFunction, get
from support.wire_nodes import stats

from keystage.router.fleet import Worker
from keystage.router.process_watch import ProcessWatch
from keystage.router.suspects import Cause, Ending
from keystage.wire.api import Hello

WORKER = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
from keystage.worker import app, executor
from keystage.worker.device_health import DeviceLostError
batch = executor.EmulatedExecutor.batch
def failing(self, first, last, inputs):
    if any(bytes(item.data).startswith(b"bad") for item in inputs):
        {deed}
    return batch(self, first, last, inputs)
executor.EmulatedExecutor.batch = failing
sys.exit(app.main())
"""


@pytest.fixture
def function() -> Iterator[EmulatedFunction]:
    with tempfile.TemporaryDirectory(prefix="ks", dir="/tmp") as name:
        made = EmulatedFunction(Path(name), "single-pass", 1)
        yield made
        made.stop()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("deed", "words"),
    [
        ("raise DeviceLostError('an illegal access; then no answer')", "DeviceLostError: an illegal access"),
        ("os._exit(9)", "exit status 9"),
        ("os.kill(os.getpid(), 11)", "SIGSEGV"),
    ],
    ids=["lost device", "exit", "signal"],
)
def test_a_crash_is_told_in_its_words_and_its_company_is_answered(
    function: EmulatedFunction, deed: str, words: str
) -> None:
    _, url = function.start("router", "router", KEYSTAGE_DEADLINE_S="60")
    code = WORKER.format(deed=deed)
    for name in ("w0", "w1", "w2"):
        function.start("worker", name, prefix=(sys.executable, "-c", code), KEYSTAGE_STAGES="0")
    bodies = [b"good %d" % i for i in range(4)] + [b"bad"] + [b"good %d" % i for i in range(4, 8)]
    with ThreadPoolExecutor(len(bodies)) as pool:
        answers = list(pool.map(lambda body: get(f"{url}/", body), bodies))
    for body, (status, answer) in zip(bodies, answers, strict=True):
        if body != b"bad":
            assert (status, answer) == (200, body)
    status, answer = answers[bodies.index(b"bad")]
    assert status == 500
    assert b"2 workers ended while they ran this request, the last with nothing else" in answer
    assert answer.count(words.encode()) == 2
    counted = stats(url)
    assert counted.convicted == 1
    assert counted.overdue_drains == 0
    assert [replica.state for replica in counted.replicas] == ["ready"]
    assert get(f"{url}/", b"again") == (200, b"again")


def ended(process: subprocess.Popen[bytes], *, is_reaped: bool) -> Ending:
    """What the watch says of a process that has ended, or ends."""

    async def run() -> Ending:
        gone = asyncio.Event()
        watch = ProcessWatch(lambda address, pid: gone.set())
        watch.start()
        try:
            assert watch.watch("ipc:///w", process.pid)
            assert process.stdin is not None
            process.stdin.close()
            async with asyncio.timeout(30):
                await gone.wait()
            if is_reaped:
                process.wait(30)
            hello = Hello(2, "p", (0,), "w", "b", "cpu", 4, 0, 4, "ipc:///w", process.pid, "n", False)
            return watch.ending("ipc:///w", Worker(hello, 0.0), "exited")
        finally:
            watch.stop()

    return asyncio.run(run())


def tells_of_the_reaped() -> bool:
    """Whether the pidfd of a process that its parent has waited for still has its wait status."""
    return tuple(int(part) for part in os.uname().release.split(".")[:2]) >= (6, 15)


@pytest.mark.parametrize("is_reaped", [False, True])
@pytest.mark.parametrize(
    ("code", "cause", "words"),
    [
        ("sys.exit(3)", Cause.CRASH, "exit status 3"),
        ("os.kill(os.getpid(), signal.SIGILL)", Cause.CRASH, "SIGILL"),
        ("os.kill(os.getpid(), signal.SIGKILL)", Cause.OUTSIDE, "SIGKILL from outside"),
    ],
)
def test_the_wait_status_is_read_before_and_after_the_parent(
    is_reaped: bool, code: str, cause: Cause, words: str
) -> None:
    if is_reaped and not tells_of_the_reaped():
        pytest.skip(f"Linux {os.uname().release} forgets the status with the process (6.15 does not)")
    no_core = "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))"
    script = f"import os, resource, signal, sys; {no_core}; sys.stdin.read(); {code}"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE) as process:
        found = ended(process, is_reaped=is_reaped)
    assert (found.cause, found.words, found.replica) == (cause, words, "w")


def small_group() -> Path:
    """A control group with little memory, below this process's own."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        version_1 = "memory" in controllers.split(",")
        if version_1 or number == "0":
            root = Path("/sys/fs/cgroup/memory" if version_1 else "/sys/fs/cgroup")
            group = root / path.lstrip("/") / f"keystage-test-{os.getpid()}"
            try:
                group.mkdir()
            except OSError as error:
                pytest.skip(f"no control group can be made here: {error}")
            limit = group / ("memory.limit_in_bytes" if version_1 else "memory.max")
            try:
                limit.write_text(str(64 << 20))
            except OSError as error:
                group.rmdir()
                pytest.skip(f"no memory limit can be set here: {error}")
            swap = group / ("memory.memsw.limit_in_bytes" if version_1 else "memory.swap.max")
            if swap.exists():
                swap.write_text(str(64 << 20) if version_1 else "0")
            return group
    pytest.skip("this process is in no control group for memory")


def test_a_kill_for_want_of_memory_is_no_wish() -> None:
    group = small_group()
    script = "import sys; sys.stdin.read(); held = [bytearray(b'x' * (1 << 22)) for _ in range(64)]"
    try:
        with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE) as process:
            (group / "cgroup.procs").write_text(str(process.pid))
            found = ended(process, is_reaped=False)
            assert process.wait(30) == -signal.SIGKILL
        assert found.cause is Cause.CRASH
        assert found.words == "SIGKILL while the system killed for want of memory"
    finally:
        group.rmdir()
