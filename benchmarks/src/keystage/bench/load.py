"""`keystage bench load`: from "a replica is wanted" to its first forward pass, by every way of starting.

Real daemon, fork server, holders, standbys and workers (`load_world`); three bundles of random
parameters in rotation (`load_bundles`). Per round each way starts one replica of the round's bundle,
which then computes: its output must be, byte for byte, the one of a fresh process. The timeline of each
start is the worker's own, so that a start that is too slow shows where its time goes. On a GPU the copy
is set against a copy from memory pinned before and against other loaders (`load_rivals`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from keystage.bench import load_rivals, load_spread
from keystage.bench.frame import BenchError, BenchResult, Figure
from keystage.bench.load_bundles import STAGE, write_bundle
from keystage.bench.load_world import LoadWorld, Replica, Timeline
from keystage.bench.page_cache import drop_from_page_cache
from keystage.bundle.api import Pipeline
from keystage.bundle.safetensors_file import header_bytes

ROUNDS = 7
QUICK_ROUNDS = 3
BUNDLES = 3
IN_A_ROW = 4
PROMPT_TOKENS = 16
CPU_GIB, GPU_GIB = 1.0, 5.0


@dataclass(slots=True)
class Way:
    """One way of starting and what was measured of it.

    Attributes:
        name: as in the table.
        start: starts a replica of a bundle; everything it needs is ready.
        via: what the daemon must answer, empty: it is not asked.
        lines: timelines, one a round.
        copies: (bytes, seconds, way) of the copies to the device.
    """

    name: str
    start: Callable[[Path], Replica]
    via: str = ""
    lines: list[Timeline] = field(default_factory=list)
    copies: list[tuple[int, float, str]] = field(default_factory=list)

    def forward_s(self) -> list[float]:
        """Seconds to the first forward, per round."""
        return [line.forward_s for line in self.lines]

    def listening_s(self) -> list[float]:
        """Seconds until parameters were mapped and the socket was up, per round."""
        return [line.listening_s for line in self.lines]

    def gbps(self) -> list[float]:
        """GB/s of the copies to the device, per round."""
        return [nbytes / seconds / 1e9 for nbytes, seconds, _ in self.copies if seconds]


def run(
    *,
    quick: bool = False,
    gb: float = 0.0,
    device: str = "",
    threads: int = 1,
    rounds: int = 0,
    gpus: int = 0,
) -> BenchResult:
    """Measures.

    Args:
        quick: three rounds, and no start from a cold disk.
        gb: GiB of a stage's parameters; 0: 5 on a GPU, 1 on the CPU.
        device: `cpu`, `cuda`, `cuda:N`; empty: a GPU where there is one.
        threads: of a worker on the CPU.
        rounds: starts by each way; 0: 7, or 3 in the quick form.
        gpus: over how many the parameters are spread from one, 0: over all that are there.

    Raises:
        BenchError: fewer GPUs than asked for; a start failed, took another way than the one measured, or
            computed something else.
    """
    device = _device(device)
    is_gpu = device.startswith("cuda")
    spread_over = _spread_over(gpus, is_gpu=is_gpu)
    gib = gb or (GPU_GIB if is_gpu else CPU_GIB)
    dtype = "bfloat16" if is_gpu else "float32"
    rounds = rounds or (QUICK_ROUNDS if quick else ROUNDS)
    with LoadWorld(device, dtype, threads) as world:
        folders = [world.folder / f"load{number}" for number in range(BUNDLES)]
        pipelines = [
            write_bundle(folder, folder.name, gib, dtype, number) for number, folder in enumerate(folders)
        ]
        os.sync()
        nbytes = pipelines[0].stages[STAGE].nbytes
        rivals = _rivals(folders[0], device) if is_gpu else []
        ways = _ways(world, folders, is_gpu=is_gpu, quick=quick)
        check = _Check(pipelines[0])
        world.hold(folders)
        for folder in folders:  # what a daemon does once per stage, not once per start
            _one(ways["fork"], folder, None)
        for number in range(rounds):
            for way in ways.values():
                _one(way, folders[number % BUNDLES], check)
        rows = [_row(way) for way in ways.values()]
        rows += _in_a_row(world, folders, check, is_gpu=is_gpu)
        several = spread_over > 1
        spreads = load_spread.measure(world, folders[0], spread_over, rounds) if several else []
        notes = _notes(world, ways, rivals, nbytes)
    rows += [_rival_row(rival) for rival in rivals if rival.seconds]
    rows += [spread.row() for spread in spreads]
    figures = _figures(ways, rivals, is_gpu=is_gpu)
    return BenchResult(rows, figures | (load_spread.figures(spreads) if spreads else {}), notes)


def output_of(replica: Replica, pipeline: Pipeline) -> str:
    """Hash of what a replica of the stage with parameters makes of a fixed input."""
    hidden, dtype = pipeline.hidden_size, pipeline.dtype
    values = np.random.default_rng(7).standard_normal((PROMPT_TOKENS, hidden), dtype=np.float32)
    if dtype == "bfloat16":
        body = (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    else:
        body = values.astype(dtype).tobytes()
    return replica.work(header_bytes({"hidden": (PROMPT_TOKENS, hidden)}, dtype) + body)


class _Check:
    """Outputs, equal for equal parameters whatever the way."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._expected: dict[Path, str] = {}

    def __call__(self, way: str, bundle: Path, replica: Replica) -> None:
        found = output_of(replica, self._pipeline)
        expected = self._expected.setdefault(bundle, found)
        if found != expected:
            raise BenchError(
                f"{way}: {bundle.name} answers {found[:16]}, a fresh process answered {expected[:16]}"
            )


