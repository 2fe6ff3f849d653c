"""The fork server: a process that has imported everything and done nothing, kept to be forked.

    python -m keystage.keysmanager.forkserver FD

Started by the daemon with one end of a socket pair, and with OMP_NUM_THREADS=1 in its environment
(`import torch` leaves threads otherwise). Every message has one answer on the same socket:

    Hold  + holder's socket, raw segment            -> Spawned(pid of the holder) | Refused
    Spawn + lifeline, output, HTTP socket, claim    -> Spawned(pid of the replica) | Refused

A holder then says `Held` or `Refused` on its own socket. Before every fork one task and no CUDA are
proven. This process never loads parameters, never hashes, and ends when its socket reads end of file.
"""

from __future__ import annotations

import functools
import gc
import importlib
import logging
import os
import signal
import socket
import sys
from pathlib import Path

from keystage.keysmanager import child, fork_child, holder
from keystage.keysmanager.api import Hold, Refused, Spawned
from keystage.keysmanager.channel import Channel, Told
from keystage.keysmanager.fork_check import ForkError, check_forkable
from keystage.models import cuda_support
from keystage.wire.upkeep import one_heap

log = logging.getLogger("keystage.keysmanager")

PRELOADED = (
    "keystage.worker.app",
    "keystage.worker.torch_executor",
    "keystage.keysmanager.device_copy",
    "keystage.keysmanager.client",
    "keystage.router.app",
    "keystage.router.text",
    "safetensors.torch",
    "prometheus_client.exposition",
    "uvicorn.loops.auto",
    "uvicorn.loops.asyncio",
    "uvicorn.loops.uvloop",
    "uvicorn.lifespan.off",
    "uvicorn.lifespan.on",
    "uvicorn.protocols.http.auto",
    "uvicorn.protocols.http.h11_impl",
    "uvicorn.protocols.http.httptools_impl",
    "uvicorn.protocols.websockets.auto",
    "tokenizers",
    "jinja2.sandbox",
    "encodings.idna",
    "encodings.ascii",
    "multiprocessing.resource_tracker",
)
"""Everything that workers and routers import, also what they import late. An image may lack some."""
PRELOADED_FOR_GPUS = ("keystage.worker.cuda_executor",)
"""Beyond those, where there is a GPU: a second of imports."""
_GPU_NODES = ("/dev/nvidiactl", "/dev/dxg")


def main(arguments: list[str]) -> int:
    """Runs the fork server; returns the exit code."""
    one_heap()  # and of all that are forked from here
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if len(arguments) != 2 or not arguments[1].isdigit():
        print("usage: python -m keystage.keysmanager.forkserver FD", file=sys.stderr)  # noqa: T201
        return 2
    channel = Channel(socket.socket(fileno=int(arguments[1])))
    os.set_inheritable(channel.fileno(), False)
    fork_child.rename("ks-forkserver")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from a terminal; the daemon decides
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps holders
    preload()
    try:
        check_forkable()
    except ForkError as error:
        log.error("after the imports: %s", error)  # every fork will be refused by name
    gc.collect()
    gc.freeze()
    return serve(channel)


def has_kernels_for_gpus() -> bool:
    """Whether replicas may compute on GPUs with kernels of ours; asks no driver, which would start CUDA."""
    return any(Path(node).exists() for node in _GPU_NODES) and cuda_support.is_available()


def preload() -> list[str]:
    """Imports what replicas need; returns what this image lacks."""
    missing = []
    has_gpu = has_kernels_for_gpus()
    for name in (*PRELOADED, *(PRELOADED_FOR_GPUS if has_gpu else ())):
        try:
            importlib.import_module(name)
        except ImportError as error:
            missing.append(f"{name} ({error})")
    if has_gpu:
        try:
            cuda_support.prepare()
        except Exception:  # Triton's own affair, by names it does not promise: no reason to fork nothing
            log.exception("starts on GPUs take longer: Triton could not be prepared")
    if missing:
        log.info("not preloaded: %s", ", ".join(missing))
    return missing


def serve(channel: Channel) -> int:
    """Answers until end of file; returns the exit code."""
    begin = functools.partial(child.run, stock=None)

    def answer(message: Told, fds: list[int]) -> Told:
        if isinstance(message, Hold):
            return _fork_holder(message, fds)
        return holder.answer_to(message, fds, begin)

    return holder.answer_all(channel, answer)


def _fork_holder(message: Hold, fds: list[int]) -> Spawned | Refused:
    """Forks a holder; it is a child of this process, and lives on when this one ends."""
    if len(fds) != 2:
        return Refused(f"Hold with {len(fds)} descriptors, 2 are expected: its socket, the segment")
    try:
        check_forkable()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        pid = os.fork()
    except ForkError as error:
        return Refused(str(error), error.http_status)
    except OSError as error:
        return Refused(f"fork of a holder failed: {error.strerror}", 500)
    if pid == 0:
        code = 1
        try:
            code = holder.hold(message, fds[0], fds[1])
        except BaseException:
            log.exception("holder of %s", message.parameters.file)
            raise
        finally:
            # Never back into the fork server's frames. Memory goes as it is.
            os._exit(code)
    return Spawned(pid)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
