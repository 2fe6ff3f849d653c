"""`keystage run`, `up` and `demo`: the local world, and traffic for it."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from keystage.cli.errors import fail
from keystage.cli.load import BODIES_HELP, BYTES_HELP, MASK_HELP, TARGET_HELP, target_kind
from keystage.cli.pipelines import MODEL_HELP, bundle_folder
from keystage.cli.program import (
    ProgramOptions,
    handler_env,
    make_program,
    program_name,
    write_samples,
)
from keystage.local.api import Deployment, StartRecord
from keystage.local.traffic import traffic_of

if TYPE_CHECKING:
    from keystage.loadgen.starts import ReplicaStart

DEFAULT_MODEL = "smollm2"
HANDLER_HELP = "folder of your own code, for stream programs that are not built in"

Home = Annotated[Path | None, typer.Option(help="state folder (default .keystage, or KEYSTAGE_HOME)")]
BATCHING_HELP = "single-pass: eager, timeout:MS, deferred or partial-slo (docs/batching.md)"
LATE_HELP = "single-pass: demote or refuse requests that cannot meet their deadline"
Batching = Annotated[str, typer.Option(help=BATCHING_HELP)]
Late = Annotated[str, typer.Option(help=LATE_HELP)]
Handler = Annotated[Path | None, typer.Option(help=HANDLER_HELP)]
_GPU_NODES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
Port = Annotated[int | None, typer.Option(help="gateway port (default 8080; 0 picks a free one)")]


def run(
    model: Annotated[str, typer.Argument(help=f"{MODEL_HELP} (default: smollm2)")] = "",
    model_option: Annotated[str, typer.Option("--model", help="the same as the argument")] = "",
    stages: Annotated[int, typer.Option(help="number of stages")] = 4,
    once: Annotated[bool, typer.Option("--once", help="end after the report")] = False,
    trace: Annotated[Path | None, typer.Option(help="trace to replay (docs/loadgen.md: kinds)")] = None,
    duration: Annotated[float, typer.Option(help="seconds of replay")] = 60.0,
    seed: Annotated[int, typer.Option(help="seed of everything drawn")] = 1,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:N or emulated:alpha=..,beta=..")] = "cpu",
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16")] = "fp32",
    out: Annotated[Path, typer.Option(help="folder of the report")] = Path("out"),
    batching: Batching = "eager",
    late: Late = "demote",
    option: ProgramOptions = None,
    handler: Handler = None,
    home: Home = None,
    port: Port = None,
) -> None:
    """The main job: split a model, serve it, replay bursty traffic, report, keep serving."""
    from keystage.bundle.errors import BundleError, SplitError
    from keystage.bundle.program import PREFIX
    from keystage.bundle.source import pipeline_name
    from keystage.bundle.split import split
    from keystage.bundle.store import load as load_pipeline
    from keystage.local.up import UpOptions
    from keystage.local.up import run as run_up

    if model and model_option and model != model_option:
        fail(f"two models are given, {model!r} and --model {model_option!r}: give one", 2)
    chosen = model or model_option or DEFAULT_MODEL
    is_program = chosen.startswith(PREFIX)
    name = program_name(chosen) if is_program else pipeline_name(chosen)
    method = "time" if device == "cpu" else "parameters"
    if trace is not None:
        _check_trace(trace)
    _check_device(device)
    _check_controller(home)
    env = {**_batch_env(batching, late), **handler_env(handler)}
    try:
        if is_program:
            folder = make_program(chosen, bundle_folder(name, home), name, option, handler)
        else:
            folder = split(chosen, stages, method, bundle_folder(name, home), name, dtype)
        traffic = traffic_of(load_pipeline(folder), device)
        if is_program:
            traffic = dataclasses.replace(traffic, bodies=write_samples(folder, handler, seed))
    except (SplitError, BundleError) as error:
        fail(error, error.exit_code)
    job = [sys.executable, "-m", "keystage.cli.main", "demo", "{gateway}", name, *traffic.options()]
    job += ["--duration", str(duration), "--seed", str(seed), "--out", str(out)]
    if trace is not None:
        job += ["--trace", str(trace)]
    options = UpOptions(
        home=home,
        gateway_port=port,
        deployments=tuple(_deployments(folder, device, env)),
        job=tuple(job),
        once=once,
    )
    raise typer.Exit(run_up(options))


def up(
    bundles: Annotated[list[str] | None, typer.Argument(help="bundle folders to deploy")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:N or emulated:alpha=..,beta=..")] = "cpu",
    home: Home = None,
    port: Port = None,
    controller: Annotated[bool, typer.Option(help="run the controller")] = True,
    nodes: Annotated[int, typer.Option(help="nodes this machine plays, each with a KeysManager")] = 1,
    batching: Batching = "eager",
    late: Late = "demote",
    handler: Handler = None,
) -> None:
    """Gateway, controller and pipelines on this machine, until Ctrl-C."""
    from keystage.local.up import UpOptions
    from keystage.local.up import run as run_up

    _check_device(device)
    if controller:
        _check_controller(home)
    env = {**_batch_env(batching, late), **handler_env(handler)}
    deployments = [d for bundle in bundles or [] for d in _deployments(Path(bundle), device, env)]
    options = UpOptions(
        home=home, gateway_port=port, controller=controller, nodes=nodes, deployments=tuple(deployments)
    )
    raise typer.Exit(run_up(options))


def demo(
    gateway: Annotated[str, typer.Argument(help="gateway address")],
    pipeline: Annotated[str, typer.Argument(help="pipeline name")],
    trace: Annotated[Path | None, typer.Option(help="trace to replay (docs/loadgen.md: kinds)")] = None,
    duration: Annotated[float, typer.Option(help="seconds of replay")] = 60.0,
    seed: Annotated[int, typer.Option(help="seed of everything drawn")] = 1,
    target: Annotated[str, typer.Option(help=TARGET_HELP)] = "openai",
    context: Annotated[int, typer.Option(help="token positions the model admits")] = 2048,
    byte_tokens: Annotated[bool, typer.Option("--byte-tokens", help=BYTES_HELP)] = False,
    mask: Annotated[str, typer.Option(help=MASK_HELP)] = "[MASK]",
    bodies: Annotated[Path | None, typer.Option(help=BODIES_HELP)] = None,
    out: Annotated[Path, typer.Option(help="folder of the report")] = Path("out"),
    home: Home = None,
) -> None:
    """Measure capacity, replay bursty traffic at 60 % of it, and report."""
    from keystage.loadgen.app import demo as run_demo
    from keystage.loadgen.capacity import TargetError
    from keystage.loadgen.monitor import Credentials
    from keystage.loadgen.options import OptionError
    from keystage.loadgen.trace import TraceError
    from keystage.local.config import LocalSettings
    from keystage.local.errors import LocalError
    from keystage.local.home import read_credentials
    from keystage.wire.endpoints import EndpointError, watch_lifeline

    settings = LocalSettings()
    try:
        watch_lifeline(settings.lifeline_fd)
    except EndpointError as error:
        typer.echo(f"keystage: {error}", err=True)
        raise typer.Exit(2) from None
    folder = home or settings.home
    try:
        user, password = read_credentials(folder / "credentials")
        credentials: Credentials | None = Credentials(user, password)
    except (LocalError, OSError):
        credentials = None  # the report then lacks replica counts, and says so
    try:
        report = run_demo(
            gateway,
            pipeline,
            trace,
            duration,
            seed,
            target=target_kind(target),
            context_tokens=context,
            byte_tokens=byte_tokens,
            mask=mask,
            bodies=bodies,
            credentials=credentials,
            out=out,
            notes=tuple(_cpu_notes()),
            starts=lambda since_s: _starts(folder, pipeline, since_s),
        )
    except (OptionError, TraceError) as error:
        fail(error, 2)
    except TargetError as error:
        fail(error, 1)
    raise typer.Exit(1 if report.requests.failed or not report.requests.served else 0)


def _check_device(device: str) -> None:
    """A GPU where there is none is refused before anything is started, not in every worker's log."""
    if device.startswith("cuda") and not any(Path(node).exists() for node in _GPU_NODES):
        fail(f"--device {device}: this machine shows no GPU (none of {', '.join(_GPU_NODES)})", 2)


