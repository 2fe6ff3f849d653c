"""`keystage load`: the load generator as a command. Reads flags; `keystage.loadgen` does the rest."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from keystage.cli.errors import fail

if TYPE_CHECKING:
    from keystage.loadgen.target import TargetKind

TARGET_HELP = "openai, embeddings, masks, transcriptions, images, function, bodies or raw"
BODIES_HELP = "file with a JSON body a line, for target bodies"
MASK_HELP = "text that stands for a word to be found, for target masks"
BYTES_HELP = "a token is a byte: the pipeline has no tokenizer"
ARRIVALS_HELP = "process and profile, e.g. 'gamma:cv=4@burst:base=5,height=50,length=2,every=30'"
MAP_HELP = "FUNCTION=PIPELINE, FILE of function,pipeline lines, hash:P,Q or strict; may be repeated"
AGENT_HELP = "http://HOST:PORT of a `keystage load-agent` that sends instead of this machine; may be repeated"
CLOSED_HELP = "this many clients, each waiting for its answer (hides queueing; the report says so)"

Names = Annotated[str, typer.Option(help="only these of the trace, separated by commas")]


def load(
    url: Annotated[str, typer.Argument(help="http://GATEWAY/function/PIPELINE, or a router's address")],
    target: Annotated[str, typer.Option(help=TARGET_HELP)] = "openai",
    rate: Annotated[float | None, typer.Option(help="arrivals per second")] = None,
    cv: Annotated[float | None, typer.Option(help="coefficient of variation of gamma arrivals")] = None,
    arrivals: Annotated[str | None, typer.Option(help=ARRIVALS_HELP)] = None,
    duration: Annotated[float | None, typer.Option(help="seconds")] = None,
    seed: Annotated[int, typer.Option(help="seed of everything drawn")] = 0,
    trace: Annotated[Path | None, typer.Option(help="trace to replay (docs/loadgen.md: kinds)")] = None,
    trace_kind: Annotated[str | None, typer.Option(help="of the trace; found out if not given")] = None,
    functions: Names = "",
    apps: Names = "",
    triggers: Names = "",
    top: Annotated[int | None, typer.Option(help="only the functions with the most invocations")] = None,
    from_s: Annotated[float | None, typer.Option("--from", help="begin of the trace's window (s)")] = None,
    to_s: Annotated[float | None, typer.Option("--to", help="end of the trace's window (s)")] = None,
    within: Annotated[
        str | None, typer.Option(help="arrivals within a minute: poisson, uniform or gamma:CV")
    ] = None,
    mapping: Annotated[list[str] | None, typer.Option("--map", help=MAP_HELP)] = None,
    speed: Annotated[float | None, typer.Option(help="replay the trace this many times as fast")] = None,
    closed_loop: Annotated[int | None, typer.Option(help=CLOSED_HELP)] = None,
    think_s: Annotated[
        float | None, typer.Option("--think-s", help="closed loop: wait between answer and request (s)")
    ] = None,
    search_rate: Annotated[
        bool, typer.Option("--search-rate", help="look for the highest rate that meets the SLO")
    ] = False,
    search_attainment: Annotated[
        float | None, typer.Option(help="search: share of requests that must meet it (default 0.99)")
    ] = None,
    search_repeats: Annotated[
        int | None, typer.Option(help="search: windows at a rate, odd; the majority decides (default 3)")
    ] = None,
    search_precision: Annotated[
        float | None, typer.Option(help="search: how near good and bad rates must come (default 0.05)")
    ] = None,
    scale_lengths: Annotated[float, typer.Option(help="divide the trace's token lengths by this")] = 16.0,
    context: Annotated[int, typer.Option(help="token positions the model admits")] = 2048,
    body_bytes: Annotated[int, typer.Option(help="body size for target raw")] = 4096,
    byte_tokens: Annotated[bool, typer.Option("--byte-tokens", help=BYTES_HELP)] = False,
    mask: Annotated[str, typer.Option(help=MASK_HELP)] = "[MASK]",
    bodies: Annotated[Path | None, typer.Option(help=BODIES_HELP)] = None,
    temperature: Annotated[float, typer.Option(help="sampling temperature")] = 0.0,
    slo_ttft: Annotated[float | None, typer.Option(help="bound on TTFT (s)")] = None,
    slo_tpot: Annotated[float | None, typer.Option(help="bound on TPOT (s)")] = None,
    slo_latency: Annotated[float | None, typer.Option(help="bound on the whole answer (s)")] = None,
    max_rate: Annotated[
        float | None, typer.Option(help="refuse faster schedules [default: 10,000/s for each core]")
    ] = None,
    timeout: Annotated[float, typer.Option(help="a request fails after this long (s)")] = 300.0,
    processes: Annotated[str, typer.Option(help="sending processes: a number, or auto")] = "auto",
    http: Annotated[str, typer.Option(help="version of HTTP: 1.1 or 2")] = "1.1",
    retries: Annotated[int, typer.Option(help="of a failed request; each is in the report")] = 0,
    agent: Annotated[list[str] | None, typer.Option(help=AGENT_HELP)] = None,
    agent_secret_file: Annotated[Path | None, typer.Option(help="file with the agents' secret")] = None,
    out: Annotated[Path, typer.Option(help="folder of the report")] = Path("out"),
    as_json: Annotated[
        bool, typer.Option("--json", help="the report as JSON on standard output, the rest on standard error")
    ] = False,
) -> None:
    """Replay open-loop traffic against a pipeline and report."""
    from keystage.loadgen.app import load as run_load
    from keystage.loadgen.options import DEFAULT_MAX_RATE_RPS, LoadOptions

    options = LoadOptions(
        url=url,
        target=target_kind(target),
        rate_rps=rate,
        cv=cv,
        arrivals=arrivals,
        duration_s=duration,
        seed=seed,
        trace=trace,
        trace_kind=trace_kind,
        functions=names(functions),
        apps=names(apps),
        triggers=names(triggers),
        top=top,
        from_s=from_s,
        to_s=to_s,
        within=within,
        mapping=tuple(mapping or ()),
        speed=speed,
        closed_loop=closed_loop,
        think_s=think_s,
        search_rate=search_rate,
        search_attainment=search_attainment,
        search_repeats=search_repeats,
        search_precision=search_precision,
        scale_lengths=scale_lengths,
        context_tokens=context,
        body_bytes=body_bytes,
        byte_tokens=byte_tokens,
        mask=mask,
        bodies=bodies,
        temperature=temperature,
        slo_ttft_s=slo_ttft,
        slo_tpot_s=slo_tpot,
        slo_latency_s=slo_latency,
        max_rate_rps=DEFAULT_MAX_RATE_RPS if max_rate is None else max_rate,
        timeout_s=timeout,
        processes=_processes(processes),
        http=_http(http),
        retries=retries,
        agents=tuple(agent or ()),
        agent_secret=agent_secret_file,
        out=out,
    )
    raise typer.Exit(run_load(options, as_json=as_json))


def target_kind(name: str) -> TargetKind:
    """The kind of requests of that name; ends the command for any other."""
    from keystage.loadgen.target import KINDS

    found = next((kind for kind in KINDS if kind == name), None)
    if found is None:
        fail(f"--target must be one of {', '.join(KINDS)}, got {name!r}", 2)
    return found


def names(text: str) -> tuple[str, ...]:
    """What stands between commas."""
    return tuple(name for part in text.split(",") if (name := part.strip()))


def _processes(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    try:
        return int(text)
    except ValueError:
        fail(f"--processes must be a number or auto, got {text!r}", 2)


def _http(text: str) -> Literal["1.1", "2"]:
    if text == "2":
        return "2"
    if text != "1.1":
        fail(f"--http must be 1.1 or 2, got {text!r}", 2)
    return "1.1"
