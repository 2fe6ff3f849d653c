"""The parts of `keystage bench engine` on GPUs: what is measured, beside what, within how many seconds.

Each part writes lines to the record as it goes and stops when its time is over, so that a lease can be spent
as one likes (`--parts one,each`). How one way is measured is in `engine_gpu_bench`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, replace

from keystage.bench import engine_gpu_timeline
from keystage.bench.engine_gpu_bench import LOG_TEXT, Bench, ask, rival_step, way
from keystage.bench.engine_gpu_burst import doubled
from keystage.bench.engine_gpu_process import Orders
from keystage.bench.engine_gpu_world import Setup, items_per_s, serving
from keystage.bundle import store
from keystage.bundle.dtypes import ITEM_BYTES
from keystage.bundle.source_random import random_parameters
from keystage.loadgen.target import Target
from keystage.local.traffic import traffic_of


async def limit(bench: Bench) -> None:
    """What is measured against: the model's bytes, and how fast a copy is."""
    pipeline = store.load(bench.bundle(bench.sizes.decoder, bench.stages))
    parameters = sum(stage.parameters for stage in pipeline.stages)
    read_bytes = (parameters - pipeline.vocab_size * pipeline.hidden_size) * ITEM_BYTES[pipeline.dtype]
    with Orders(engine_gpu_timeline.answer, "copy") as other:
        rate = other.ask(60.0, do="bandwidth", device=bench.device(0))
    bench.record.add(
        "limit", bytes_per_s=rate, read_bytes=read_bytes, seconds=read_bytes / rate, parameters=parameters,
        source=pipeline.source, dtype=pipeline.dtype, stages=bench.stages,
        transformers=ask(bench, "version"),
    )  # fmt: skip


async def one(bench: Bench) -> None:
    """One GPU: eight stages and one stage in one worker, beside eager transformers."""
    cut, whole = (bench.bundle(bench.sizes.decoder, n) for n in (bench.stages, 1))
    ways = {f"{bench.stages} stages, 1 worker": cut, "1 stage": whole}
    for name, bundle in ways.items():
        setup = bench.setup(bundle, [bench.device(0)])
        await _or_told(bench, way(bench, 1, name, setup, rival="transformers eager"))
    bench.spare(whole)


async def each(bench: Bench) -> None:
    """One GPU: a worker for each of eight stages."""
    bundle = bench.bundle(bench.sizes.decoder, bench.stages)
    setup = bench.setup(bundle, [bench.device(0)] * bench.stages)
    await way(bench, 1, f"{bench.stages} stages, {bench.stages} workers", setup, rounds=2)


async def compiled(bench: Bench) -> None:
    """One GPU: transformers with a static cache, compiled."""
    config = store.load(bench.bundle(bench.sizes.decoder, bench.stages)).config
    for _ in range(bench.sizes.rounds):
        rival_step(bench, "transformers compiled, static cache", "", 1, config, 1, "compiled")


async def timeline(bench: Bench) -> None:
    """Where a step's time goes."""
    bundle = bench.bundle(bench.sizes.decoder, bench.stages)
    ask(bench, "free")
    for rows in (bench.sizes.batches[0], bench.sizes.batches[-1]):
        with Orders(engine_gpu_timeline.answer, "profile") as other:
            found = other.ask(
                max(5.0, bench.left_s), do="timeline", bundle=str(bundle), rows=rows,
                prompt=bench.sizes.prompt, device=bench.device(0),
            )  # fmt: skip
        bench.record.add("timeline", rows=rows, **found)


async def stages(bench: Bench) -> None:
    """One GPU: sixteen stages in one worker, and in 2, 4, 8, 16 of them: the price of a boundary."""
    many = bench.sizes.many
    bundle = bench.bundle(bench.sizes.decoder, many)
    workers = 1
    while workers <= many and bench.left_s > 0:
        name = f"{many} stages, {workers} worker{'s' * (workers > 1)}"
        await _or_told(bench, way(bench, 1, name, bench.setup(bundle, [bench.device(0)] * workers), rounds=1))
        workers *= 2
    bench.spare(bundle)


