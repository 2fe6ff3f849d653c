"""What comes in, from the socket and over TCP, turned into ledger events.

Between `server` / `peer_server` and `daemon`. Names are resolved here, environments read, and
nonsense refused; what is left is a question for the ledger. Nothing is started here.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, assert_never

from keystage.bundle.errors import BundleError
from keystage.keysmanager import daemon_needs, events
from keystage.keysmanager.api import (
    Evict,
    Fork,
    Get,
    Invalidate,
    KeyStages,
    NodeStatus,
    Ok,
    Parameters,
    Progress,
    StageName,
    Standbys,
    StatusAsked,
)
from keystage.keysmanager.asked import Asked
from keystage.keysmanager.daemon import Daemon
from keystage.keysmanager.daemon_needs import BUNDLE, STAGES, home_of, is_remote
from keystage.keysmanager.daemon_spawns import DESCRIPTORS, Order
from keystage.keysmanager.peer_server import Offered, PeerRefused
from keystage.keysmanager.pod_api import Grant
from keystage.keysmanager.pod_grants import Grants

log = logging.getLogger("keystage.keysmanager")

SOCKET = "KEYSTAGE_KEYSMANAGER"
MAX_STANDBYS = 64


class Folders(Protocol):
    """What is needed of `catalog.Catalog` besides `daemon_names.Resolver`."""

    def local_folder(self, bundle: str) -> Path:
        """Folder with a bundle's small files; raises BundleError."""


