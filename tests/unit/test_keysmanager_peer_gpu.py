"""Which exporters of GPU memory are seen: live ones, nearest first; files of dead ones are swept."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from keystage.keysmanager import peer_gpu
from keystage.keysmanager.peer_gpu import Exported


@pytest.fixture
def exporter() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()
    assert process.stdin is not None
    process.stdin.close()


def started(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def exported(pid: int, device: str, identity: str = "i") -> Exported:
    return Exported(identity, bytes(64), 512, 1024, device, pid, started(pid))


def found(folder: Path, device: str) -> list[Exported]:
    return [one for _, one in peer_gpu.published(folder, "i", device)]


def test_of_equally_near_ones_the_one_that_fewest_copy_from(
    tmp_path: Path, exporter: subprocess.Popen[bytes]
) -> None:
    ones = [exported(exporter.pid, "gpu-b"), exported(exporter.pid, "gpu-c")]
    paths = [peer_gpu.publish(tmp_path, f"r{n}", one) for n, one in enumerate(ones)]
    for busy in (0, 1):
        mark = tmp_path / f"{paths[busy].name}.{exporter.pid}"
        mark.touch()
        with peer_gpu.reading(paths[busy]):
            assert found(tmp_path, "gpu-a") == [ones[1 - busy], ones[busy]]
        assert mark.exists()
        mark.unlink()
    exporter.kill()
    exporter.wait()
    (tmp_path / f"{paths[0].name}.{exporter.pid}").touch()
    own = exported(os.getppid(), "gpu-b")
    path = peer_gpu.publish(tmp_path, "r0", own)
    assert found(tmp_path, "gpu-a") == [own]
    assert list(tmp_path.iterdir()) == [path]


def test_live_exporters_nearest_first(tmp_path: Path, exporter: subprocess.Popen[bytes]) -> None:
    far, near = exported(exporter.pid, "gpu-b"), exported(exporter.pid, "gpu-a")
    path = peer_gpu.publish(tmp_path, "p.s1.r1", far)
    assert (path.name, path.stat().st_mode & 0o777) == ("p.s1.r1.gpu", 0o600)
    peer_gpu.publish(tmp_path, "p.s1.r2", near)
    peer_gpu.publish(tmp_path, "p.s2.r1", exported(exporter.pid, "gpu-a", "another"))
    peer_gpu.publish(tmp_path, "mine", exported(os.getpid(), "gpu-a"))
    (tmp_path / "garbled.gpu").write_bytes(b"\xc1nothing")
    assert found(tmp_path, "gpu-a") == [near, far]
    assert found(tmp_path, "gpu-b") == [far, near]


def test_the_dead_and_the_reborn_are_swept(tmp_path: Path, exporter: subprocess.Popen[bytes]) -> None:
    alive = exported(exporter.pid, "gpu-a")
    peer_gpu.publish(tmp_path, "dead", alive)
    peer_gpu.publish(tmp_path, "reborn", msgspec.structs.replace(alive, started=alive.started - 1))
    assert found(tmp_path, "gpu-a") == [alive]
    exporter.kill()
    exporter.wait()
    assert found(tmp_path, "gpu-a") == []
    assert list(tmp_path.iterdir()) == []
