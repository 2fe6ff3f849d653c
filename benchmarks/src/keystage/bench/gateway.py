"""`keystage bench gateway`: the gateway as a proxy, beside nginx as one.

One function that costs next to nothing (nginx that answers 4 KiB from memory), and before it in
turn: our gateway, nginx as a reverse proxy, a naive FastAPI proxy; the same client, the same
bodies, interleaved in rounds. The measure is requests per second of processor time of the proxy's
process alone, from /proc, so neither client nor function nor what else runs here enters it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import multiprocessing
import tempfile
from collections.abc import Iterator
from multiprocessing.pool import Pool
from pathlib import Path

import numpy as np
import psutil

from keystage.bench import gateway_nginx, gateway_rivals
from keystage.bench.frame import BenchError, BenchResult, Figure
from keystage.bench.gateway_client import LoadReport, load
from keystage.local.world import LocalWorld

NAME = "bench"
PATH = f"/function/{NAME}"
BODY_BYTES = 4096
CONCURRENCY = 64
ROUNDS = 7
ROUND_S = 2.0
LIGHT_S = 1.0
GATEWAY, NGINX, NAIVE, BARE, DIRECT = (
    "keystage gateway",
    "nginx",
    "FastAPI + aiohttp",
    "its server alone",
    "direct",
)


@dataclasses.dataclass(slots=True)
class _Target:
    """A proxy under load.

    Attributes:
        url: where to ask.
        pid: whose processor time counts.
        loads: under load, one a round.
        cpu_s: processor time of each, user and system.
        light_p50_s: median latency of one request at a time, one a round.
    """

    url: str
    pid: int
    loads: list[LoadReport] = dataclasses.field(default_factory=list)
    cpu_s: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    light_p50_s: list[float] = dataclasses.field(default_factory=list)

    @property
    def per_cpu_s(self) -> list[float]:
        """Requests per second of processor time, one a round."""
        return [report.requests / sum(cpu) for report, cpu in zip(self.loads, self.cpu_s, strict=True)]


def run(*, quick: bool = False) -> BenchResult:
    """Measures throughput per processor second and added latency.

    Args:
        quick: two rounds only.

    Raises:
        BenchError: nginx is not here, or a proxy answers wrongly.
    """
    return asyncio.run(_run(2 if quick else ROUNDS))


async def _run(rounds: int) -> BenchResult:
    version = gateway_nginx.version()
    with tempfile.TemporaryDirectory(prefix="keystage-bench-") as name:
        folder = Path(name)
        async with LocalWorld(folder / "home", gateway_port=0, controller=False) as world:
            await world.deploy(gateway_nginx.function(NAME, BODY_BYTES, folder / "function"))
            (replica,) = await world.wait_ready(NAME, 1)
            assert world.gateway is not None
            assert world.gateway.process is not None
            gateway = (f"{world.gateway_url}{PATH}", world.gateway.process.pid)
            with _targets(gateway, (replica.address, replica.pid), folder) as targets:
                await asyncio.to_thread(_measure, targets, rounds)
    return _result(targets, version)


@contextlib.contextmanager
def _targets(
    gateway: tuple[str, int], function: tuple[str, int], folder: Path
) -> Iterator[dict[str, _Target]]:
    address, pid = function
    with (
        gateway_nginx.reverse_proxy(PATH, address, folder / "proxy") as nginx,
        gateway_rivals.naive_proxy(address) as naive,
        gateway_rivals.bare_server(BODY_BYTES) as bare,
    ):
        yield {
            GATEWAY: _Target(*gateway),
            NGINX: _Target(*nginx),
            NAIVE: _Target(*naive),
            BARE: _Target(*bare),
            DIRECT: _Target(f"http://{address}/", pid),
        }


def _measure(targets: dict[str, _Target], rounds: int) -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        for target in targets.values():
            _ask(pool, target, CONCURRENCY, LIGHT_S / 2)
        for _ in range(rounds):
            for name, target in targets.items():
                if name != DIRECT:
                    before = _cpu_s(target.pid)
                    report = _ask(pool, target, CONCURRENCY, ROUND_S)
                    after = _cpu_s(target.pid)
                    target.loads.append(report)
                    target.cpu_s.append((after[0] - before[0], after[1] - before[1]))
            for target in targets.values():
                alone = _ask(pool, target, 1, LIGHT_S)
                target.light_p50_s.append(float(np.median(alone.latencies_s)))


def _ask(pool: Pool, target: _Target, concurrency: int, duration_s: float) -> LoadReport:
    report = pool.apply(load, (target.url, BODY_BYTES, BODY_BYTES, concurrency, duration_s))
    if report.failed or not report.requests:
        raise BenchError(
            f"{target.url}: {report.failed} of {report.failed + report.requests} requests failed"
        )
    return report


def _cpu_s(pid: int) -> tuple[float, float]:
    """User and system time of a process, seconds."""
    times = psutil.Process(pid).cpu_times()
    return times.user, times.system


def _result(targets: dict[str, _Target], version: str) -> BenchResult:
    gateway, nginx, naive, bare, direct = (targets[k] for k in (GATEWAY, NGINX, NAIVE, BARE, DIRECT))
    pairs = list(zip(gateway.light_p50_s, direct.light_p50_s, strict=True))
    figures = {
        "rps_ratio_nginx": Figure(
            _ratios(gateway, nginx), "requests per CPU second, gateway to nginx as a proxy", "at least 0.15"
        ),
        "added_ms_p50": Figure(
            [1e3 * (through - direct) for through, direct in pairs],
            "median of one request at a time, through the gateway less direct, ms",
            "at most 1",
        ),
        "naive_ratio_nginx": Figure(_ratios(naive, nginx), "the same of a naive FastAPI proxy"),
    }
    how = (
        f"nginx {version}, one worker, kept connections upstream; {BODY_BYTES} bytes there and back, "
        f"{CONCURRENCY} requests in flight; function, client and proxy share this machine's cores, so the "
        "measure is the processor time of the proxy's process (user and system, /proc/PID/stat), not its rate"
    )
    return BenchResult(
        [_row(k, target) for k, target in targets.items()], figures, [how, _where(gateway, bare)]
    )


def _ratios(target: _Target, other: _Target) -> list[float]:
    return [a / b for a, b in zip(target.per_cpu_s, other.per_cpu_s, strict=True)]


def _where(gateway: _Target, bare: _Target) -> str:
    """Where the gateway's time goes."""
    each_us = 1e6 / float(np.median(gateway.per_cpu_s))
    bare_us = 1e6 / float(np.median(bare.per_cpu_s))
    system = sum(cpu[1] for cpu in gateway.cpu_s) / sum(sum(cpu) for cpu in gateway.cpu_s)
    return (
        f"of the gateway's {each_us:.0f} microseconds a request, {bare_us:.0f} are what its server takes "
        f"alone (parse, task, answer of {BODY_BYTES} bytes); the other {each_us - bare_us:.0f} are headers, "
        "choice of replica, counters and the exchange with the replica; "
        f"{system:.0%} of all is the kernel's"
    )


def _row(name: str, target: _Target) -> dict[str, str | float]:
    row: dict[str, str | float] = {"proxy": name}
    if target.loads:
        latencies_s = np.concatenate([report.latencies_s for report in target.loads])
        elapsed_s = sum(report.elapsed_s for report in target.loads)
        row |= {
            "requests/s": sum(report.requests for report in target.loads) / elapsed_s,
            "per CPU s": float(np.median(target.per_cpu_s)),
            "loaded p50 ms": 1e3 * float(np.median(latencies_s)),
            "loaded p99 ms": 1e3 * float(np.percentile(latencies_s, 99)),
        }
    else:
        row |= dict.fromkeys(("requests/s", "per CPU s", "loaded p50 ms", "loaded p99 ms"), "")
    return row | {"alone p50 ms": 1e3 * float(np.median(target.light_p50_s))}
