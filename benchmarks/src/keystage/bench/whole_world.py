"""The real local platform under a policy: what `e2e`, `mixed` and `soak` run.

Before it: a benchmark describes pipelines, their arrivals and who steers. After it: `Outcome`, which it
compares. Real are supervisor, KeysManager, controller (or the rival's process, `steered`), gateway where
asked for, routers, workers, wire and HTTP; emulated is the device alone: a worker sleeps alpha b + beta for a
batch. The open-loop client is a process of its own (`whole_client`). It must not compare or judge.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import multiprocessing
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import aiohttp
import msgspec
import psutil

from keystage.bench import whole_client
from keystage.bench.frame import BenchError
from keystage.bench.machine_use import used_s_of_all
from keystage.bench.paper_policies import OURS
from keystage.bench.steered import Order
from keystage.bench.whole_client import BODY_BYTES, Floats, Sent
from keystage.bench.whole_models import Part
from keystage.bench.whole_watch import ProcessWatch, ReplicaWatch
from keystage.bundle.api import emulated
from keystage.bundle.store import write
from keystage.local.config import inherited_environment
from keystage.local.errors import LocalError
from keystage.local.pipeline import deployments_for
from keystage.local.program import Program
from keystage.local.system import SystemProcess
from keystage.local.world import LocalWorld

READY_S = 180.0
SAMPLE_S = 0.05
LEAD_S = 1.5
"""From the order to the client until time 0."""
STOP_S = 5.0
LOG_BYTES = 1000
"""Of a crashed process's log, told with its crash."""


class WholeError(BenchError):
    """The platform did not do what a run needs: names it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Served:
    """One pipeline and its traffic.

    Attributes:
        name: of the pipeline.
        parts: its functions.
        times_s: arrivals, sorted.
        deadline_s: objective that the policies are told.
        replicas: of each function at the start.
    """

    name: str
    parts: tuple[Part, ...]
    times_s: Floats
    deadline_s: float
    replicas: tuple[int, ...]

    @property
    def functions(self) -> tuple[str, ...]:
        """Names of its stage functions."""
        return tuple(f"{self.name}-stage-{k}" for k in range(len(self.parts)))


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """One run.

    Attributes:
        served: the pipelines.
        duration_s: length of the schedule.
        order: who steers: an `Order` by name; Keystage is the real controller; None: nobody, the replicas of
            the start stay.
        budget_replicas: R_total.
        through_gateway: requests go through the gateway, as a client's do; else straight to the routers.
        processes_every_s: seconds between samples of all processes, 0: none.
    """

    served: tuple[Served, ...]
    duration_s: float
    order: Order | None
    budget_replicas: int
    through_gateway: bool = False
    processes_every_s: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What a run gave.

    Attributes:
        plan: the run.
        sent: requests of each pipeline, in the plan's order.
        replicas: time-averaged processes within the schedule, by pipeline and function.
        started: replicas started within the schedule.
        start_s: their times from start to ready.
        most_replicas: most stage processes at once.
        used_cores: cores that platform and client kept busy.
        restarts: of gateway and controller, which should be 0.
        processes: samples [n, 7] (`whole_watch.COLUMNS`), where asked for.
        left_over: command lines of processes below this one after everything ended.
    """

    plan: Plan
    sent: tuple[Sent, ...]
    replicas: tuple[tuple[float, ...], ...]
    started: int
    start_s: tuple[float, ...]
    most_replicas: int
    used_cores: float
    restarts: int
    processes: Floats
    left_over: tuple[str, ...] = ()


def measure(plan: Plan) -> Outcome:
    """Runs a plan to its end.

    Raises:
        WholeError: something did not become ready, a warm-up request was not served, or the policy's process
            crashed.
    """
    before = set(_below())
    try:
        outcome = asyncio.run(_measure(plan))
    except LocalError as error:
        raise WholeError(str(error)) from error
    except (aiohttp.ClientError, BrokenProcessPool, TimeoutError) as error:
        raise WholeError(f"a process of the run did not answer: {type(error).__name__}: {error}") from error
    return dataclasses.replace(outcome, left_over=tuple(one for one in _below() if one not in before))


async def _measure(plan: Plan) -> Outcome:
    is_ours = plan.order is not None and plan.order.policy == OURS
    env = {"KEYSTAGE_BUDGET_REPLICAS": str(plan.budget_replicas)}
    if is_ours and plan.order is not None:
        settings = {**plan.order.changes, "effort": plan.order.effort}
        env["KEYSTAGE_POLICY"] = msgspec.json.encode(settings).decode()
    with tempfile.TemporaryDirectory(prefix="keystage-whole-") as folder:
        home = Path(folder) / "home"
        port = 0 if plan.through_gateway else None
        async with LocalWorld(home, gateway_port=port, controller=is_ours, env=env) as world:
            for served in plan.served:
                await _deploy(world, Path(folder), served)
            routers = [await _ready(world, served) for served in plan.served]
            urls = [f"{world.gateway_url}/function/{s.name}" for s in plan.served]
            urls = urls if plan.through_gateway else routers
            rival = None if is_ours else plan.order
            with _client_pool() as pool:
                async with _steering(world, rival, plan.budget_replicas) as steered:
                    loop = asyncio.get_running_loop()
                    lost = await loop.run_in_executor(pool, whole_client.warm_up, urls)
                    if lost:
                        raise WholeError(f"{lost} of the warm-up's requests were not served: no result")
                    return await _observe(plan, world, urls, routers, pool, steered)


