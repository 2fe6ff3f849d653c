"""Which options are out of bounds, and which contradict each other.

Comes after `options` and before `plan`. Reads no file. Every error names the flag, the bound and the
value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from keystage.loadgen.arrivals import MAX_CV, ArrivalError
from keystage.loadgen.arrivals_spec import resolved
from keystage.loadgen.options import DEFAULT_DURATION_S, MAX_REQUESTS, LoadOptions, OptionError
from keystage.loadgen.target import gateway_of, is_http_url
from keystage.loadgen.traces import KINDS
from keystage.loadgen.traces.within import parse_within

MAX_CLIENTS = 100_000
"""Of a closed loop: each keeps a connection."""

MAX_PROCESSES = 256
MAX_RETRIES = 10
MAX_REPEATS = 9

_Flags = Sequence[tuple[str, object]]


def check(options: LoadOptions) -> None:
    """Refuses options that contradict each other or are out of bounds.

    Raises:
        OptionError: naming the flags.
    """
    if not is_http_url(options.url):
        raise OptionError(f"URL must be http(s)://host..., got {options.url!r}")
    _check_bounds(options)
    _check_sending(options)
    if options.closed_loop is not None:
        _check_closed_loop(options)
    elif options.trace is not None:
        _check_trace(options)
    else:
        _check_synthetic(options)
    if options.search_rate:
        _check_search(options)
    else:
        for flag, value in _search_flags(options):
            if value is not None:
                raise OptionError(f"{flag} is of a search; it needs --search-rate")
    if (options.target == "bodies") != (options.bodies is not None):
        raise OptionError("--bodies FILE and --target bodies belong together")
    if options.target != "openai":
        for flag, value in (("--slo-ttft", options.slo_ttft_s), ("--slo-tpot", options.slo_tpot_s)):
            if value is not None:
                raise OptionError(
                    f"{flag} needs a streamed answer; target {options.target!r} has none, use --slo-latency"
                )


def _check_synthetic(options: LoadOptions) -> None:
    for flag, value in _trace_flags(options):
        if value:
            raise OptionError(f"{flag} chooses from a trace; it needs --trace")
    if options.speed is not None:
        raise OptionError("--speed replays a trace faster; it needs --trace (use --rate without one)")
    if options.arrivals is not None:
        _check_arrivals(options, options.arrivals)
        return
    if options.search_rate:
        return
    if options.rate_rps is None:
        raise OptionError("--rate is needed (or --trace FILE, which has a rate of its own)")
    count = options.rate_rps * (options.duration_s or DEFAULT_DURATION_S)
    if count > MAX_REQUESTS:
        raise OptionError(f"--rate times --duration is {count:.0f} requests, at most {MAX_REQUESTS}")


def _check_arrivals(options: LoadOptions, text: str) -> None:
    if options.cv is not None:
        raise OptionError(
            f"--cv and --arrivals contradict each other: write --arrivals gamma:cv={options.cv:g}"
        )
    try:
        process = resolved(text, options.rate_rps, is_search=options.search_rate)
    except ArrivalError as error:
        raise OptionError(f"--arrivals {error}") from error
    if options.search_rate:
        return
    for piece in process.pieces:
        if piece.peak_rps is not None and piece.peak_rps > options.max_rate_rps:
            raise OptionError(
                f"--arrivals piece {piece.number} {piece.text!r} has a rate of {piece.peak_rps:g}/s, "
                f"above --max-rate {options.max_rate_rps:g}"
            )


def _check_trace(options: LoadOptions) -> None:
    if options.cv is not None:
        raise OptionError("--cv and --trace contradict each other: a trace has a CV of its own")
    if options.arrivals is not None:
        raise OptionError("--arrivals and --trace contradict each other: a trace has arrivals of its own")
    if options.speed is not None and options.rate_rps is not None:
        raise OptionError("--speed and --rate contradict each other: both set how fast the trace is replayed")
    if options.trace_kind is not None and options.trace_kind not in KINDS:
        raise OptionError(f"--trace-kind must be one of {', '.join(KINDS)}, got {options.trace_kind!r}")
    if options.top is not None and options.top < 1:
        raise OptionError(f"--top must be at least 1, got {options.top}")
    if options.within is not None:
        try:
            parse_within(options.within)
        except ValueError as error:
            raise OptionError(f"--within: {error}") from error
    begin_s = options.from_s or 0.0
    if not (math.isfinite(begin_s) and begin_s >= 0):
        raise OptionError(f"--from must be finite and at least 0, got {begin_s:g}")
    if options.to_s is not None and not (math.isfinite(options.to_s) and options.to_s > begin_s):
        raise OptionError(f"--to must be finite and above --from ({begin_s:g} s), got {options.to_s:g}")
    if options.mapping and (at := gateway_of(options.url)) is not None:
        raise OptionError(
            f"--map chooses the pipelines, so URL must be the gateway's alone ({at[0]}), got {options.url}"
        )


def _check_closed_loop(options: LoadOptions) -> None:
    assert options.closed_loop is not None
    contradicting: _Flags = (
        ("--rate", options.rate_rps),
        ("--cv", options.cv),
        ("--arrivals", options.arrivals),
        ("--trace", options.trace),
        ("--speed", options.speed),
        ("--search-rate", options.search_rate or None),
    )
    for flag, value in contradicting:
        if value is not None:
            raise OptionError(
                f"--closed-loop and {flag} contradict each other: "
                "in a closed loop the answers decide when requests are sent"
            )
    for flag, chosen in _trace_flags(options):
        if chosen:
            raise OptionError(f"{flag} chooses from a trace; it needs --trace")
    for flag, value, own in (
        ("--processes", options.processes, "auto"),
        ("--http", options.http, "1.1"),
        ("--retries", options.retries, 0),
        ("--agent", options.agents, ()),
    ):
        if value != own:
            raise OptionError(
                f"--closed-loop and {flag} {value} contradict each other: a closed loop sends from one "
                "process over HTTP/1.1 without retries"
            )
    if not 1 <= options.closed_loop <= MAX_CLIENTS:
        raise OptionError(f"--closed-loop must be 1 to {MAX_CLIENTS} clients, got {options.closed_loop}")


def _check_search(options: LoadOptions) -> None:
    if options.speed is not None:
        raise OptionError("--speed and --search-rate contradict each other: the search sets the rate")
    if not any((options.slo_ttft_s, options.slo_tpot_s, options.slo_latency_s)):
        raise OptionError(
            "--search-rate looks for the highest rate that meets an SLO; "
            "it needs --slo-ttft, --slo-tpot or --slo-latency"
        )
    share = options.search_attainment
    if share is not None and not 0 < share <= 1:
        raise OptionError(f"--search-attainment must be above 0 and at most 1, got {share:g}")
    repeats = options.search_repeats
    if repeats is not None and not (1 <= repeats <= MAX_REPEATS and repeats % 2):
        raise OptionError(
            f"--search-repeats must be odd, 1 to {MAX_REPEATS}, for the majority decides; got {repeats}"
        )
    precision = options.search_precision
    if precision is not None and not 0.001 <= precision <= 1:
        raise OptionError(f"--search-precision must be 0.001 to 1, got {precision:g}")


def _check_sending(options: LoadOptions) -> None:
    if options.think_s is not None and options.closed_loop is None:
        raise OptionError("--think-s is of a closed loop; it needs --closed-loop")
    if options.processes != "auto" and not 1 <= options.processes <= MAX_PROCESSES:
        raise OptionError(f"--processes must be auto or 1 to {MAX_PROCESSES}, got {options.processes}")
    if options.http not in ("1.1", "2"):
        raise OptionError(f"--http must be 1.1 or 2, got {options.http!r}")
    if bool(options.agents) != (options.agent_secret is not None):
        raise OptionError("--agent and --agent-secret-file belong together")
    for agent in options.agents:
        if not is_http_url(agent):
            raise OptionError(f"--agent must be http(s)://host:port, got {agent!r}")
    if len(set(options.agents)) < len(options.agents):
        raise OptionError(f"--agent names one twice: {', '.join(options.agents)}")
    if not 0 <= options.retries <= MAX_RETRIES:
        raise OptionError(f"--retries must be 0 to {MAX_RETRIES}, got {options.retries}")


def _trace_flags(options: LoadOptions) -> _Flags:
    return (
        ("--trace-kind", options.trace_kind is not None),
        ("--functions", options.functions),
        ("--apps", options.apps),
        ("--triggers", options.triggers),
        ("--top", options.top is not None),
        ("--from", options.from_s is not None),
        ("--to", options.to_s is not None),
        ("--within", options.within is not None),
        ("--map", options.mapping),
    )


def _search_flags(options: LoadOptions) -> _Flags:
    return (
        ("--search-attainment", options.search_attainment),
        ("--search-repeats", options.search_repeats),
        ("--search-precision", options.search_precision),
    )


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
    for flag, value in (
        ("--temperature", options.temperature),
        ("--think-s", options.think_s),
    ):
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise OptionError(f"{flag} must be finite and at least 0, got {value}")
    if options.cv is not None and not 0 <= options.cv <= MAX_CV:
        raise OptionError(f"--cv must be in 0..{MAX_CV:g}, got {options.cv:g}")
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
            "what the generator is trusted to keep on these cores"
        )
