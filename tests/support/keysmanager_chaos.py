"""Random operations against a real daemon, and a plain dict that says what is right.

Shared by the chaos tests: one over segments of random bytes, one over models on a device (which adds
operations of its own, `keysmanager_chaos_device`). Each operation checks its own answer; the daemon's own
books are asked for nothing but who maps what.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from support.keysmanager_daemon import (
    REPLICA,
    Node,
    Replica,
    children,
    descriptors,
    memfds,
    name_of,
    state_of,
)

from keystage.bundle.api import Pipeline
from keystage.keysmanager.client import Got, KeysManagerError, KeysManagerGone, KeysManagerRefused

SEED = int(os.environ.get("KEYSTAGE_TEST_SEED", "1"))


class Oracle:
    """What ought to be, in plain dicts.

    Args:
        folder: of the bundle.
        stages: those that have parameters.
        write: writes the bundle in a version, undamaged; files come into place whole.
    """

    def __init__(self, folder: Path, stages: Sequence[int], write: Callable[[Path, int], Pipeline]) -> None:
        self.folder = folder
        self.stages = list(stages)
        self._write = write
        self.version = 1
        self.identity: dict[int, str] = {}
        self.digest: dict[int, str] = {}
        self.damaged: set[int] = set()
        self.revoked: set[str] = set()
        self.write()

    def path(self, stage: int) -> Path:
        """A stage's file."""
        return self.folder / f"stage-{stage:02d}.safetensors"

    def write(self) -> None:
        """The bundle in its present version, undamaged."""
        pipeline = self._write(self.folder, self.version)
        self.identity = {stage: pipeline.stages[stage].identity for stage in self.stages}
        self.digest = {
            stage: hashlib.sha256(self.path(stage).read_bytes()).hexdigest() for stage in self.stages
        }
        self.damaged.clear()