async def handoff(bench: Bench) -> None:
    """Two workers: through device memory, pinned host memory, pageable host memory."""
    bundle = bench.bundle(bench.sizes.decoder, bench.stages)
    places = {"one GPU": [bench.device(0)] * 2}
    if bench.gpus > 1:
        places["two GPUs"] = [bench.device(0), bench.device(1)]
    for place, devices in places.items():
        for kind in ("auto", "pinned", "pageable"):
            setup = bench.setup(bundle, devices, env={"KEYSTAGE_HANDOFF": kind})
            name = f"2 workers, {place}, hand-off {kind}"
            await _or_told(bench, way(bench, len(set(devices)), name, setup, rounds=1))


async def gpus(bench: Bench) -> None:
    """Several GPUs: eight stages over as many workers, beside a device map."""
    bundle = bench.bundle(bench.sizes.decoder, bench.stages)
    wide = bench.sizes.wide
    for count in bench.several:
        setup = bench.setup(bundle, bench.devices(count), rows=wide)
        name = f"{bench.stages} stages, {count} workers"
        rival = f"transformers eager, device map over {count}"
        batches = (*bench.sizes.batches, wide)
        await _or_told(bench, way(bench, count, name, setup, rival=rival, batches=batches))


async def waves(bench: Bench) -> None:
    """Several GPUs: 1, 2, 4, 8 waves in flight over all of them."""
    bundle = bench.bundle(bench.sizes.decoder, bench.stages)
    count, wide = bench.several[-1], bench.sizes.wide
    for number in (1, 2, 4, 8):
        env = {"KEYSTAGE_WAVES": str(number)}
        setup = bench.setup(bundle, bench.devices(count), rows=wide, env=env)
        name = f"{bench.stages} stages, {count} workers, {number} wave{'s' * (number > 1)}"
        batches = (bench.sizes.batches[-1], wide)
        await _or_told(bench, way(bench, count, name, setup, rounds=1, batches=batches))


async def huge(bench: Bench) -> None:
    """All GPUs: a 66B shape in eight stages, beside a device map."""
    shape, count = bench.sizes.huge, bench.several[-1]
    bench.check_room(2 * random_parameters(shape), count)
    setup = bench.setup(bench.bundle(shape, bench.stages), bench.devices(count), rows=bench.sizes.wide)
    # 2.3 MiB a position, four times those of the decoder.
    setup = replace(setup, kv_bytes=4 * setup.kv_bytes)
    name, rival = f"{shape}, {bench.stages} stages, {count} workers", f"{shape}, device map over {count}"
    batches = (*bench.sizes.batches, bench.sizes.wide)
    await way(bench, count, name, setup, rival=rival, rounds=1, batches=batches)


async def burst(bench: Bench) -> None:
    """A stage doubled from a standby while it serves; on several GPUs each replica has one."""
    sizes, stage = bench.sizes, min(3, bench.stages - 1)
    bundle = bench.bundle(sizes.decoder, bench.stages)
    ask(bench, "free")
    async with asyncio.timeout(max(5.0, bench.left_s)):
        found = await doubled(
            bundle, "cpu" if bench.is_dry else "cuda", stage, at_once=sizes.batches[-1], prompt=sizes.prompt,
            # Longer answers than elsewhere: with the KV state for those, sessions are preempted.
            tokens=4 * sizes.tokens, beside_s=sizes.rate_s, kv_bytes=2 * sizes.kv_bytes // bench.stages,
        )  # fmt: skip
    bench.record.add("burst", gpus=bench.gpus, **asdict(found))


async def replicas(bench: Bench) -> None:
    """Several GPUs: the whole pipeline on each."""
    bundle = bench.bundle(bench.sizes.decoder, bench.stages)
    for count in (1, 2, 3, 4):
        if count <= bench.gpus:
            setup = bench.setup(bundle, [bench.device(0)], replicas=count)
            await _or_told(bench, way(bench, count, f"{count} replicas", setup, rounds=1, at_once=count))


async def large(bench: Bench) -> None:
    """One GPU: a 13B shape in eight stages beside the unsplit one."""
    shape = bench.sizes.large
    name = f"{shape}, {bench.stages} stages, 1 worker"
    bundle = bench.bundle(shape, bench.stages)
    # 800 KiB a position: all requests of a batch must decode at once.
    setup = replace(bench.setup(bundle, [bench.device(0)]), kv_bytes=2 * bench.sizes.kv_bytes)
    ask(bench, "free")
    await _or_told(bench, way(bench, 1, name, setup, rival=f"{shape}, transformers eager", rounds=2))
    bench.spare(bundle)


