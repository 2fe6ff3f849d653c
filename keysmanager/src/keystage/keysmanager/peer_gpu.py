"""Parameters from another process's GPU, on the same card or over NVLink: hundreds of GB/s.

A replica that has its parameters in one arena publishes a CUDA IPC handle as a small file in the
owner's run folder (mode 0700: who reads it may map the memory); a replica that starts finds the files
of its parameters' identity there and copies from a live exporter, same card first, then one that fewest
copy from: each copy makes one more exporter, so that many replicas at once copy along a tree. The
exporter need not do anything. A dead exporter is a named error, and the caller goes on with host
memory; an exporter that died while it was copied from counts as dead, since its memory may have been
given to somebody else meanwhile.
"""

from __future__ import annotations

import contextlib
import glob
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from keystage.wire.cuda_driver import CudaError, Driver
from keystage.wire.unreadable import UNREADABLE

if TYPE_CHECKING:
    import torch

_SUFFIX = ".gpu"


class PeerGpuError(Exception):
    """Another process's GPU memory cannot be had; names the process and why."""


class Exported(msgspec.Struct, frozen=True):
    """An arena that others may copy from.

    Attributes:
        identity: of the parameters in it.
        handle: CUDA IPC handle of the allocation it lies in.
        offset: bytes from the allocation's start.
        nbytes: bytes of data.
        device: UUID of the GPU.
        pid: the exporter.
        started: its start time in clock ticks since boot, so that a reused process id is not it.
    """

    identity: str
    handle: bytes
    offset: int
    nbytes: int
    device: str
    pid: int
    started: int


def export(identity: str, data: torch.Tensor) -> Exported:
    """Describes device memory of this process, so that others can copy from it while it lives.

    Raises:
        PeerGpuError: memory of this kind has no handle.
    """
    try:
        driver = Driver()
        address = data.data_ptr()
        base = driver.base_of(address)
        handle = driver.ipc_handle(base)
    except CudaError as error:
        raise PeerGpuError(f"process {os.getpid()} cannot export {data.numel()} bytes: {error}") from error
    pid = os.getpid()
    return Exported(identity, handle, address - base, data.numel(), _uuid(data.device), pid, _started(pid))


def copy_from(exported: Exported, target: torch.Tensor) -> float:
    """Fills device memory from another process's; returns the seconds it took.

    Args:
        exported: the source.
        target: uint8, at least as long, on any GPU of this node.

    Raises:
        PeerGpuError: the exporter is dead, or the cards cannot reach one another.
    """
    import torch

    _check_alive(exported)
    if target.numel() < exported.nbytes:
        raise PeerGpuError(f"{exported.nbytes} bytes do not fit {target.numel()}")
    torch.cuda.synchronize(target.device)
    begin_s = time.perf_counter()
    try:
        # The context is this device's; the driver maps the other card's memory into it.
        torch.cuda.set_device(target.device)
        driver = Driver()
        opened = driver.ipc_open(exported.handle)
        stream = driver.stream()
        try:
            driver.copy_between(target.data_ptr(), opened + exported.offset, exported.nbytes, stream)
            driver.wait_stream(stream)
        finally:
            driver.destroy_stream(stream)
            driver.ipc_close(opened)
    except CudaError as error:
        raise PeerGpuError(f"GPU memory of process {exported.pid} cannot be copied: {error}") from error
    seconds = time.perf_counter() - begin_s
    _check_alive(exported)
    return seconds


def publish(folder: Path, replica: str, exported: Exported) -> Path:
    """Tells others in `folder`; the file is worthless, and swept, once this process has ended."""
    path = folder / f"{replica}{_SUFFIX}"
    partial = path.with_suffix(f".{os.getpid()}")
    partial.touch(mode=0o600)
    partial.write_bytes(msgspec.msgpack.encode(exported))
    partial.replace(path)
    return path


def published(folder: Path, identity: str, device: str) -> list[tuple[Path, Exported]]:
    """Live exporters of these parameters, with their files: nearest to a GPU first, then least busy."""
    found = [entry for entry in _read(folder) if entry[1].identity == identity]
    others = [(path, one) for path, one in found if one.pid != os.getpid()]
    return sorted(others, key=lambda entry: (entry[1].device != device, _readers(entry[0])))


def fill(folder: Path, identity: str, target: torch.Tensor) -> tuple[Exported, float] | None:
    """Fills `target` from whoever has published these parameters; None: from nobody."""
    for path, exported in published(folder, identity, _uuid(target.device)):
        with contextlib.suppress(PeerGpuError), reading(path):  # else the next one, or host memory
            return exported, copy_from(exported, target)
    return None


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Tells others, while it lasts, that this process copies from the exporter of a file."""
    mark = path.with_name(f"{path.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        mark.touch(mode=0o600)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            mark.unlink(missing_ok=True)


def _readers(path: Path) -> int:
    """Living processes that copy from an exporter now; marks of dead ones are swept."""
    count = 0
    for mark in path.parent.glob(f"{glob.escape(path.name)}.*"):
        pid = mark.suffix[1:]
        if pid.isdigit() and _started(int(pid)):
            count += 1
        else:
            mark.unlink(missing_ok=True)
    return count


def _read(folder: Path) -> Iterator[tuple[Path, Exported]]:
    for path in folder.glob(f"*{_SUFFIX}"):
        try:
            exported = msgspec.msgpack.decode(path.read_bytes(), type=Exported)
            _check_alive(exported)
        except (OSError, *UNREADABLE):
            continue
        except PeerGpuError:
            path.unlink(missing_ok=True)
            continue
        yield path, exported


def _check_alive(exported: Exported) -> None:
    if _started(exported.pid) != exported.started:
        raise PeerGpuError(f"process {exported.pid}, which had the parameters on its GPU, has ended")


def _started(pid: int) -> int:
    """Start time of a process in clock ticks since boot, 0: it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    fields = text[text.rindex(")") + 2 :].split()
    return 0 if fields[0] in "ZX" else int(fields[19])


def _uuid(device: torch.device) -> str:
    import torch

    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