class Chaos:
    """The operations; each checks its own answer.

    Attributes:
        module: what replicas run.
        device: where.
        env: beside bundle, stage and device.
        vias: how replicas were started, how often.
    """

    module = REPLICA
    device = "cuda"
    reasons: tuple[str, ...] = ()
    """Further ones for which the fork server may start a replica."""

    def __init__(self, node: Node, oracle: Oracle, rng: random.Random) -> None:
        self.node = node
        self.oracle = oracle
        self.rng = rng
        self.gots: list[tuple[int, Got]] = []
        self.refused: dict[int, int] = {}
        self.env: dict[str, str] = {}
        self.vias: dict[str, int] = {}

    async def step(self, name: str) -> None:
        """One operation, after which whoever ran runs still."""
        operation: Callable[[], Awaitable[None]] = getattr(self, name)
        await operation()
        dead = [replica.pid for replica in self.node.replicas if not replica.alive]
        assert dead == [], f"{name} took replicas with it"

    def judge(self, refused: KeysManagerRefused, due: dict[int, bool]) -> None:
        """Whether a refusal with this status is due."""
        self.refused[refused.status] = self.refused.get(refused.status, 0) + 1
        assert due.get(refused.status), refused

    def stage(self) -> int:
        """Any stage with parameters."""
        return self.rng.choice(self.oracle.stages)

    # ------------------------------------------------------------ starts

    async def start(self, stage: int, **env: str) -> Replica | None:
        """A replica with the right parameters, or a refusal that is due."""
        oracle = self.oracle
        try:
            replica = await self.node.fork(
                oracle.folder, str(stage), self.device, self.module, **{**self.env, **env}
            )
        except KeysManagerRefused as refused:
            self.judge(refused, {409: oracle.identity[stage] in oracle.revoked})
            return None
        assert oracle.identity[stage] not in oracle.revoked, replica.forked
        return replica

    async def check(self, stage: int, replica: Replica) -> None:
        """It has the right parameters; or none from here, with a reason that is due."""
        forked, line = replica.forked, await replica.line()
        self.vias[forked.via] = self.vias.get(forked.via, 0) + 1
        if forked.via == "fork-server":
            # Only with a reason: damaged, no room, what it was to come from died twice, or it was made
            # ready for a CPU by a daemon that remembers the stage and sees no GPU here.
            reasons = ("no room", "ended", "died", "is prepared for cpu", *self.reasons)
            is_due = any(reason in forked.note for reason in reasons)
            assert is_due or (stage in self.oracle.damaged and "load failed" in forked.note), forked
        self.judge_line(stage, replica, line)

    def judge_line(self, stage: int, replica: Replica, line: str) -> None:
        """Whether what a replica says of its parameters is true."""
        is_bare = replica.forked.via == "fork-server"
        assert line == ("none" if is_bare else self.oracle.digest[stage]), replica.forked

    async def fork(self) -> None:
        """A replica of a stage."""
        stage = self.stage()
        if (replica := await self.start(stage)) is not None:
            await self.check(stage, replica)

    async def fork_bare(self) -> None:
        """A replica that needs no parameters."""
        replica = await self.node.fork(None, module=self.module, **self.env)
        assert (replica.forked.via, replica.forked.note, await replica.line()) == ("fork-server", "", "none")

    async def fork_twice(self) -> None:
        """Two replicas at once, perhaps of one stage."""
        stages = [self.stage(), self.stage()]
        for stage, replica in zip(stages, await asyncio.gather(*map(self.start, stages)), strict=True):
            if replica is not None:
                await self.check(stage, replica)

    async def kill_holder_in_fork(self) -> None:
        """A holder dies while a replica is wanted."""
        stage = self.stage()
        starting = asyncio.create_task(self.start(stage))
        await asyncio.sleep(self.rng.uniform(0, 0.05))
        await self.kill_holder()
        replica = await starting
        if replica is not None:
            await self.check(stage, replica)

    async def kill_replica_in_start(self) -> None:
        """The child is dead before it has said a word."""
        replica = await self.start(self.stage(), TEST_DIES="1")
        if replica is not None:
            self.node.replicas.remove(replica)
            replica.end()

    async def asker_gone(self) -> None:
        """Whoever asked gives up: nothing may be left of it."""
        stage = self.stage()
        asking = asyncio.create_task(self.start(stage))
        await asyncio.sleep(self.rng.uniform(0, 0.04))
        asking.cancel()
        for result in await asyncio.gather(asking, return_exceptions=True):
            if isinstance(result, Replica):
                await self.check(stage, result)

    # ------------------------------------------------------------ segments

    async def get(self) -> None:
        """A raw segment: the bytes of the file, or a refusal that is due."""
        stage, oracle = self.stage(), self.oracle
        try:
            got = await self.node.client.get(name_of(oracle.folder, stage))
        except KeysManagerRefused as refused:
            is_revoked = oracle.identity[stage] in oracle.revoked
            is_full = "no room" in refused.reason
            self.judge(refused, {409: is_revoked, 502: stage in oracle.damaged, 507: is_full})
            return
        content = os.pread(got.fd, got.segment.parameters.nbytes + 1, 0)
        assert hashlib.sha256(content).hexdigest() == oracle.digest[stage]
        assert oracle.identity[stage] not in oracle.revoked
        self.gots.append((stage, got))
        if len(self.gots) > 3:
            await self.drop()

    async def drop(self) -> None:
        """Lets go of a raw segment."""
        if self.gots:
            _, got = self.gots.pop(self.rng.randrange(len(self.gots)))
            os.close(got.fd)
            got.claim.close()

    async def evict(self) -> None:
        """A holder goes, unless somebody maps it."""
        stage = self.stage()
        identity = self.oracle.identity[stage]
        before = await self.node.holder(identity)
        try:
            await self.node.client.evict(identity)
        except KeysManagerRefused as refused:
            # Refused while mapped (or under way), and for nothing else.
            is_kept = before is None or before.claims > 0 or not before.pid
            self.judge(refused, {404: is_kept, 409: is_kept})
            return
        assert before is not None
        assert before.claims == 0
        assert state_of(before.pid) in ("", "Z")

    # ------------------------------------------------------------ ends

    def pick(self) -> Replica | None:
        """Any replica."""
        return self.rng.choice(self.node.replicas) if self.node.replicas else None

    async def end(self) -> None:
        """A replica's owner lets go."""
        if (replica := self.pick()) is not None:
            self.node.replicas.remove(replica)
            await asyncio.to_thread(replica.end)

    async def kill_replica(self) -> None:
        """SIGKILL to a replica."""
        if (replica := self.pick()) is not None:
            self.node.replicas.remove(replica)
            replica.kill()
            replica.end()

    async def kill_holder(self) -> None:
        """SIGKILL to a holder."""
        holders = [h.pid for h in (await self.node.client.status()).holders if h.pid]
        if holders:
            self.slay(self.rng.choice(holders))

    async def kill_fork_server(self) -> None:
        """SIGKILL to the fork server."""
        if server := self.node.forkserver():
            self.slay(server)

    async def kill_daemon(self) -> None:
        """With a start under way, whose asker then knows of no replica: none may be left."""
        stage = self.stage()
        asking = asyncio.create_task(self.start(stage))
        await asyncio.sleep(self.rng.uniform(0, 0.05))
        self.node.kill()
        for result in await asyncio.gather(asking, return_exceptions=True):
            assert result is None or isinstance(result, Replica | KeysManagerGone), result
            if isinstance(result, Replica):
                await self.check(stage, result)
        while self.gots:
            await self.drop()
        await self.node.start()

    def slay(self, pid: int) -> None:
        """SIGKILL, unless it is gone."""
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return

    # ------------------------------------------------------------ bundles

    async def damage(self) -> None:
        """One bit of a file turns over."""
        stage = self.stage()
        with self.oracle.path(stage).open("r+b") as file:
            file.seek(place := self.rng.randrange(self.oracle.path(stage).stat().st_size))
            (byte,) = file.read(1)
            file.seek(place)
            file.write(bytes([byte ^ (1 << self.rng.randrange(8))]))
        self.oracle.damaged.add(stage)

    async def mend(self) -> None:
        """The files are what they were."""
        if self.oracle.damaged:
            self.oracle.write()

    async def replace(self) -> None:
        """Another version, or one that was there before."""
        self.oracle.version = self.rng.randint(1, 4)
        self.oracle.write()

    async def revoke(self) -> None:
        """An identity is invalidated for good."""
        identity = self.oracle.identity[self.stage()]
        await self.node.client.invalidate(identity)
        self.oracle.revoked.add(identity)


