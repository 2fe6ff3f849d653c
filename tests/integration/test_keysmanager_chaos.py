"""Three hundred random operations against a real daemon; a plain dict and /proc say what is right.

The seed is KEYSTAGE_TEST_SEED (1 by default). The oracle knows which bytes each stage has now, which are
damaged or revoked, and who runs; the daemon's own books are asked for nothing but who maps what.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from support.keysmanager_daemon import (
    Node,
    Replica,
    children,
    descriptors,
    memfds,
    name_of,
    node_of,
    reap_strangers,
    state_of,
    write_bundle,
)

from keystage.keysmanager.client import Got, KeysManagerError, KeysManagerGone, KeysManagerRefused

SEED = int(os.environ.get("KEYSTAGE_TEST_SEED", "1"))
STAGES = 8
STAGE_BYTES = 1 << 20
LIMIT_BYTES = 8 * STAGE_BYTES
"""Six stages fit in 85 % of it: the others press."""
COUNTS = {
    "fork": 59, "fork_bare": 8, "fork_twice": 20, "get": 26, "drop": 20, "end": 42, "kill_replica": 24,
    "kill_holder": 16, "kill_holder_in_fork": 12, "kill_replica_in_start": 8, "evict": 22, "damage": 10,
    "mend": 8, "replace": 9, "revoke": 3, "asker_gone": 9, "kill_fork_server": 2, "kill_daemon": 2,
}  # fmt: skip
"""How often each operation comes, in random order."""


class Oracle:
    """What ought to be, in plain dicts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.version = 1
        self.identity: dict[int, str] = {}
        self.digest: dict[int, str] = {}
        self.damaged: set[int] = set()
        self.revoked: set[str] = set()
        self.expected: dict[int, str] = {}
        self.write()

    def path(self, stage: int) -> Path:
        return self.folder / f"stage-{stage:02d}.safetensors"

    def write(self) -> None:
        """The bundle in its present version, undamaged."""
        pipeline = write_bundle(self.folder, "chaos", [STAGE_BYTES] * STAGES, self.version)
        self.identity = {stage.index: stage.identity for stage in pipeline.stages}
        self.digest = {
            stage: hashlib.sha256(self.path(stage).read_bytes()).hexdigest() for stage in range(STAGES)
        }
        self.damaged.clear()


