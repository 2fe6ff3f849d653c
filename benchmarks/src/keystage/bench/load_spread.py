"""The part of `keystage bench load` for several GPUs: a key stage's parameters from one GPU to all others.

A standby waits on every GPU; one replica has the parameters, the others copy them from its memory, one after
another, and along a tree: every replica that has them is copied from, so that each round doubles them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from keystage.bench.frame import BenchError, Figure
from keystage.bench.load_world import LoadWorld, Replica


@dataclass(frozen=True, slots=True)
class Spread:
    """One way of spreading, measured.

    Attributes:
        name: as in the table.
        seconds: from the first replica wanted to the last one's first forward pass, per round.
        gbps: GB/s of every copy.
        nbytes: of one copy.
        copies: how many.
    """

    name: str
    seconds: list[float]
    gbps: list[float]
    nbytes: int
    copies: int

    def row(self) -> dict[str, Any]:
        """The table's row."""
        low, high = np.percentile(self.seconds, [25, 75]) * 1e3
        return {
            "way": self.name, "runs": len(self.seconds), "forked_ms": "", "mapped_ms": "",
            "forward_ms": float(np.median(self.seconds)) * 1e3, "quartiles_ms": f"{low:.0f} .. {high:.0f}",
            "ready_ms": "", "gbps": f"{np.median(self.gbps):.1f}", "copy": "peer-gpu",
        }  # fmt: skip

    def total_gbps(self) -> list[float]:
        """GB/s of all copies together, from wanted to the last first forward, per round."""
        return [self.copies * self.nbytes / seconds / 1e9 for seconds in self.seconds]


def rounds_of(gpus: int) -> list[list[int]]:
    """Devices filled at once, round by round, along a tree from device 0: whoever has them gives."""
    found, having = [], 1
    while having < gpus:
        found.append(list(range(having, min(2 * having, gpus))))
        having = min(2 * having, gpus)
    return found


def measure(world: LoadWorld, bundle: Path, gpus: int, rounds: int) -> list[Spread]:
    """One after another, and as a tree.

    Args:
        world: with the bundle's holder.
        bundle: whose stage is spread.
        gpus: over how many, 2 at least.
        rounds: of each way.

    Raises:
        BenchError: a replica got its parameters elsewhere.
    """
    ways = {
        f"one GPU to {gpus - 1} others, one after another": [[index] for index in range(1, gpus)],
        f"one GPU to {gpus - 1} others, as a tree": rounds_of(gpus),
    }
    found = {name: Spread(name, [], [], _nbytes(bundle), gpus - 1) for name in ways}
    for _ in range(rounds):
        for name, order in ways.items():
            _one(world, bundle, order, found[name])
    return list(found.values())


def figures(spreads: Sequence[Spread]) -> dict[str, Figure]:
    """Seconds and GB/s of both, and what the tree is worth."""
    chain, tree = spreads
    return {
        "spread_chain_s": Figure(chain.seconds, f"s, {chain.name}"),
        "spread_tree_s": Figure(tree.seconds, f"s, {tree.name}"),
        "spread_tree_gbps": Figure(tree.total_gbps(), "GB/s of all copies together, as a tree"),
        "spread_speedup": Figure(
            [slow / fast for slow, fast in zip(chain.seconds, tree.seconds, strict=True)],
            "one after another / as a tree",
        ),
    }


def _one(world: LoadWorld, bundle: Path, order: Sequence[Sequence[int]], spread: Spread) -> None:
    devices = [index for at_once in order for index in at_once]
    replicas = [world.forked(bundle, device="cuda:0", peer_gpu=True)]
    try:
        replicas[0].timeline()
        world.keep_standbys_on(bundle, [f"cuda:{index}" for index in devices])
        begin_s = time.monotonic()
        last_s = begin_s
        for at_once in order:
            started: list[Replica] = []
            for index in at_once:
                started.append(world.forked(bundle, device=f"cuda:{index}", peer_gpu=True))
                replicas.append(started[-1])
            last_s = max(replica.wanted_s + replica.timeline().forward_s for replica in started)
        for replica in replicas[1:]:
            nbytes, seconds, way = replica.copied()
            if way != "peer-gpu":
                raise BenchError(f"{spread.name}: a replica got its parameters by {way or 'no copy'}")
            spread.gbps.append(nbytes / seconds / 1e9)
        spread.seconds.append(last_s - begin_s)
    finally:
        for replica in replicas:
            replica.end()
        world.keep_standbys_on(bundle, [f"cuda:{index}" for index in devices], count=0)


def _nbytes(bundle: Path) -> int:
    from keystage.bench.load_bundles import STAGE
    from keystage.bundle.store import load

    return load(bundle).stages[STAGE].nbytes
