"""What a replay is asked to do; `option_checks` says which wishes contradict each other.

First in the flow: `plan` turns checked options into a schedule. Pure.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Literal

from keystage.loadgen.arrivals import MAX_ARRIVALS
from keystage.loadgen.monitor import Credentials
from keystage.loadgen.target import TargetKind

DEFAULT_DURATION_S = 60.0
DEFAULT_CV = 1.0
"""Poisson: what independent clients send. Burstiness is asked for by name."""

CORE_RPS = 10_000.0
"""What a core is trusted to send. Two cores, shared with a trivial server and other work, kept 20,000/s
with a lag p99 of 2 to 4 ms: 35 to 45 us of CPU a request, most of it the kernel's, and 150 us for an answer
streamed in 16 chunks (docs/loadgen.md). A run in which the generator was late is invalid at any rate."""

DEFAULT_MAX_RATE_RPS = CORE_RPS * len(os.sched_getaffinity(0))
"""For the cores of this process; beyond it the run would measure the generator."""

MAX_REQUESTS = MAX_ARRIVALS
"""A request takes 21 bytes in the plan (`plan`: 420 MB at most), and its row, about 300 bytes, until the
report: 6 GB for this many. Bodies are made when they are asked for."""

DEFAULT_WITHIN = "poisson"
"""What a count per minute becomes, where independent clients are meant."""

DEFAULT_SEARCH_WINDOW_S = 30.0
DEFAULT_SEARCH_RATE_RPS = 1.0
DEFAULT_SEARCH_ATTAINMENT = 0.99
DEFAULT_SEARCH_REPEATS = 3
DEFAULT_SEARCH_PRECISION = 0.05


class OptionError(Exception):
    """Flags that are out of bounds or contradict each other (exit code 2)."""


class TooFewArrivalsError(OptionError):
    """A trace has fewer arrivals than a window of a search takes.

    Attributes:
        count: how many it has.
    """

    def __init__(self, count: int, told: str) -> None:
        super().__init__(told)
        self.count = count


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Options of one replay; None is "not given".

    Attributes:
        url: address of the pipeline, `<gateway>/function/<pipeline>` or the router's own; with
            `mapping`, the gateway's.
        target: how to call it.
        rate_rps: mean arrival rate. With a trace: arrivals are rescaled to it, their shape kept. With a
            search: where it starts.
        cv: coefficient of variation of gamma inter-arrivals, 0 constant, 1 Poisson (default).
        arrivals: arrival process in the language of `arrivals_spec`.
        duration_s: length of the schedule; default 60, or the whole trace. With a search: of a window.
        seed: decides arrivals, lengths, prompts and the requests' own seeds.
        trace: trace to replay, of any kind in `traces.KINDS`.
        trace_kind: of the trace; found out if None.
        functions: only these functions of the trace; so apps and triggers.
        apps: see functions.
        triggers: see functions.
        top: only this many functions, those with the most invocations.
        from_s: begin of the window of the trace that is replayed, in the trace's seconds.
        to_s: its end.
        within: how a count per minute becomes arrivals: `poisson`, `uniform` or `gamma:CV`.
        mapping: values of `--map`, see `mapping`.
        speed: replay the trace this many times as fast (default 1, without a rate).
        closed_loop: this many clients, each sending when its last answer came, instead of a schedule.
        think_s: what a client of the closed loop waits between answer and request.
        search_rate: look for the highest rate that meets the SLO.
        search_attainment: share of requests that must meet it.
        search_repeats: windows at each rate at most; the majority decides.
        search_precision: how near the rates found good and bad must come, as a share.
        scale_lengths: divisor of the trace's token lengths.
        context_tokens: tokens the model admits; prompt + answer are clipped to it.
        body_bytes: body size for `raw`.
        byte_tokens: a token is a byte, as in pipelines without a tokenizer.
        mask: what stands for the missing word, for `masks`.
        bodies: file with a JSON body a line, for `bodies`.
        model: `model` field of the request, left out if None.
        temperature: sampling temperature.
        slo_ttft_s: bound on TTFT at scale 1.
        slo_tpot_s: bound on TPOT at scale 1.
        slo_latency_s: bound on the whole answer at scale 1.
        max_rate_rps: refuse schedules with a higher mean rate, or one that names a higher one.
        timeout_s: a request fails after this long.
        processes: that send; "auto" for as many as the rate and the cores ask for.
        http: version of HTTP.
        retries: of a request that was not answered; each is in the report.
        agents: addresses of agents that send, instead of this machine.
        agent_secret: file with the agents' secret.
        credentials: for the gateway's list of functions.
        out: folder for report.json, requests and plots; None writes nothing.
    """

    url: str
    target: TargetKind = "openai"
    rate_rps: float | None = None
    cv: float | None = None
    arrivals: str | None = None
    duration_s: float | None = None
    seed: int = 0
    trace: Path | None = None
    trace_kind: str | None = None
    functions: tuple[str, ...] = ()
    apps: tuple[str, ...] = ()
    triggers: tuple[str, ...] = ()
    top: int | None = None
    from_s: float | None = None
    to_s: float | None = None
    within: str | None = None
    mapping: tuple[str, ...] = ()
    speed: float | None = None
    closed_loop: int | None = None
    think_s: float | None = None
    search_rate: bool = False
    search_attainment: float | None = None
    search_repeats: int | None = None
    search_precision: float | None = None
    scale_lengths: float = 16.0
    context_tokens: int = 2048
    body_bytes: int = 4096
    byte_tokens: bool = False
    mask: str = "[MASK]"
    bodies: Path | None = None
    model: str | None = None
    temperature: float = 0.0
    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None
    slo_latency_s: float | None = None
    max_rate_rps: float = DEFAULT_MAX_RATE_RPS
    timeout_s: float = 300.0
    processes: int | Literal["auto"] = "auto"
    http: Literal["1.1", "2"] = "1.1"
    retries: int = 0
    agents: tuple[str, ...] = ()
    agent_secret: Path | None = None
    credentials: Credentials | None = None
    out: Path | None = Path("out")
