"""Processes of one pipeline on several emulated nodes of this machine, and what they hold open."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

import msgspec
from support.processes import EmulatedFunction, get

from keystage.router.api import RouterStats
from keystage.wire.secret import create_secret


class NodesFunction(EmulatedFunction):
    """As `EmulatedFunction`, but its router listens on tcp and its workers are told their nodes.

    Args:
        folder: short path for bundle, sockets and event logs.
        execution: `looping` or `single-pass`.
        stages: number of stages.
        plain: whether tensors travel without TLS.
        bundle: another bundle (folder and pipeline name) than the emulated one.
    """

    def __init__(
        self,
        folder: Path,
        execution: str,
        stages: int,
        *,
        plain: bool = False,
        bundle: tuple[Path, str] | None = None,
    ) -> None:
        super().__init__(folder, execution, stages)
        self.key_file = folder / "wire.key"
        create_secret(self.key_file)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.inbox = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        self.env = {
            "KEYSTAGE_ROUTER": self.inbox,
            "KEYSTAGE_WIRE_HOST": "127.0.0.1",
            "KEYSTAGE_WIRE_KEY_FILE": str(self.key_file),
            "KEYSTAGE_WIRE_PLAIN": "1" if plain else "0",
            "KEYSTAGE_EVENTS": str(folder / "events"),
        }
        if bundle is not None:
            self.env |= {"KEYSTAGE_BUNDLE": f"file://{bundle[0]}", "KEYSTAGE_PIPELINE": bundle[1]}

    def on(
        self, node: str, module: str, replica: str, *, wait: bool = True, **env: str
    ) -> tuple[subprocess.Popen[bytes], str]:
        """Starts a process on a node."""
        return self.start(module, replica, wait=wait, **{**self.env, "KEYSTAGE_NODE": node, **env})


def stats(url: str) -> RouterStats:
    """What a router counts."""
    return msgspec.json.decode(get(f"{url}/_/stats")[1], type=RouterStats)


def ready_stages(url: str) -> set[int]:
    """Stages with a ready replica; none while the router does not answer."""
    status, body = get(f"{url}/_/stats")
    if status != 200:
        return set()
    replicas = msgspec.json.decode(body, type=RouterStats).replicas
    return {stage for r in replicas if r.state == "ready" for stage in r.stages}


def mapped_rings(pid: int) -> set[str]:
    """Inode numbers of the rings that a process has mapped, its own included."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "memfd:keystage-ring" in line}
