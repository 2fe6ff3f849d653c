"""From a deployment to a program: which command, which environment, how it listens.

Pure: `local.ledger` asks it how a function wants to be kept, `local.process` starts what it
describes. It must not read the environment or touch a descriptor.
"""

from __future__ import annotations

import dataclasses
import math
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import msgspec

from keystage.local import checks, labels
from keystage.local.api import Deployment, role_of
from keystage.local.checks import HEALTH_ANNOTATION, READY_ANNOTATION
from keystage.local.durations import go_duration
from keystage.local.errors import BadDeployment
from keystage.local.secret_store import MOUNT_VARIABLE
from keystage.wire.threads import SPIN

MAX_CORES = 1024
MIN_LABEL = labels.MIN
NAMESPACE = "openfaas-fn"
"""The one namespace there is, as functions are told it."""
TIMEOUT_S = 600.0
"""Longest that a function may take, where nothing else is said."""
_MODULES = {"stage": "keystage.worker.app", "router": "keystage.router.app"}
_PORT = re.compile(r"\$(?:\{PORT\}|PORT(?![A-Za-z0-9_]))")
_TIMEOUT_VARIABLES = ("read_timeout", "write_timeout", "exec_timeout")
"""How OpenFaaS tells a function its time limits, as Go durations."""
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclasses.dataclass(frozen=True, slots=True)
class Upkeep:
    """How a function's replicas are kept.

    Attributes:
        initial: replicas until the controller decides.
        exclusive: one replica at a time, an update stops the old one first. So for routers: their
            socket has one name per pipeline, and clients wait at the gateway meanwhile.
        drain_s: seconds to finish after being told to stop, None for the default.
    """

    initial: int
    exclusive: bool
    drain_s: float | None


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """A command ready to be started.

    Attributes:
        argv: command line.
        env: its environment, without the descriptors that `local.process` adds.
        takes_socket: it serves on an inherited listening socket (`KEYSTAGE_HTTP=fd://N`);
            otherwise on the port named by `PORT`.
        answers_ready: it must answer 200 on `/_/ready`; foreign programs may not know that path, an
            open port is enough there.
        ready_path: where its deployer says that it tells its readiness, empty: nowhere in particular.
        health_path: likewise its health.
        secrets: folder of its secrets, empty: it has none.
        serves_http: it has an HTTP server at all.
        module: our own module it runs, empty for a foreign program; a KeysManager can fork what has one.
        tells_start: it answers `GET /_/start`.
        socket_variable: environment variable that names the inherited socket.
        is_session: it leads a session of its own, so that what it leaves behind can be told by it.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    takes_socket: bool = True
    answers_ready: bool = True
    ready_path: str = ""
    health_path: str = ""
    secrets: str = ""
    serves_http: bool = True
    module: str = ""
    tells_start: bool = False
    socket_variable: str = "KEYSTAGE_HTTP"
    is_session: bool = False


def check(deployment: Deployment) -> None:
    """Refuses what can never run here.

    Raises:
        BadDeployment: names the field, the bound and the actual value.
    """
    try:
        checks.check(deployment)
    except ValueError as error:
        raise BadDeployment(str(error)) from None
    if role_of(deployment) == "function":
        _command(deployment)


def check_name(name: str) -> None:
    """Refuses what is no function name.

    Raises:
        BadDeployment: names the rule and the name.
    """
    try:
        checks.check_name(name)
    except ValueError as error:
        raise BadDeployment(str(error)) from None


def check_replicas(name: str, replicas: int) -> None:
    """Refuses impossible replica numbers.

    Raises:
        BadDeployment: names the bounds and the number.
    """
    try:
        checks.check_replicas(name, replicas)
    except ValueError as error:
        raise BadDeployment(str(error)) from None


def check_cores(deployment: Deployment, cores: float) -> None:
    """Refuses impossible core numbers, and cores for what is no stage.

    Raises:
        BadDeployment: names the bounds and the number.
    """
    name = deployment.service
    if role_of(deployment) != "stage":
        raise BadDeployment(f"function {name} has role {role_of(deployment)}: cores are given to stages only")
    if not 0 < cores <= MAX_CORES:
        raise BadDeployment(f"function {name}: cores must be above 0 and at most {MAX_CORES}, not {cores:g}")


def threads_of(cores: float) -> int:
    """Compute threads of a replica with so many cores: a part of one counts as one."""
    return max(1, math.ceil(cores))


def with_threads(deployment: Deployment, threads: int) -> Deployment:
    """The deployment with another number of compute threads."""
    return msgspec.structs.replace(
        deployment, envVars={**deployment.envVars, "KEYSTAGE_THREADS": str(threads)}
    )


def upkeep(deployment: Deployment) -> Upkeep:
    """Reads from labels and environment how the function is kept.

    Raises:
        BadDeployment: a number is none, or out of bounds.
    """
    try:
        scale = checks.scale_of(deployment)
        drain_s = checks.drain_s_of(deployment)
    except ValueError as error:
        raise BadDeployment(str(error)) from None
    return Upkeep(scale.min, role_of(deployment) == "router", drain_s)


def program(
    deployment: Deployment,
    *,
    replica: str,
    run: Path,
    inherited: Mapping[str, str],
    router: str = "",
    secrets: Path | None = None,
    internal_token: Path | None = None,
    timeout_s: float = TIMEOUT_S,
    routers: Mapping[str, str] = MappingProxyType({}),
) -> Program:
    """Command and environment of one replica.

    A function's `envProcess` may name its port as `$PORT`.

    Args:
        deployment: a checked deployment.
        replica: the replica's name.
        run: run folder.
        inherited: variables every process gets (PATH, HOME, ...).
        router: inbox address of the pipeline's router, empty: a socket in the run folder.
        secrets: folder with the replica's secrets, None: it has none.
        internal_token: file of the token of who may change a stage's threads, None: nobody may.
        timeout_s: longest that it may take, told to it where the deployment does not say.
        routers: variables that every router gets, where the deployment does not say otherwise.
    """
    env = {
        **inherited,
        **dict.fromkeys(_TIMEOUT_VARIABLES, go_duration(timeout_s)),
        "OPENFAAS_NAME": deployment.service,
        "OPENFAAS_NAMESPACE": NAMESPACE,
        **deployment.envVars,
        "KEYSTAGE_REPLICA": replica,
        "KEYSTAGE_RUN": str(run),
    }
    if secrets is not None:
        env[MOUNT_VARIABLE] = str(secrets)
    threads = deployment.envVars.get("KEYSTAGE_THREADS")
    if threads:
        env = SPIN | env | dict.fromkeys(_THREAD_VARIABLES, threads)
    kind = role_of(deployment)
    if kind == "function":
        return Program(
            tuple(_command(deployment)),
            env,
            takes_socket=False,
            answers_ready=False,
            ready_path=deployment.annotations.get(READY_ANNOTATION, ""),
            health_path=deployment.annotations.get(HEALTH_ANNOTATION, ""),
            secrets="" if secrets is None else str(secrets),
        )
    if kind == "router":
        env = {**routers, **env}
        env.setdefault("KEYSTAGE_DEADLINE_S", f"{timeout_s:.10g}")
    elif internal_token is not None:
        env["KEYSTAGE_INTERNAL_TOKEN_FILE"] = str(internal_token)
    pipeline = deployment.envVars["KEYSTAGE_PIPELINE"]
    env.setdefault("KEYSTAGE_ROUTER", router or f"ipc://{router_socket(run, pipeline)}")
    return Program(
        (sys.executable, "-m", _MODULES[kind]), env, module=_MODULES[kind], tells_start=kind == "stage"
    )


def router_socket(run: Path, pipeline: str) -> Path:
    """Path of the UNIX socket that is a router's inbox."""
    return run / f"{pipeline}.router"


def with_port(argv: tuple[str, ...], port: int) -> tuple[str, ...]:
    """Puts the port in place of `$PORT` or `${PORT}` in a command line; everything else stays as it is."""
    return tuple(_PORT.sub(str(port), word) for word in argv)


def _command(deployment: Deployment) -> list[str]:
    try:
        argv = shlex.split(deployment.envProcess)
    except ValueError as error:
        raise BadDeployment(f"function {deployment.service}: envProcess cannot be parsed: {error}") from error
    if not argv:
        raise BadDeployment(
            f"function {deployment.service}: envProcess is empty; the local backend runs no images, give the "
            "command of a web server that listens on $PORT (faas-cli: fprocess)"
        )
    return argv
