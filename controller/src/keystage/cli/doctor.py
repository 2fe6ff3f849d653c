"""`keystage doctor`: looks at this machine, a gateway and a cluster, and says what is amiss."""

from __future__ import annotations

import dataclasses
import datetime as dt
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from keystage.cli.asking import own_password_file
from keystage.cli.doctor_chain import Link
from keystage.cli.doctor_report import Check, exit_code, findings, text
from keystage.cli.errors import fail
from keystage.cli.output import tell_json

if TYPE_CHECKING:
    from keystage.openfaas.client import Client

ANSWER_S = 10.0


def doctor(
    gateway: Annotated[
        str | None, typer.Option(help="address of a gateway to look at: Keystage's or any OpenFaaS")
    ] = None,
    user: Annotated[str, typer.Option(help="user of the gateway")] = "admin",
    password_file: Annotated[
        Path | None,
        typer.Option(help="file with its password (default: that of the state folder, where there is one)"),
    ] = None,
    kubernetes: Annotated[
        bool, typer.Option("--kubernetes", help="look at the cluster we are in, or that of KUBECONFIG")
    ] = False,
    namespace: Annotated[str, typer.Option(help="namespace of the release")] = "keystage",
    function_namespace: Annotated[
        str, typer.Option(help="namespace of the functions (default: <namespace>-fn)")
    ] = "",
    proxy_timeout: Annotated[
        float | None,
        typer.Option(
            help="seconds that the proxy in front of the gateway waits (default: that of its kind)", min=0.1
        ),
    ] = None,
    redis: Annotated[
        str,
        typer.Option(
            envvar="KEYSTAGE_REDIS", show_default=False, help="Redis of the gateway's asynchronous calls"
        ),
    ] = "",
    home: Annotated[
        Path | None,
        typer.Option(help="state folder (default .keystage, or KEYSTAGE_HOME)", readable=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on standard output")] = False,
) -> None:
    """Look at this machine, and at a gateway or a cluster where asked; change nothing.

    Each line says how bad it is, what was looked at, what is needed and what was found, and what to do.
    Exit code 0: all well; 1: warnings; 2: failures, or bad input.
    """
    from keystage.cli import doctor_gateway, doctor_local, doctor_machine, doctor_redis
    from keystage.local.config import LocalSettings

    settings = LocalSettings()
    folder = home or settings.home
    found = doctor_machine.checks(folder)
    found += doctor_local.checks(folder, _port(settings.gateway_port, gateway, is_cluster=kubernetes))
    found += doctor_redis.checks(redis) if redis else []
    is_whole = True
    asked: list[Check] = []
    if gateway is not None:
        client, file = _client(gateway, user, password_file or own_password_file(folder))
        is_whole = not kubernetes or doctor_gateway.is_keystage(client)
    around = Around(timeout_s=settings.timeout_s if "timeout_s" in settings.model_fields_set else None)
    if kubernetes:
        seen, around = _kubernetes(namespace, function_namespace or f"{namespace}-fn", is_whole=is_whole)
        asked += seen
    if gateway is not None:
        asked += doctor_gateway.checks(
            client, file, around.timeout_s, around.links, around.clocks, proxy_timeout
        )
    found += asked
    if as_json:
        tell_json(findings(found))
    else:
        typer.echo(text(found))
    raise typer.Exit(exit_code(found))


@dataclasses.dataclass(frozen=True, slots=True)
class Around:
    """What else was seen of a gateway's world.

    Attributes:
        timeout_s: what the gateway lets a function take, None: not known.
        links: who waits in front of it, the outermost first.
        clocks: seconds that others are ahead of this machine.
    """

    timeout_s: float | None = None
    links: tuple[Link, ...] = ()
    clocks: dict[str, float] = dataclasses.field(default_factory=dict)


def _port(port: int, gateway: str | None, *, is_cluster: bool) -> int | None:
    """The port that `up` would listen on; None where something else is meant to be there, as a forward is."""
    return None if is_cluster or (gateway is not None and gateway.rstrip("/").endswith(f":{port}")) else port


def _client(url: str, user: str, password_file: Path | None) -> tuple[Client, Path | None]:
    from keystage.openfaas.client import Client
    from keystage.openfaas.errors import BadAddress, BadPassword
    from keystage.openfaas.exchange import Wire, read_password

    try:
        credentials = read_password(user, password_file) if password_file is not None else None
        return Client(Wire(url, credentials, ANSWER_S)), password_file
    except (BadAddress, BadPassword) as error:
        fail(error, 2)


def _kubernetes(namespace: str, function_namespace: str, *, is_whole: bool) -> tuple[list[Check], Around]:
    from keystage.cli import doctor_clock, doctor_cluster
    from keystage.cli.doctor_kubernetes import ask
    from keystage.kubernetes.client import Cluster, connect
    from keystage.kubernetes.errors import ClusterError

    try:
        cluster = Cluster(connect(), namespace)
        try:
            seen = ask(cluster, function_namespace)
        finally:
            cluster.close()
    except ClusterError as error:
        check = Check(
            area=doctor_cluster.AREA,
            level="fail",
            thing="API server",
            bound="an answer",
            actual=str(error),
            advice="run in a pod, or set KUBECONFIG",
        )
        return [check], Around()
    now = dt.datetime.now(dt.UTC)
    found = doctor_cluster.checks(seen, now, is_whole=is_whole)
    return found, Around(
        timeout_s=doctor_cluster.gateway_timeout_s(seen),
        links=doctor_cluster.ingress_links(seen),
        clocks=doctor_clock.of_cluster(seen.nodes, seen.lease, now),
    )