def _check_controller(home: Path | None) -> None:
    """A setting that only the controller reads is refused here: it would end again and again."""
    from pydantic import ValidationError

    from keystage.controller.config import ControllerSettings
    from keystage.local.config import LocalSettings

    try:
        ControllerSettings(
            control=(home or LocalSettings().home) / "control.sock", backend="local", gateway=""
        )
    except ValidationError as error:
        for fault in error.errors():
            name = "".join(f"KEYSTAGE_{part}: ".upper() for part in fault["loc"][:1])
            typer.echo(f"keystage: {name}{fault['msg']}", err=True)
        raise typer.Exit(2) from None


def _check_trace(trace: Path) -> None:
    """A trace that cannot be read is found before anything is started."""
    from keystage.loadgen.traces import TraceError, open_trace

    try:
        for _ in open_trace(trace).blocks():
            pass
    except TraceError as error:
        fail(error, 2)


def _batch_env(batching: str, late: str) -> dict[str, str]:
    """The variables of these settings; the defaults need none."""
    from keystage.batching.choice import parse_batching, parse_late

    try:
        parse_batching(batching)
    except ValueError as error:
        fail(f"--batching: {error}", 2)
    try:
        parse_late(late)
    except ValueError as error:
        fail(f"--late: {error}", 2)
    env = {"KEYSTAGE_BATCHING": batching} if batching != "eager" else {}
    return {**env, "KEYSTAGE_LATE": late} if late != "demote" else env