def other(family: str) -> Callable[[Bench], Awaitable[None]]:
    """The part of an encoder, a network for images, or Whisper: throughput, split and not."""

    async def part(bench: Bench) -> None:
        shape, stages, at_once = bench.sizes.others[family]
        for count in (stages, 1):
            setup = Setup(bench.bundle(shape, count), [bench.device(0)], 4 << 30, 2 * at_once)
            name = f"{shape}, {count} stage{'s' * (count > 1)}"
            await _or_told(bench, _rate(bench, name, setup, at_once))
        found = ask(
            bench, "rate", batch=at_once, seconds=bench.sizes.rate_s,
            config=dict(store.load(bench.bundle(shape, 1)).config),
        )  # fmt: skip
        if found:
            bench.record.add("rate", gpus=1, system=f"{shape}, forward passes alone", items_per_s=found)

    part.__doc__ = f"One GPU: throughput of {family}, split, unsplit, and of forward passes alone."
    return part


async def _rate(bench: Bench, name: str, setup: Setup, at_once: int) -> None:
    def tell(text: str) -> None:
        bench.record.add("log", system=name, text=text[-LOG_TEXT:])

    async with asyncio.timeout(max(5.0, bench.left_s)), serving(setup, tell) as up:
        traffic = traffic_of(up.pipeline)
        target = Target(traffic.kind, up.url, byte_tokens=traffic.byte_tokens)
        await items_per_s(up, target, at_once, bench.sizes.rate_s / 3)  # not counted
        for _ in range(bench.sizes.rounds):
            found = await items_per_s(up, target, at_once, bench.sizes.rate_s)
            bench.record.add("rate", gpus=1, system=name, items_per_s=found, at_once=at_once)


async def _or_told(bench: Bench, measuring: Awaitable[None]) -> None:
    """A way that fails is a line in the record; the next one is measured all the same."""
    try:
        await measuring
    except Exception as error:  # noqa: BLE001  # a lease is short: whatever it is, the rest is measured
        bench.record.add("error", text=f"{type(error).__name__}: {error}"[:2000])


@dataclass(frozen=True, slots=True)
class Part:
    """A part.

    Attributes:
        run: measures.
        budget_s: seconds it may take.
        gpus: how many it needs.
    """

    run: Callable[[Bench], Awaitable[None]]
    budget_s: float
    gpus: int = 1


PARTS: dict[str, Part] = {
    "limit": Part(limit, 120),
    "each": Part(each, 150),
    "one": Part(one, 360),
    "handoff": Part(handoff, 200),
    "timeline": Part(timeline, 90),
    "compiled": Part(compiled, 240),
    "stages": Part(stages, 240),
    "bert": Part(other("bert"), 90),
    "wide_resnet": Part(other("wide_resnet"), 90),
    "whisper": Part(other("whisper"), 150),
    "large": Part(large, 330),
    "gpus": Part(gpus, 300, 2),
    "replicas": Part(replicas, 240, 2),
    "waves": Part(waves, 300, 2),
    "burst": Part(burst, 200),
    "huge": Part(huge, 900, 2),
}
"""In the order in which they run: what everything else needs, and what failed before, first."""


async def measure(bench: Bench, names: Sequence[str], total_s: float) -> None:
    """Runs parts one after another; one that fails is a line in the record.

    Args:
        bench: see there.
        names: which.
        total_s: seconds of all of them.
    """
    end_s = time.monotonic() + total_s
    for name in names:
        part = PARTS[name]
        left_s = end_s - time.monotonic()
        if part.gpus > bench.gpus or left_s < 5.0:
            why = f"needs {part.gpus} GPUs" if part.gpus > bench.gpus else "no time is left"
            bench.record.add("note", text=f"part {name} is left out: {why}")
            continue
        begin_s = time.monotonic()
        bench.until_s = begin_s + min(part.budget_s, left_s)
        bench.record.add("note", text=f"part {name} begins, {bench.left_s:.0f} s")
        await _or_told(bench, part.run(bench))
        bench.record.add("note", text=f"part {name} took {time.monotonic() - begin_s:.0f} s")