async def operate(run: Chaos, names: Sequence[str], first: int = 0) -> None:
    """Runs these operations, the first of which is number `first` of its test."""
    for number, name in enumerate(names, first):
        try:
            await run.step(name)
        except (AssertionError, KeysManagerError) as error:
            raise AssertionError(f"seed {SEED}, operation {number}, {name}: {error}") from error


def shuffled(counts: Mapping[str, int], rng: random.Random) -> list[str]:
    """Every operation as often as it is to come, in random order."""
    names = [name for name, count in counts.items() for _ in range(count)]
    rng.shuffle(names)
    return names


async def at_rest(node: Node) -> bool:
    """Nobody maps anything, and nothing is under way."""
    holders = (await node.client.status()).holders
    return all(h.claims == 0 and h.state in ("ready", "failed") for h in holders)


async def evict_all(node: Node) -> None:
    """Ends every holder."""
    for holder in (await node.client.status()).holders:
        if holder.nbytes:
            await node.client.evict(holder.identity)


def open_descriptors(node: Node) -> int:
    """Descriptors of the daemon, those apart that a look at the GPUs has open for a moment."""
    assert node.process is not None
    return sum(not path.startswith("/dev/nvidia") for path in descriptors(node.process.pid))


def below(node: Node) -> set[int]:
    """Fork server and holders."""
    assert node.process is not None
    return node.processes() - {node.process.pid}


async def first_look(node: Node) -> int:
    """Descriptors of a daemon that has started something and holds nothing."""
    await node.fork(None)
    node.replicas.pop().end()
    await node.wait(lambda: len(below(node)) == 1, "the fork server alone")
    return open_descriptors(node)


async def nothing_is_left(run: Chaos, known: set[int], fds: int) -> None:
    """Ends all replicas and holders; nothing may stay but daemon and fork server.

    Args:
        run: whose node it is.
        known: children that this process had before.
        fds: descriptors that the daemon may have, see `first_look`.
    """
    node = run.node
    while run.gots:
        await run.drop()
    for replica in node.replicas:
        await asyncio.to_thread(replica.end)
    node.replicas.clear()
    await node.client.key_stages([])
    await node.wait(lambda: at_rest(node), "claims are released")
    await evict_all(node)
    await node.fork(None)  # the fork server is there again
    node.replicas.pop().end()
    await node.wait(lambda: len(below(node)) == 1, "holders have ended")
    await node.wait(lambda: open_descriptors(node) <= fds, f"{open_descriptors(node)} descriptors are closed")
    assert node.process is not None
    own = known | {node.process.pid}
    await node.wait(lambda: not strangers(own), f"processes {strangers(own)} have ended")
    assert memfds(node.processes()) == {}


def strangers(known: set[int]) -> list[int]:
    """Children of this process that live and were not there before."""
    return [pid for pid in set(children(os.getpid())) - known if state_of(pid) not in ("", "Z")]