def _deployments(folder: Path, device: str, env: dict[str, str]) -> list[Deployment]:
    from keystage.bundle.errors import BundleError
    from keystage.bundle.store import bundle_path, load
    from keystage.local.pipeline import deployments_for

    try:
        pipeline = load(folder)
    except BundleError as error:
        fail(error, error.exit_code)
    return deployments_for(bundle_path(folder), pipeline, device=device, env=env)


def _cpu_notes() -> list[str]:
    import os

    cores = len(os.sched_getaffinity(0))
    cap = (
        f"replicas on a real CPU are capped by its {cores} cores: beyond them another replica adds "
        "nothing; `--device emulated:alpha=..,beta=..` shows what scaling is worth"
    )
    return [cap]


def _starts(home: Path, pipeline: str, since_s: float) -> list[ReplicaStart]:
    """Starts of a pipeline's stages that were decided since then, as the supervisor noted them."""
    from keystage.loadgen.starts import ReplicaStart
    from keystage.local.client import starts
    from keystage.local.errors import LocalError

    def after(record: StartRecord, at_s: float) -> float | None:
        return at_s - record.wanted_at_s if at_s else None

    try:
        records = starts(home)
    except LocalError:
        return []  # the report then lacks them
    return [
        ReplicaStart(
            replica=r.replica,
            function=r.function,
            via=r.via,
            source=r.source,
            note=r.note,
            decided_s=r.wanted_at_s - since_s,
            forked_s=after(r, r.forked_at_s),
            mapped_s=after(r, r.mapped_at_s),
            forward_s=after(r, r.forward_at_s),
            ready_s=after(r, r.ready_at_s),
            first_item_s=after(r, r.first_item_at_s),
        )
        for r in records
        if r.wanted_at_s >= since_s and r.function.startswith(f"{pipeline}-stage-")
    ]