def _device(asked: str) -> str:
    if asked and asked != "cuda":
        return asked
    from keystage.keysmanager.inventory import gpus

    found, reason = gpus()
    if found:
        return "cuda:0"
    if asked:
        raise BenchError(f"--device {asked}: this machine shows no GPU ({reason})")
    return "cpu"


def _spread_over(asked: int, *, is_gpu: bool) -> int:
    from keystage.keysmanager.inventory import gpus

    there = len(gpus()[0]) if is_gpu else 0
    if asked > there:
        raise BenchError(f"--gpus {asked}: this machine shows {there}")
    return asked or there


def _ways(world: LoadWorld, folders: Sequence[Path], *, is_gpu: bool, quick: bool) -> dict[str, Way]:
    """The ways, in an order in which a fresh process says first what the output is."""
    ways = {"cached": Way("fresh process, page cache", world.fresh)}
    if not quick:

        def cold(bundle: Path) -> Replica:
            drop_from_page_cache(bundle / f"stage-{STAGE:02d}.safetensors")
            return world.fresh(bundle)

        ways["cold"] = Way("fresh process, cold disk", cold)
    ways["fork"] = Way("fork from holder", world.forked, "holder")
    if not is_gpu:
        return ways

    def standby(bundle: Path) -> Replica:
        world.keep_standbys(bundle, 1, folders)
        replica = world.forked(bundle)
        return _dismissing(world, bundle, replica)

    def unregistered(bundle: Path) -> Replica:
        world.keep_standbys(bundle, 1, None)
        replica = world.forked(bundle)
        return _dismissing(world, bundle, replica)

    def peer(bundle: Path) -> Replica:
        exporter = world.forked(bundle, device=_other_gpu(world.device), peer_gpu=True)
        try:
            exporter.timeline()
            world.keep_standbys(bundle, 1, None)
            replica = world.forked(bundle, peer_gpu=True)
            replica.timeline()
        finally:
            exporter.end()
        return _dismissing(world, bundle, replica)

    ways["standby"] = Way("standby, registered ahead", standby, "standby")
    ways["unregistered"] = Way("standby, not registered", unregistered, "standby")
    ways["peer"] = Way("standby, parameters from a peer's GPU", peer, "standby")
    return ways


def _dismissing(world: LoadWorld, bundle: Path, replica: Replica) -> Replica:
    """No standby is started beside the measured replica."""
    world.keep_standbys(bundle, 0)
    return replica


def _other_gpu(device: str) -> str:
    from keystage.keysmanager.inventory import gpus

    return "cuda:1" if device == "cuda:0" and len(gpus()[0]) > 1 else device


def _one(way: Way, bundle: Path, check: _Check | None) -> None:
    """Starts one replica and ends it; without a check it is not counted."""
    replica = way.start(bundle)
    try:
        line = replica.timeline()
        if check is None:
            return
        if way.via and replica.via != way.via:
            raise BenchError(f"{way.name}: {bundle.name} was started by {replica.via}")
        check(way.name, bundle, replica)
        way.lines.append(line)
        way.copies.append(replica.copied())
    finally:
        replica.end()


def _in_a_row(
    world: LoadWorld, folders: Sequence[Path], check: _Check, *, is_gpu: bool
) -> list[dict[str, Any]]:
    """Several replicas of one stage, one right after another, as a burst asks for them."""
    bundle = folders[0]
    ways = [Way(f"fork, {IN_A_ROW} in a row", world.forked, "holder")]
    if is_gpu:
        ways.append(Way(f"standby, {IN_A_ROW} in a row", world.forked, "standby"))
    rows = []
    for way in ways:
        if way.via == "standby":
            world.keep_standbys(bundle, IN_A_ROW, folders)
        replicas: list[Replica] = []
        try:
            replicas.extend(way.start(bundle) for _ in range(IN_A_ROW))
            for replica in replicas:
                way.lines.append(replica.timeline())
                if replica.via != way.via:
                    raise BenchError(f"{way.name}: one was started by {replica.via}")
                check(way.name, bundle, replica)
                way.copies.append(replica.copied())
        finally:
            for replica in replicas:
                replica.end()
            if way.via == "standby":
                world.keep_standbys(bundle, 0)
        rows.append(_row(way))
    return rows