@contextlib.contextmanager
def _client_pool() -> Iterator[ProcessPoolExecutor]:
    """The process of the client; ended with a run that is broken off, else it would send all it has."""
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
    try:
        yield pool
    except BaseException:
        for child in set(multiprocessing.active_children()) - others:
            child.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


async def _deploy(world: LocalWorld, folder: Path, served: Served) -> None:
    """Stage after stage: replicas that start beside each other on few cores would teach wrong start times."""
    pipeline = emulated(served.name, len(served.parts), execution="single-pass", activation_bytes=BODY_BYTES)
    bundle = folder / served.name
    bundle.mkdir()
    write(bundle, pipeline)
    env = {
        "KEYSTAGE_MAX_BATCH": str(served.parts[0].most),
        "KEYSTAGE_QUEUE_ITEMS": "100000",
        "KEYSTAGE_RING_BYTES": str(4 << 20),
    }
    deployments = deployments_for(
        bundle,
        pipeline,
        device=[part.device for part in served.parts],
        slo={"deadline_s": served.deadline_s},
        env=env,
    )
    for deployment in deployments:
        await world.deploy(deployment)
        await world.wait_ready(deployment.service, 1, READY_S)
    for function, replicas in zip(served.functions, served.replicas, strict=True):
        if replicas > 1:
            await world.scale(function, replicas)
            await world.wait_ready(function, replicas, READY_S)


async def _ready(world: LocalWorld, served: Served) -> str:
    """Address of the router once everything serves."""
    for function, replicas in zip(served.functions, served.replicas, strict=True):
        await world.wait_ready(function, replicas, READY_S)
    return f"http://{(await world.wait_ready(served.name, 1, READY_S))[0].address}"


@contextlib.asynccontextmanager
async def _steering(
    world: LocalWorld, order: Order | None, budget_replicas: int
) -> AsyncIterator[SystemProcess | None]:
    """The process of a rival's policy, kept as the controller is; ends with the world."""
    if order is None:
        yield None
        return
    told = msgspec.structs.replace(
        order,
        control=str(world.home.control),
        home=str(world.home.path),
        budget_replicas=budget_replicas,
    )
    argv = (sys.executable, "-m", "keystage.bench.steered", msgspec.json.encode(told).decode())
    general, _ours = inherited_environment()
    process = SystemProcess(
        "steered",
        Program(argv, general, serves_http=False),
        logs=world.home.logs,
        lifeline_fd=world.supervisor.lifeline.read_fd,
        now=world.supervisor.now,
    )
    process.start()
    try:
        yield process
    finally:
        await process.stop(STOP_S)


async def _observe(
    plan: Plan,
    world: LocalWorld,
    urls: Sequence[str],
    routers: Sequence[str],
    pool: ProcessPoolExecutor,
    steered: SystemProcess | None,
) -> Outcome:
    """Lets the client send, and watches meanwhile."""
    start_s = time.monotonic() + LEAD_S
    times = [served.times_s for served in plan.served]
    loop = asyncio.get_running_loop()
    sending = loop.run_in_executor(pool, whole_client.send, urls, routers, times, start_s)
    sending.add_done_callback(lambda one: one.cancelled() or one.exception())  # told once, by whoever waits
    clients = [child.pid for child in multiprocessing.active_children() if child.pid is not None]
    await asyncio.sleep(max(0.0, start_s - time.monotonic()))
    watch = ReplicaWatch(world, [name for served in plan.served for name in served.functions])
    processes = ProcessWatch(world, clients, plan.duration_s, plan.processes_every_s)
    before_s = used_s_of_all()
    at_s, last_s = start_s, start_s + plan.duration_s
    while at_s < last_s:
        processes.sample(at_s - start_s)
        await asyncio.sleep(SAMPLE_S)
        now_s = min(time.monotonic(), last_s)
        watch.sample(now_s - at_s)
        at_s = now_s
    used_cores = (used_s_of_all() - before_s) / plan.duration_s
    sent = await sending
    if steered is not None and steered.restarts:
        log = (world.home.logs / "_steered.log").read_text(errors="replace")
        raise WholeError(
            f"the policy's process crashed {steered.restarts} times: ...{log[-LOG_BYTES:].strip()}"
        )
    averages = iter(watch.averages)
    return Outcome(
        plan=plan,
        sent=tuple(sent),
        replicas=tuple(tuple(next(averages) for _ in served.parts) for served in plan.served),
        started=watch.started,
        start_s=watch.start_s,
        most_replicas=watch.most,
        used_cores=used_cores,
        restarts=sum(one.restarts for one in (world.gateway, world.controller) if one is not None),
        processes=processes.samples,
    )


def _below() -> tuple[str, ...]:
    """Command lines of all processes below this one, but Python's own resource tracker."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            line = " ".join(process.cmdline()) or process.name()
            if "resource_tracker" not in line:
                found.append(f"{process.pid} {process.status()} {line[:120]}")
    return tuple(found)