class Chaos:
    """The operations; each checks its own answer."""

    def __init__(self, node: Node, oracle: Oracle, rng: random.Random) -> None:
        self.node = node
        self.oracle = oracle
        self.rng = rng
        self.gots: list[tuple[int, Got]] = []
        self.refused: dict[int, int] = {}

    async def step(self, name: str) -> None:
        operation: Callable[[], Awaitable[None]] = getattr(self, name)
        await operation()
        dead = [replica.pid for replica in self.node.replicas if not replica.alive]
        assert dead == [], f"{name} took replicas with it"

    def judge(self, refused: KeysManagerRefused, due: dict[int, bool]) -> None:
        """Whether a refusal with this status is due."""
        self.refused[refused.status] = self.refused.get(refused.status, 0) + 1
        assert due.get(refused.status), refused

    def stage(self) -> int:
        return self.rng.randrange(STAGES)

    # ------------------------------------------------------------ starts

    async def start(self, stage: int, **env: str) -> Replica | None:
        """A replica with the right parameters, or a refusal that is due."""
        oracle = self.oracle
        try:
            replica = await self.node.fork(oracle.folder, str(stage), **env)
        except KeysManagerRefused as refused:
            self.judge(refused, {409: oracle.identity[stage] in oracle.revoked})
            return None
        assert oracle.identity[stage] not in oracle.revoked, replica.forked
        return replica

    async def check(self, stage: int, replica: Replica) -> None:
        forked, line = replica.forked, await replica.line()
        self.oracle.expected[replica.pid] = line
        if forked.via == "holder":
            assert line == self.oracle.digest[stage], forked
        else:
            # Only with a reason: damaged, no room, what it was to come from died twice, or it was made
            # ready for a CPU by a daemon that remembers the stage and sees no GPU here.
            assert (forked.via, line) == ("fork-server", "none")
            reasons = ("no room", "ended", "died", "is prepared for cpu")
            is_due = any(reason in forked.note for reason in reasons)
            assert is_due or (stage in self.oracle.damaged and "load failed" in forked.note), forked

    async def fork(self) -> None:
        stage = self.stage()
        if (replica := await self.start(stage)) is not None:
            await self.check(stage, replica)

    async def fork_bare(self) -> None:
        replica = await self.node.fork(None)
        assert (replica.forked.via, replica.forked.note, await replica.line()) == ("fork-server", "", "none")

    async def fork_twice(self) -> None:
        stages = [self.stage(), self.stage()]
        for stage, replica in zip(stages, await asyncio.gather(*map(self.start, stages)), strict=True):
            if replica is not None:
                await self.check(stage, replica)

    async def kill_holder_in_fork(self) -> None:
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
        asking = asyncio.create_task(self.start(self.stage()))
        await asyncio.sleep(self.rng.uniform(0, 0.04))
        asking.cancel()
        for result in await asyncio.gather(asking, return_exceptions=True):
            if isinstance(result, Replica):
                await result.line()

    # ------------------------------------------------------------ segments

    async def get(self) -> None:
        stage, oracle = self.stage(), self.oracle
        try:
            got = await self.node.client.get(name_of(oracle.folder, stage))
        except KeysManagerRefused as refused:
            is_revoked = oracle.identity[stage] in oracle.revoked
            is_full = "no room" in refused.reason
            self.judge(refused, {409: is_revoked, 502: stage in oracle.damaged, 507: is_full})
            return
        content = os.pread(got.fd, STAGE_BYTES + 1, 0)
        assert hashlib.sha256(content).hexdigest() == oracle.digest[stage]
        assert oracle.identity[stage] not in oracle.revoked
        self.gots.append((stage, got))
        if len(self.gots) > 3:
            await self.drop()

    async def drop(self) -> None:
        if self.gots:
            _, got = self.gots.pop(self.rng.randrange(len(self.gots)))
            os.close(got.fd)
            got.claim.close()

    async def evict(self) -> None:
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
        return self.rng.choice(self.node.replicas) if self.node.replicas else None

    async def end(self) -> None:
        if (replica := self.pick()) is not None:
            self.node.replicas.remove(replica)
            await asyncio.to_thread(replica.end)

    async def kill_replica(self) -> None:
        if (replica := self.pick()) is not None:
            self.node.replicas.remove(replica)
            replica.kill()
            replica.end()

    async def kill_holder(self) -> None:
        holders = [h.pid for h in (await self.node.client.status()).holders if h.pid]
        if holders:
            self.slay(self.rng.choice(holders))

    async def kill_fork_server(self) -> None:
        if server := self.node.forkserver():
            self.slay(server)

    async def kill_daemon(self) -> None:
        """With a start under way, whose asker then knows of no replica: none may be left."""
        asking = asyncio.create_task(self.start(self.stage()))
        await asyncio.sleep(self.rng.uniform(0, 0.05))
        self.node.kill()
        for result in await asyncio.gather(asking, return_exceptions=True):
            assert result is None or isinstance(result, Replica | KeysManagerGone), result
        while self.gots:
            await self.drop()
        await self.node.start()

    def slay(self, pid: int) -> None:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return

    # ------------------------------------------------------------ bundles

    async def damage(self) -> None:
        stage = self.stage()
        content = bytearray(self.oracle.path(stage).read_bytes())
        content[self.rng.randrange(len(content))] ^= 1 << self.rng.randrange(8)
        self.oracle.path(stage).write_bytes(content)
        self.oracle.damaged.add(stage)

    async def mend(self) -> None:
        if self.oracle.damaged:
            self.oracle.write()

    async def replace(self) -> None:
        """Another version, or one that was there before."""
        self.oracle.version = self.rng.randint(1, 4)
        self.oracle.write()

    async def revoke(self) -> None:
        identity = self.oracle.identity[self.stage()]
        await self.node.client.invalidate(identity)
        self.oracle.revoked.add(identity)


async def at_rest(node: Node) -> bool:
    """Nobody maps anything, and nothing is under way."""
    holders = (await node.client.status()).holders
    return all(h.claims == 0 and h.state in ("ready", "failed") for h in holders)


async def evict_all(node: Node) -> None:
    for holder in (await node.client.status()).holders:
        if holder.nbytes:
            await node.client.evict(holder.identity)


def open_sockets(node: Node) -> int:
    assert node.process is not None
    return len(descriptors(node.process.pid))


def test_whatever_happens_answers_are_right_and_nothing_is_left(tmp_path: Path) -> None:
    oracle = Oracle(tmp_path / "b")
    found: dict[str, Any] = {}
    before = set(children(os.getpid()))

    async def chaos(node: Node) -> None:
        await node.fork(None)
        node.replicas.pop().end()
        await node.wait(lambda: len(children_alive(node)) == 1, "the fork server alone")
        found["fds"] = open_sockets(node)
        rng = random.Random(SEED)
        run = Chaos(node, oracle, rng)
        names = [name for name, count in COUNTS.items() for _ in range(count)]
        assert len(names) == 300
        rng.shuffle(names)
        for number, name in enumerate(names):
            try:
                await run.step(name)
            except (AssertionError, KeysManagerError) as error:
                raise AssertionError(f"seed {SEED}, operation {number}, {error}") from error
        print(f"seed {SEED}: refusals {run.refused}")
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
        await node.wait(lambda: len(children_alive(node)) == 1, "holders have ended")
        await node.wait(
            lambda: open_sockets(node) <= found["fds"], f"{open_sockets(node)} descriptors are closed"
        )
        assert node.process is not None
        assert memfds(node.processes()) == {}

    def children_alive(node: Node) -> set[int]:
        assert node.process is not None
        return node.processes() - {node.process.pid}

    with node_of(tmp_path, KEYSTAGE_KEYSMANAGER_MEMORY=str(LIMIT_BYTES)) as node:
        asyncio.run(chaos(node))
        assert node.stop() == 0
        reap_strangers()
        assert [pid for pid in set(children(os.getpid())) - before if state_of(pid) != "Z"] == []
