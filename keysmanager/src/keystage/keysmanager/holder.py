"""A holder: keeps one stage's parameters in memory and forks replicas that have them at once.

Forked by `forkserver` for a `Hold`; tells `Held` when it is ready, then forks on request until its
socket reads end of file. It has one task and no CUDA, as its parent. It never loads or hashes: its
segment was checked before it was sealed. Its end takes nothing from its children.
"""

from __future__ import annotations

import functools
import gc
import logging
import os
import socket
from collections.abc import Callable

from keystage.bundle.errors import BundleError, SplitError
from keystage.keysmanager import child, fork_child, packed_segment
from keystage.keysmanager.api import Held, Hold, Refused, Spawn
from keystage.keysmanager.channel import Channel, ChannelError, Told
from keystage.keysmanager.fork_check import ForkError, check_forkable
from keystage.keysmanager.fork_spawn import Begin, spawn
from keystage.keysmanager.hold_stock import stocked
from keystage.keysmanager.segment import SegmentError
from keystage.models.shared import SharedMemoryError
from keystage.wire.upkeep import Upkeep

log = logging.getLogger("keystage.keysmanager")


def hold(message: Hold, sock_fd: int, segment_fd: int) -> int:
    """A holder's life; returns its exit code.

    Args:
        message: what to hold.
        sock_fd: its own socket to the daemon.
        segment_fd: the raw segment.
    """
    sock_fd, segment_fd = fork_child.keep_only([sock_fd, segment_fd])
    fork_child.lead_group()
    fork_child.rename(f"ks-hold:{message.parameters.name.stage}:{message.parameters.pipeline}")
    channel = Channel(socket.socket(fileno=sock_fd))
    try:
        stock = stocked(message, segment_fd)
        check_forkable()
    except Exception as error:  # whatever it is, the daemon must hear of it by name
        is_memory = isinstance(error, SegmentError | SharedMemoryError | MemoryError)
        if not isinstance(error, SegmentError | SharedMemoryError | BundleError | SplitError | ForkError):
            log.exception("holder of %s", message.parameters.file)
        channel.send(Refused(f"holder of {message.parameters.file}: {error}", 507 if is_memory else 502))
        return 1
    os.close(segment_fd)  # the mapping keeps the memory
    gc.collect()
    gc.freeze()
    published, stock.published = stock.published, None
    form = None if published is None else published[1]
    fds = () if published is None else published[:1]
    channel.send(Held(pid=os.getpid(), packed_bytes=stock.packed_bytes, packed=form), fds)
    packed_segment.closed(published)
    return serve_spawns(channel, functools.partial(child.run, stock=stock))


def serve_spawns(channel: Channel, begin: Begin) -> int:
    """Forks a replica for each `Spawn`, until end of file; returns the exit code."""
    return answer_all(channel, lambda message, fds: answer_to(message, fds, begin))


def answer_all(channel: Channel, answer: Callable[[Told, list[int]], Told]) -> int:
    """Answers every message until end of file; the descriptors beside it are closed; gives the exit code."""
    upkeep = Upkeep()
    while True:
        try:
            received = channel.receive()
        except ChannelError as error:
            channel.send(Refused(str(error)))
            continue
        if received is None:
            return 0
        message, fds = received
        try:
            channel.send(answer(message, fds))
        finally:
            for fd in fds:
                os.close(fd)
        upkeep.now_and_then()  # after the answer: what it takes nobody waits for


def answer_to(message: Told, fds: list[int], begin: Begin) -> Told:
    """Carries out a `Spawn`; refuses what is none."""
    if not isinstance(message, Spawn):
        return Refused(f"{type(message).__name__} is not for a forker: it takes Spawn")
    try:
        return spawn(message, fds, begin)
    except ForkError as error:
        log.warning("%s", error)
        return Refused(str(error), error.http_status)
