"""One run: a plan (or a closed loop) is sent while the pipeline is watched, and becomes a report.

Comes after `plan`, uses `sending`, `monitor` and `report`; `app` and `search` call it. Nothing is measured
here.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime as dt
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console

from keystage.loadgen import (
    capacity,
    closed_loop,
    files,
    html,
    machine,
    measures,
    plots,
    report,
    requestlog,
    table,
)
from keystage.loadgen.monitor import Monitor, Watched
from keystage.loadgen.options import LoadOptions, OptionError
from keystage.loadgen.plan import Plan
from keystage.loadgen.progress import following
from keystage.loadgen.report import Report
from keystage.loadgen.sender import Progress, Row, client
from keystage.loadgen.sending.fleet import FleetSender, prepared_on
from keystage.loadgen.sending.parts import Manner
from keystage.loadgen.sending.route import RouteError
from keystage.loadgen.sending.run import LEAD_S, Sender, prepared
from keystage.loadgen.starts import ReplicaStart
from keystage.loadgen.target import Target, gateway_of


@dataclasses.dataclass(frozen=True, slots=True)
class Before:
    """What was measured on the idle system before the replay."""

    unloaded: list[Row]
    capacity: capacity.Capacity


async def run(
    options: LoadOptions,
    target: Target,
    plan: Plan | None,
    before: Before | None,
    shown: Console | None,
    notes: Sequence[str] = (),
    starts: Callable[[], Sequence[ReplicaStart]] = list,
) -> Report:
    """Sends, watches, and reports; writes to `options.out`, if there is one.

    Args:
        options: checked.
        target: what is called.
        plan: what is sent; None for a closed loop, whose plan is what it sent.
        before: what was measured on the idle system.
        shown: where progress goes.
        notes: for the report.
        starts: asked for replicas started, after the run.

    Where it is cancelled (Ctrl-C), what there is so far is shown and written, marked as no measurement.

    Raises:
        OptionError: an address or folder that cannot be used.
        SenderError: no process could send.
        OSError: the report cannot be written.
    """
    started_at = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    assert plan is not None or options.closed_loop is not None
    broken_s: float | None = None
    async with _prepared(options, target, plan) as sender:
        start_s = time.monotonic() + (sender.lead_s if isinstance(sender, FleetSender) else LEAD_S)
        async with _watching(options, target, plan, start_s) as monitor:
            with _following(options, plan, start_s, shown) as ended:
                try:
                    sent = await sender.send(start_s, ended)
                except asyncio.CancelledError:
                    broken_s = time.monotonic() - start_s
                    sent = sender.broken_off(broken_s, ended)
    if broken_s is not None and not sent.rows:
        raise asyncio.CancelledError
    if plan is None:
        plan = closed_loop.plan_of(options, target, sent.rows)
    slo = _slo(options, before, target)
    facts = await asyncio.to_thread(machine.facts)
    made = report.assemble(
        plan,
        sent.rows,
        report.Measured(
            started_at=started_at,
            url=target.url,
            target=target.kind,
            streaming=target.is_streaming,
            seed=options.seed,
            slo=slo,
            series=monitor.series,
            watching=report.Watching(monitor.polls, monitor.missed, monitor.last_error),
            machine=facts,
            starts=await asyncio.to_thread(starts),
            unloaded=[] if before is None else before.unloaded,
            capacity=None if before is None else before.capacity,
            notes=[*plan.notes, *notes, *_warnings(monitor, plan), *sent.notes],
        ),
    )
    if broken_s is not None:
        why = f"it was broken off after {max(broken_s, 0.0):.1f} s"
        made = dataclasses.replace(made, valid=False, invalid_because=[why, *made.invalid_because])
    if options.out is not None:
        write(made, options.out, has_requests=True)
    if broken_s is not None:
        if shown is not None:
            table.show(made, shown)
            if options.out is not None:
                shown.print(f"what was measured until then is in {options.out.resolve()}")
        raise asyncio.CancelledError
    return made


def write(made: Report, folder: Path, *, has_requests: bool = False) -> None:
    """Writes report, requests and plots.

    Raises:
        OSError: the folder cannot be written.
    """
    report.write(made, folder, has_requests=has_requests)
    plots.draw(made, folder)
    html.write(made, folder)


@contextlib.asynccontextmanager
async def _prepared(
    options: LoadOptions, target: Target, plan: Plan | None
) -> AsyncIterator[Sender | FleetSender | closed_loop.ClosedLoop]:
    """Whoever sends as the options say, ready."""
    if plan is None:
        async with client(options.timeout_s) as session:
            yield closed_loop.ClosedLoop(options, target, session)
        return
    manner = Manner(options.timeout_s, options.http, options.retries)
    try:
        if options.agents:
            secret = _secret(options)
            async with prepared_on(
                options.agents, secret, plan, target, processes=options.processes, manner=manner
            ) as fleet:
                yield fleet
        else:
            async with prepared(
                plan,
                target,
                processes=options.processes,
                timeout_s=options.timeout_s,
                http=options.http,
                retries=options.retries,
            ) as sender:
                yield sender
    except RouteError as error:
        raise OptionError(str(error)) from error


def _secret(options: LoadOptions) -> str:
    assert options.agent_secret is not None
    try:
        return options.agent_secret.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"--agent-secret-file {options.agent_secret} cannot be read: {error}") from error


@contextlib.asynccontextmanager
async def _watching(
    options: LoadOptions, target: Target, plan: Plan | None, start_s: float
) -> AsyncIterator[Monitor]:
    """Watches the pipeline meanwhile; several are not watched, for a report tells the stages of one."""
    addresses = (target.base_url,) if plan is None or not plan.addresses else plan.addresses
    monitor = Monitor(_watched(options, dataclasses.replace(target, base_url=addresses[0])), start_s)
    if len(addresses) > 1:
        yield monitor
        return
    watching = asyncio.create_task(monitor.run())
    try:
        yield monitor
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching


@contextlib.contextmanager
def _following(
    options: LoadOptions, plan: Plan | None, start_s: float, shown: Console | None
) -> Iterator[Progress]:
    """Whom every request that has ended is told: the file of requests, and whoever looks on."""
    with contextlib.ExitStack() as stack:
        told: list[Progress] = []
        if options.out is not None:
            try:
                files.remove(options.out, (report.FILE, html.FILE, *plots.FILES))
                log = stack.enter_context(requestlog.RequestLog(options.out / requestlog.FILE))
            except OSError as error:
                raise OptionError(f"--out {options.out} cannot be written: {error.strerror}") from error
            told.append(log.add)
        if shown is not None:
            times_s = np.empty(0) if plan is None else plan.times_s
            what = "replay" if options.closed_loop is None else closed_loop.described(options)
            look = following(shown, len(times_s), what, times_s=times_s, start_s=start_s)
            told.append(stack.enter_context(look))

        def ended(row: Row) -> None:
            for tell in told:
                tell(row)

        yield ended


def _watched(options: LoadOptions, target: Target) -> Watched:
    """The list of functions needs credentials; without them only the router is watched."""
    at = gateway_of(target.base_url)
    if at is None or options.credentials is None:
        return Watched(target.stats_url)
    gateway, pipeline = at
    return Watched(target.stats_url, f"{gateway}/system/functions", pipeline, options.credentials)


def _slo(options: LoadOptions, before: Before | None, target: Target) -> measures.Slo:
    given = measures.Slo(options.slo_ttft_s, options.slo_tpot_s, options.slo_latency_s)
    if given.is_set or before is None:
        return given
    return measures.derived_slo(before.unloaded, streaming=target.is_streaming)


def _warnings(monitor: Monitor, plan: Plan) -> list[str]:
    """What makes the figures less than they seem."""
    found = []
    if len(plan.addresses) > 1:
        found.append(f"stages are not watched: requests went to {len(plan.addresses)} pipelines")
    if monitor.last_error:
        found.append(
            f"watching: {monitor.missed} of {monitor.polls} readings missed; last: {monitor.last_error}"
        )
    return found