def _rivals(bundle: Path, device: str) -> list[load_rivals.Rival]:
    path = bundle / f"stage-{STAGE:02d}.safetensors"
    return [load_rivals.measure(way, path, device) for way in load_rivals.WAYS]


def _row(way: Way) -> dict[str, Any]:
    def middle(values: Sequence[float]) -> float:
        return float(np.median(values)) * 1e3

    low, high = np.percentile(way.forward_s(), [25, 75]) * 1e3
    ways = sorted({copied[2] for copied in way.copies if copied[2]})
    return {
        "way": way.name,
        "runs": len(way.lines),
        "forked_ms": middle([line.forked_s for line in way.lines]),
        "mapped_ms": middle([line.mapped_s for line in way.lines]),
        "forward_ms": middle(way.forward_s()),
        "quartiles_ms": f"{low:.0f} .. {high:.0f}",
        "ready_ms": middle([line.ready_s for line in way.lines]),
        "gbps": f"{np.median(way.gbps()):.1f}" if way.gbps() else "",
        "copy": ", ".join(ways),
    }


def _rival_row(rival: load_rivals.Rival) -> dict[str, Any]:
    low, high = np.percentile(rival.seconds, [25, 75]) * 1e3
    middle = float(np.median(rival.seconds)) * 1e3
    return {
        "way": f"{rival.way} (load alone)",
        "runs": len(rival.seconds),
        "forked_ms": "",
        "mapped_ms": middle,
        "forward_ms": "",
        "quartiles_ms": f"{low:.0f} .. {high:.0f}",
        "ready_ms": "",
        "gbps": f"{np.median(rival.gbps):.1f}",
        "copy": "",
    }


def _figures(ways: dict[str, Way], rivals: Sequence[load_rivals.Rival], *, is_gpu: bool) -> dict[str, Figure]:
    cached, fork = ways["cached"], ways["fork"]
    figures: dict[str, Figure] = {}
    if is_gpu:
        figures["standby_s"] = Figure(
            ways["standby"].forward_s(), "s from wanted to first forward, standby", "at most 0.15"
        )
        figures["standby_unregistered_s"] = Figure(
            ways["unregistered"].forward_s(),
            "s from wanted to first forward, standby, not registered",
        )
        figures["fork_s"] = Figure(fork.forward_s(), "s from wanted to first eager forward", "at most 0.90")
        figures["peer_gpu_s"] = Figure(
            ways["peer"].forward_s(),
            "s from wanted to first forward, standby filled from a peer's GPU", "at most 0.08",
        )  # fmt: skip
        figures["peer_gpu_copy_s"] = Figure(
            [seconds for _, seconds, _ in ways["peer"].copies], "s of that copy alone"
        )
        limit = next(rival for rival in rivals if rival.way == load_rivals.LIMIT)
        if limit.seconds:
            best = float(np.median(limit.gbps))
            for name, way in (
                ("bandwidth_ratio", ways["standby"]),
                ("unregistered_bandwidth_ratio", ways["unregistered"]),
                ("fork_bandwidth_ratio", fork),
            ):
                target = "at least 0.85" if name == "bandwidth_ratio" else ""
                figures[name] = Figure(
                    [gbps / best for gbps in way.gbps()],
                    f"{way.name}: GB/s over the pinned-copy limit",
                    target,
                )
    else:
        figures["fork_speedup"] = Figure(
            _ratios(cached.listening_s(), fork.listening_s()),
            "fresh process (page cache) / fork, to parameters mapped and socket up", "at least 20",
        )  # fmt: skip
    figures["first_forward_speedup"] = Figure(
        _ratios(cached.forward_s(), fork.forward_s()),
        "fresh process (page cache) / fork, to the first forward", "" if is_gpu else "at least 10",
    )  # fmt: skip
    if "cold" in ways:
        figures["fresh_cold_s"] = Figure(
            ways["cold"].forward_s(), "s from wanted to first forward, fresh process, cold disk"
        )
    return figures


def _ratios(slow: Sequence[float], fast: Sequence[float]) -> list[float]:
    return [before / after for before, after in zip(slow, fast, strict=True)]


def _notes(
    world: LoadWorld, ways: dict[str, Way], rivals: Sequence[load_rivals.Rival], nbytes: int
) -> list[str]:
    memory = world.status().memory
    notes = [
        f"{nbytes / (1 << 30):.2f} GiB a stage, {BUNDLES} bundles in rotation, equal outputs by all ways",
        "a fresh process reads, hashes and converts its file itself; forks and standbys find it checked",
        f"segments of {memory.segment_bytes} bytes, 2 MiB pages free: {memory.huge_free_bytes} bytes",
    ]
    if "cold" in ways:
        notes.append(
            "cold disk: the bundle's pages were dropped (POSIX_FADV_DONTNEED, checked); libraries stay"
        )
    notes += [f"{rival.way} is not in the table: {rival.note}" for rival in rivals if not rival.seconds]
    return notes
