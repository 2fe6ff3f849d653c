"""A disk without room costs logs and copies, never an answer. On file systems that are full for real."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from keystage.bundle.api import emulated
from keystage.bundle.store import write
from keystage.wire.events import EventLog

TESTS = Path(__file__).parents[1]


def mounted(size: str, place: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Runs a command where a small file system of memory is mounted at a place."""
    mount = f"mount -t tmpfs -o size={size} none '{place}' && exec \"$@\""
    inside = ("unshare", "--mount", "--map-root-user", "sh", "-c", mount, "sh")
    if shutil.which("unshare") is None or subprocess.run([*inside, "true"], check=False).returncode:
        pytest.skip("this machine lets nobody mount in a namespace")
    env = {**os.environ, "PYTHONPATH": str(TESTS)}
    return subprocess.run(
        [*inside, *command], check=False, capture_output=True, text=True, timeout=180, env=env
    )


@pytest.mark.slow
def test_a_pipeline_serves_on_while_its_state_folder_is_full(tmp_path: Path) -> None:
    bundle, home = tmp_path / "bundle", tmp_path / "home"
    bundle.mkdir()
    home.mkdir()
    write(bundle, emulated("em", 2, execution="single-pass"))
    script = TESTS / "support/full_disk.py"
    done = mounted("16m", home, sys.executable, str(script), str(bundle), str(home))
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    deployed = found.pop("deployed")
    assert deployed.startswith("it was done, but a restart of `keystage up` will not know of it: ")
    assert f"{home} takes nothing: No space left on device" in deployed
    assert found == {
        "before": True, "full": [True] * 20, "full, after a death": True, "numbers change": True,
        "room again": True, "refused": {},
    }  # fmt: skip


EVENTS = """
import sys
from pathlib import Path
from keystage.wire.events import EventLog
folder = Path(sys.argv[1])
log = EventLog(folder, "w")
log.write("first")
log.flush()
filling = (folder / "filling").open("wb", buffering=0)
try:
    while True:
        filling.write(bytes(1 << 16))
except OSError:
    pass
try:
    while True:
        filling.write(b"x")
except OSError:
    pass
for i in range(40_000):
    log.write("more", number=i)
    if i % 1000 == 0:
        log.flush()
assert log.lost > 1000, log.lost
filling.truncate(0)
for i in range(3):
    log.write("last", number=i)
    log.flush()
print((folder / "w.jsonl").read_text(), end="")
"""


def test_events_wait_for_room_and_those_that_are_lost_are_counted(tmp_path: Path) -> None:
    done = mounted("4m", tmp_path, sys.executable, "-c", EVENTS, str(tmp_path))
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines[0]["event"] == "first"
    more = [line["number"] for line in lines if line["event"] == "more"]
    assert more == list(range(len(more)))
    told = [line["lines"] for line in lines if line["event"] == "lines_lost"]
    assert told == [40_000 - len(more) + 1]  # the first of the last ones found no room either
    assert [line["number"] for line in lines if line["event"] == "last"] == [1, 2]
    assert "the event log" in done.stderr
    assert "No space left on device" in done.stderr
    assert done.stderr.count("takes nothing") == 1


def test_a_folder_that_cannot_be_used_switches_the_event_log_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    events = EventLog(tmp_path / "file" / "events", "w")
    assert not events
    events.write("nothing")
    events.flush()
    assert f"no event log in {tmp_path}/file/events: Not a directory" in caplog.text


CACHE = """
import logging, os, shutil, sys
from pathlib import Path
logging.basicConfig(level=logging.INFO, format="%(message)s")
from keystage.keysmanager import disk_cache
from keystage.keysmanager.api import Parameters, StageName
folder = Path(sys.argv[1])
if sys.argv[2] == "then":  # there was room when it was asked for, and is none when it is needed
    true = shutil.disk_usage
    disk_cache.shutil.disk_usage = lambda path: true("/tmp")._replace(free=1 << 40)
fd = os.memfd_create("segment")
os.ftruncate(fd, 8 << 20)
os.pwrite(fd, bytes(range(256)) * (8 << 12), 0)
parameters = Parameters(
    name=StageName("bundle", 0), pipeline="p", identity="a" * 64, dtype="float32", file="s",
    nbytes=8 << 20, chunks=(),
)
cache = disk_cache.DiskCache(folder / "parameters", 1 << 30)
print(cache.store(parameters, fd), os.listdir(folder / "parameters"), cache.held_bytes())
"""


@pytest.mark.parametrize(
    ("when", "words"),
    [
        ("now", "p stage 0 needs 8388608 bytes, "),
        ("then", "p stage 0 not kept: No space left on device"),
    ],
)
def test_a_full_disk_takes_no_copies_of_parameters_and_keeps_no_half_ones(
    tmp_path: Path, when: str, words: str
) -> None:
    done = mounted("4m", tmp_path, sys.executable, "-c", CACHE, str(tmp_path), when)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "False [] 0"
    assert f"disk cache: {words}" in done.stderr


RING = """
import resource, sys
from keystage.wire.errors import WireError
from keystage.wire.ring import Ring
resource.setrlimit(resource.RLIMIT_{name}, ({limit}, {limit}))
try:
    Ring(1 << 26)
except WireError as error:
    print(error)
    sys.exit(3)
"""


@pytest.mark.parametrize(
    ("name", "limit", "why"),
    [
        ("NOFILE", 3, "Too many open files"),
        ("FSIZE", 4096, "File too large"),
        ("AS", 1 << 28, "Cannot allocate memory"),
    ],
)
def test_a_ring_that_cannot_be_made_is_named(name: str, limit: int, why: str) -> None:
    code = RING.format(name=name, limit=limit)
    if name == "AS":  # what the interpreter has mapped already counts
        code = code.replace("Ring(1 << 26)", "Ring(1 << 34)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    assert "bytes (KEYSTAGE_RING_BYTES) cannot be made: " in done.stdout
    assert why in done.stdout
