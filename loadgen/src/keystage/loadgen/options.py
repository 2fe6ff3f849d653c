"""What a replay is asked to do, and which wishes contradict each other.

First in the flow: `plan` turns checked options into a schedule. Pure. Every error names the flag,
the bound and the value.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

from keystage.loadgen.monitor import Credentials
from keystage.loadgen.target import TargetKind, is_http_url

DEFAULT_DURATION_S = 60.0
DEFAULT_CV = 1.0
"""Poisson: what independent clients send. Burstiness is asked for by name."""

DEFAULT_MAX_RATE_RPS = 2000.0
"""One process keeps this rate with a lag p99 of 2 to 12 ms on one of two shared cores (measured
against a trivial server on the same machine: 225 us of CPU a request, and 700 us for an answer
streamed in 16 chunks, which was kept at 600/s with 2.4 ms). Beyond it the run would measure the
generator."""

MAX_REQUESTS = 1_000_000
"""Every request keeps its body and row in memory until the report."""


class OptionError(Exception):
    """Flags that are out of bounds or contradict each other (exit code 2)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Options of one replay; None is "not given".

    Attributes:
        url: address of the pipeline, `<gateway>/function/<pipeline>` or the router's own.
        target: how to call it.
        rate_rps: mean arrival rate. With a trace: arrivals are rescaled to it, their shape kept.
        cv: coefficient of variation of gamma inter-arrivals, 0 constant, 1 Poisson (default).
        duration_s: length of the schedule; default 60, or the whole trace.
        seed: decides arrivals, lengths, prompts and the requests' own seeds.
        trace: Azure LLM 2023 CSV to replay.
        speed: replay the trace this many times as fast (default 1, without a rate).
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
        max_rate_rps: refuse schedules with a higher mean rate.
        timeout_s: a request fails after this long.
        credentials: for the gateway's list of functions.
        out: folder for report.json, requests.csv and plots; None writes nothing.
    """

    url: str
    target: TargetKind = "openai"
    rate_rps: float | None = None
    cv: float | None = None
    duration_s: float | None = None
    seed: int = 0
    trace: Path | None = None
    speed: float | None = None
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
    credentials: Credentials | None = None
    out: Path | None = Path("out")


def check(options: LoadOptions) -> None:
    """Refuses options that contradict each other or are out of bounds.

    Raises:
        OptionError: naming the flags.
    """
    if not is_http_url(options.url):
        raise OptionError(f"URL must be http(s)://host..., got {options.url!r}")
    _check_bounds(options)
    if options.trace is None:
        _check_synthetic(options)
    else:
        _check_trace(options)
    if (options.target == "bodies") != (options.bodies is not None):
        raise OptionError("--bodies FILE and --target bodies belong together")
    if options.target != "openai":
        for flag, value in (("--slo-ttft", options.slo_ttft_s), ("--slo-tpot", options.slo_tpot_s)):
            if value is not None:
                raise OptionError(
                    f"{flag} needs a streamed answer; target {options.target!r} has none, use --slo-latency"
                )


def _check_synthetic(options: LoadOptions) -> None:
    if options.speed is not None:
        raise OptionError("--speed replays a trace faster; it needs --trace (use --rate without one)")
    if options.rate_rps is None:
        raise OptionError("--rate is needed (or --trace FILE, which has a rate of its own)")
    count = options.rate_rps * (options.duration_s or DEFAULT_DURATION_S)
    if count > MAX_REQUESTS:
        raise OptionError(f"--rate times --duration is {count:.0f} requests, at most {MAX_REQUESTS}")


def _check_trace(options: LoadOptions) -> None:
    if options.cv is not None:
        raise OptionError("--cv and --trace contradict each other: a trace has a CV of its own")
    if options.speed is not None and options.rate_rps is not None:
        raise OptionError("--speed and --rate contradict each other: both set how fast the trace is replayed")


def _check_bounds(options: LoadOptions) -> None:
    positive: tuple[tuple[str, float | None], ...] = (
        ("--rate", options.rate_rps),
        ("--duration", options.duration_s),
        ("--speed", options.speed),
        ("--scale-lengths", options.scale_lengths),
        ("--slo-ttft", options.slo_ttft_s),
        ("--slo-tpot", options.slo_tpot_s),
        ("--slo-latency", options.slo_latency_s),
        ("--max-rate", options.max_rate_rps),
        ("--timeout", options.timeout_s),
    )
    for flag, value in positive:
        if value is not None and not (math.isfinite(value) and value > 0):
            raise OptionError(f"{flag} must be finite and above 0, got {value}")
    for flag, value in (("--cv", options.cv), ("--temperature", options.temperature)):
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise OptionError(f"{flag} must be finite and at least 0, got {value}")
    if options.context_tokens < 2:
        raise OptionError(f"--context must be at least 2 tokens, got {options.context_tokens}")
    if not options.mask or any(character.isspace() for character in options.mask):
        raise OptionError(f"--mask must be one word, got {options.mask!r}")
    if options.body_bytes < 1:
        raise OptionError(f"--body-bytes must be at least 1, got {options.body_bytes}")
    if not 0 <= options.seed < 2**64:
        raise OptionError(f"--seed must be in 0..2^64-1, got {options.seed}")
    if options.rate_rps is not None and options.rate_rps > options.max_rate_rps:
        raise OptionError(
            f"--rate {options.rate_rps:g} is above --max-rate {options.max_rate_rps:g}, "
            "what one generator process is trusted to keep"
        )
