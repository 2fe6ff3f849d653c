"""`keystage doctor`: looks at this machine, a gateway and a cluster, and says what is amiss."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from keystage.cli.doctor_report import Check, exit_code, text
from keystage.cli.errors import fail

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
    home: Annotated[
        Path | None, typer.Option(help="state folder (default .keystage, or KEYSTAGE_HOME)")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the findings as JSON")] = False,
) -> None:
    """Look at this machine, and at a gateway or a cluster where asked; change nothing.

    Each line says how bad it is, what was looked at, what is needed and what was found. Exit code 0: all
    well; 1: warnings; 2: failures, or bad input.
    """
    import msgspec

    from keystage.cli import doctor_gateway, doctor_machine
    from keystage.local.config import LocalSettings

    folder = home or LocalSettings().home
    found = doctor_machine.checks(folder)
    is_whole = True
    asked: list[Check] = []
    if gateway is not None:
        client, file = _client(gateway, user, password_file or _password_file(folder))
        is_whole = doctor_gateway.is_keystage(client)
    timeout_s = None
    if kubernetes:
        seen, timeout_s = _kubernetes(namespace, function_namespace or f"{namespace}-fn", is_whole=is_whole)
        asked += seen
    if gateway is not None:
        asked += doctor_gateway.checks(client, file, timeout_s)
    found += asked
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(found), indent=1).decode())
    else:
        typer.echo(text(found))
    raise typer.Exit(exit_code(found))


def _password_file(folder: Path) -> Path | None:
    from keystage.local.home import PASSWORD_FILE

    file = folder / "credentials" / PASSWORD_FILE
    return file if file.exists() else None


def _client(url: str, user: str, password_file: Path | None) -> tuple[Client, Path | None]:
    from keystage.openfaas.client import Client
    from keystage.openfaas.errors import BadAddress, BadPassword
    from keystage.openfaas.exchange import Wire, read_password

    try:
        credentials = read_password(user, password_file) if password_file is not None else None
        return Client(Wire(url, credentials, ANSWER_S)), password_file
    except (BadAddress, BadPassword) as error:
        fail(error, 2)


def _kubernetes(
    namespace: str, function_namespace: str, *, is_whole: bool
) -> tuple[list[Check], float | None]:
    from keystage.cli import doctor_cluster
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
        return [check], None
    found = doctor_cluster.checks(seen, dt.datetime.now(dt.UTC), is_whole=is_whole)
    return found, doctor_cluster.gateway_timeout_s(seen)