class Requests:
    """Implements `server.Port` and `peer_server.PeerBackend`.

    Args:
        daemon: gets the events.
        folders: of bundles that lie elsewhere.
        socket: path of the daemon's socket, told to replicas.
        see_memory: looks at the host's memory and tells it.
        status: the node's, gathered anew.
        metrics: Prometheus text.
        revoke: deletes a copy on disk of revoked parameters.
        find_copy: such a copy, of what came from elsewhere; may block.
        learn: is told of every replica that is wanted, with its environment here.
        grants: what pods may have; None: this node serves none.
    """

    def __init__(
        self,
        daemon: Daemon,
        folders: Folders,
        socket: Path,
        *,
        see_memory: Callable[[], None],
        status: Callable[[], NodeStatus],
        metrics: Callable[[], bytes],
        revoke: Callable[[str], None],
        find_copy: Callable[[str], Path | None],
        learn: Callable[[Fork, Mapping[str, str], Sequence[Parameters]], None],
        grants: Grants | None = None,
    ) -> None:
        self._daemon = daemon
        self._folders = folders
        self._socket = socket
        self._see_memory = see_memory
        self._status = status
        self._metrics = metrics
        self._revoke = revoke
        self._find_copy = find_copy
        self._learn = learn
        self._grants = grants
        self._key_stages: tuple[StageName, ...] | None = None
        self._homes: dict[str, str] = {}
        daemon.again = self.asked

    # ------------------------------------------------------------ server.Port

    def asked(self, asked: Asked) -> None:
        """A request came."""
        message = asked.message
        match message:
            case StatusAsked():
                asked.answer(self._status())
            case Invalidate(identity):
                self._invalidate(identity)
                asked.answer(Ok())
            case Evict(identity):
                self._daemon.asked[asked.number] = asked
                self._daemon.tell(events.EvictAsked(asked.number, identity))
            case Fork():
                self._daemon.go(self._fork(asked, message))
            case Get():
                self._daemon.go(self._get(asked, message))
            case KeyStages(stages):
                self._daemon.go(self._list(asked, stages))
            case Standbys():
                self._daemon.go(self._standbys(asked, message))
            case _:
                assert_never(message)

    def asker_gone(self, asked: Asked) -> None:
        """The connection closed before the answer."""
        number = asked.number
        self._daemon.asked.pop(number, None)
        self._daemon.tell(events.AskerGone(number))
        if number not in self._daemon.ledger.state.asked:
            self._daemon.spawns.forget(number)

    def released(self, asked: Asked) -> None:
        """The connection closed that was the claim on a segment."""
        self._daemon.tell(events.Released(asked.number))

    def progressed(self, asked: Asked, progress: Progress) -> None:
        """Who was given a segment says how far it is."""
        self._daemon.tell(events.Progressed(asked.number, progress.phase))

    # ------------------------------------------------------------ peer_server.PeerBackend

    async def status(self) -> NodeStatus:
        """What is where on this node."""
        return self._status()

    async def offer(self, identity: str) -> Offered | None:
        """Parameters of the raw segment, or of the file at a home on this machine."""
        if identity in self._daemon.ledger.state.revoked:
            return None
        raw = self._daemon.loads.raw(identity)
        if raw is not None:
            return Offered(os.dup(raw.fd), raw.parameters.nbytes)
        return await asyncio.to_thread(self._open, identity, self._daemon.names.parameters(identity))

    async def set_key_stages(self, stages: tuple[StageName, ...]) -> None:
        """Replaces the ranked list."""
        await self.set_list(stages)

    async def invalidate(self, identity: str) -> None:
        """Ends what holds these parameters."""
        self._invalidate(identity)

    def set_grants(self, grants: tuple[Grant, ...]) -> None:
        """Replaces what pods may have."""
        if self._grants is None:
            raise PeerRefused("no pods are served here: KEYSTAGE_KEYSMANAGER_PODS is not set", 409)
        self._grants.replace(grants)

    def metrics(self) -> bytes:
        """Prometheus text."""
        return self._metrics()

    # ------------------------------------------------------------ key stages

    @property
    def has_list(self) -> bool:
        """Whether a key-stage list has come, from whoever."""
        return self._key_stages is not None

    async def set_list(self, stages: Sequence[StageName]) -> None:
        """Keeps these stages in memory, most important first."""
        self._key_stages = tuple(StageName(home_of(name.bundle), name.stage) for name in stages)
        await self.renew_list()

    async def renew_list(self) -> None:
        """Resolves the list again: bundles come, go and change."""
        stages = self._key_stages
        if stages is None:
            return
        found = await self._daemon.names.resolve_known(stages)
        if stages is self._key_stages:  # a newer list may have come meanwhile
            self._see_memory()
            self._daemon.tell(events.KeyStagesSet(found))

    # ------------------------------------------------------------ questions

    async def _fork(self, asked: Asked, fork: Fork) -> None:
        daemon = self._daemon
        if len(asked.fds) != DESCRIPTORS:
            reason = f"{len(asked.fds)} descriptors beside a Fork, 3 are needed: lifeline, output, HTTP"
            return daemon.refuse(asked, reason, 400)
        try:
            needs = daemon_needs.of(fork.env)
            env = await self._local(fork.env)
        except ValueError as error:
            return daemon.refuse(asked, str(error), 400)
        except BundleError as error:
            return daemon.refuse(asked, str(error), 404)
        resolved = await self._resolve(asked, needs.names)
        if resolved is None:
            return None
        parameters = tuple(each for each, _ in resolved)
        shape = ""
        if len(resolved) == 1 and daemon_needs.can_be_standby(fork) and daemon.standbys.is_wanted():
            shape = needs.shape(*resolved[0])
        for each in parameters:
            daemon.dtypes[each.identity] = needs.dtype or each.dtype
        self._learn(fork, env, parameters)
        order = Order(asked, fork, env, parameters)
        daemon.spawns.expect(order)
        self._see_memory()
        is_private = fork.sharing == "private"
        daemon.tell(events.ForkAsked(asked.number, parameters, needs.prepare, shape, is_private))
        return None

    async def _local(self, env: dict[str, str]) -> dict[str, str]:
        """The replica's environment: where its bundle can be read here, and where we are."""
        local = {SOCKET: str(self._socket), **env}
        bundle = env.get(BUNDLE, "")
        if is_remote(bundle):
            folder = await asyncio.to_thread(self._folders.local_folder, bundle)
            local[BUNDLE] = folder.absolute().as_uri()
            self._homes[local[BUNDLE]] = bundle
        return local

    async def _get(self, asked: Asked, get: Get) -> None:
        name = get.name
        home = home_of(name.bundle)
        resolved = await self._resolve(asked, (StageName(self._homes.get(home, home), name.stage),))
        if resolved is not None:
            self._daemon.asked[asked.number] = asked
            self._see_memory()
            parameters = resolved[0][0]
            packed = self._daemon.holders.packed(parameters.identity)
            takes_packed = packed is not None and packed[1].tag == get.packed
            self._daemon.tell(events.GetAsked(asked.number, parameters, takes_packed))

    async def _list(self, asked: Asked, stages: Sequence[StageName]) -> None:
        await self.set_list(stages)
        asked.answer(Ok())

    async def _standbys(self, asked: Asked, message: Standbys) -> None:
        daemon = self._daemon
        if len(asked.fds) != 1:
            return daemon.refuse(asked, f"Standbys need 1 descriptor (lifeline), {len(asked.fds)} came", 400)
        home = home_of(message.name.bundle)
        own = {**message.env, STAGES: str(message.name.stage), BUNDLE: home}
        try:
            needs = daemon_needs.of(own)
            env = await self._local(own)
        except ValueError as error:
            return daemon.refuse(asked, str(error), 400)
        except BundleError as error:
            return daemon.refuse(asked, str(error), 404)
        if not needs.names or not 0 <= message.count <= MAX_STANDBYS:
            where = needs.device or "an emulated device"
            reason = f"{message.count} standbys on {where}: 0 to {MAX_STANDBYS} are possible"
            return daemon.refuse(asked, reason, 400)
        resolved = await self._resolve(asked, needs.names)
        if resolved is not None:
            (lifeline_fd,) = asked.take_fds()
            daemon.standbys.want(needs.shape(*resolved[0]), env, lifeline_fd, message.count)
            asked.answer(Ok())
        return None

    async def _resolve(
        self, asked: Asked, names: Sequence[StageName]
    ) -> list[tuple[Parameters, bytes]] | None:
        """What the names stand for; None: refused, or nobody waits any longer."""
        try:
            resolved = [await self._daemon.names.resolve(name) for name in names]
        except BundleError as error:
            self._daemon.refuse(asked, str(error), 404)
            return None
        return resolved if asked.is_open else None

    def _invalidate(self, identity: str) -> None:
        self._daemon.revoke(identity)  # first: whatever the disk says, they are handed out no longer
        try:
            self._revoke(identity)
        except OSError as error:
            log.warning("revoked parameters %s stay on disk: %s", identity[:12], error)

    def _open(self, identity: str, parameters: Parameters | None) -> Offered | None:
        """A copy on disk, or the file at a home on this machine; the receiver checks the bytes."""
        if (copy := self._find_copy(identity)) is not None and (offered := _opened(copy, None)) is not None:
            return offered
        if parameters is None or is_remote(parameters.name.bundle):
            return None
        try:
            path = self._folders.local_folder(parameters.name.bundle) / parameters.file
        except BundleError:
            return None
        return _opened(path, parameters.nbytes)


def _opened(path: Path, nbytes: int | None) -> Offered | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    size = os.fstat(fd).st_size
    if nbytes not in (None, size):
        os.close(fd)
        return None
    return Offered(fd, size)
