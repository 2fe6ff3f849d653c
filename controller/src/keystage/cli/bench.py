"""`keystage bench NAME`: finds the benchmark, runs it, lets the frame report it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from keystage.cli.errors import fail, make_folder

_NAMES = {
    "peer": "parameters from another node's KeysManager, beside a plain socket copy",
    "hop": "hand-off of an activation between two workers, beside a raw UNIX socket",
    "wire": "an activation to another node: ring, CURVE frame, tensor connection, raw TCP socket",
    "engine": "the stage engine beside transformers: tokens/s, latency; --cpu where there is a GPU, too",
    "router": "router and eight zero-time stages, beside a trivial FastAPI application",
    "tracing": "CPU of the router per request, with metrics and with traces, on and off",
    "sender": "the load generator's sender: schedule accuracy and CPU, beside wrk, hey and locust",
    "gateway": "the gateway as a proxy at 4 KiB, beside nginx as one and a naive FastAPI proxy",
    "streams": "2,000 streaming answers at once through the gateway, beside direct ones; slow clients",
    "burst": "the controller under bursts, beside the best static allocation",
    "load": "from a replica wanted to its first forward pass: fresh, forked, standby, from another GPU",
    "tick": "one tick of the policy for 1,000 pipelines of eight stages on 10,000 nodes",
    "scheduler": "events a second of the batch scheduler alone, over models and replicas",
    "simulator": "events a second of the discrete-event simulator",
    "batching": "Symphony's Table 2 and Figure 7 remade on emulated GPUs, with every rival",
    "deferred": "deferred batching live, beside eager and time-out: emulated devices and a real BERT",
    "paper": "QUART's figures 2, 3, 6, 7, 8 remade, with INFless, InferLine and Cocktail",
    "tuning": "the search that tunes Keystage and its rivals alike for bench paper",
    "behaviour": "step response, burst response and CV propagation, as docs/control.md plots them",
    "diffusion": "a diffusion program live, step by step beside request by request; --device cuda",
    "partition": "models divided over sub-clusters by MILP (Symphony, appendix A), beside random search",
    "flat-top": "load from 0 to twice the capacity, network delay (Symphony, figures 2 and 14), with rivals",
    "symphony": "Symphony 5.1-5.3 and 5.7 remade: goodput, fewest GPUs, SLOs and popularity, changing load",
    "neustream": "stream programs on emulated devices, beside Clockwork-like and prefill-first serving",
    "sim-vs-local": "the local world with emulated devices beside the simulator, same arrivals",
    "e2e": "controller on, off and every rival on the real local platform, beside the simulator",
    "mixed": "several pipelines on one pool under the Azure Functions trace, simulated and live",
    "cycles": "ten thousand starts and ends of replicas (--full; 1,000 without): leaks in any part",
    "overload": "goodput from 0 to 10 times the capacity through the platform; memory of router and gateway",
    "soak": "an hour of the trace at 10x through the real platform, 8 hours at 100x simulated: drift, leaks",
}


def bench(
    name: Annotated[str, typer.Argument(help="; ".join(f"{key}: {text}" for key, text in _NAMES.items()))],
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on standard output")] = False,
    out: Annotated[Path, typer.Option(help="folder for bench-NAME.json")] = Path("out"),
    quick: Annotated[bool, typer.Option("--quick", help="fewer rounds: a look, not a result")] = False,
    full: Annotated[bool, typer.Option("--full", help="all of it, where the default is short")] = False,
    mb: Annotated[int | None, typer.Option(min=16, help="bench peer: size of the parameters in MiB")] = None,
    gb: Annotated[
        float | None, typer.Option(min=0.01, help="bench load: GiB of a stage's parameters")
    ] = None,
    device: Annotated[str | None, typer.Option(help="bench load, cycles: cpu, cuda, cuda:N")] = None,
    cpu: Annotated[bool | None, typer.Option("--cpu", help="bench engine: on the CPU in any case")] = None,
    parts: Annotated[str | None, typer.Option(help="bench engine, GPUs: which parts, by commas")] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            min=1,
            help="bench engine, GPUs: nothing begins after so many; cycles: so, too; soak: wall time, live",
        ),
    ] = None,
    speed: Annotated[
        float | None, typer.Option(min=0.1, max=1000, help="bench soak: of the trace, live; 10 by default")
    ] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="bench engine, load: at most so many GPUs")] = None,
    dry: Annotated[
        bool | None, typer.Option("--dry", help="bench engine: the GPUs' run, tiny and on the CPU")
    ] = None,
) -> None:
    """Run a benchmark; medians with spread, exit 3 when it was too noisy to be a result."""
    import importlib
    import inspect

    if name not in _NAMES:
        fail(f"no benchmark {name!r}; there are {', '.join(_NAMES)}", 2)
    from keystage.bench.frame import BenchError, report

    run = importlib.import_module(f"keystage.bench.{name.replace('-', '_')}").run
    known = inspect.signature(run).parameters
    if full and "full" not in known:
        fail(f"bench {name} has no --full: it always runs whole unless --quick is given", 2)
    options: dict[str, object] = {"quick": quick}
    options |= {option: value for option, value in (("full", full), ("out", out)) if option in known}
    for option, given in (
        ("mb", mb), ("gb", gb), ("device", device), ("cpu", cpu), ("parts", parts),
        ("seconds", seconds), ("speed", speed), ("dry", dry), ("gpus", gpus),
    ):  # fmt: skip
        if given is not None and option not in known:
            fail(f"bench {name} has no --{option}", 2)
        if given is not None:
            options[option] = given
    make_folder(out)
    try:
        code = report(name, run(**options), as_json=as_json, out=out)
    except BenchError as error:
        fail(error, 2)
    except OSError as error:
        if error.filename is None:
            raise  # not about a file: a bug
        fail(f"{error.filename}: {error.strerror}", 1)
    raise typer.Exit(code)
