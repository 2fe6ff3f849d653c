"""`keystage check-gateway`: what a gateway is, and what it will not do for a stack."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from keystage.cli.errors import fail
from keystage.cli.output import tell_json

if TYPE_CHECKING:
    from keystage.local.api import Deployment
    from keystage.openfaas.client import Client
    from keystage.openfaas.findings import Finding, Present
    from keystage.openfaas.provider import Limits
    from keystage.openfaas.types import GatewayInfo

DEFAULT_GATEWAY = "http://127.0.0.1:8080"
BAD_INPUT, NOT_ASKED = 2, 3


def check_gateway(
    stack: Annotated[Path | None, typer.Argument(help="stack.yml to be deployed")] = None,
    gateway: Annotated[
        str | None, typer.Option(help=f"address (default: the stack's, else {DEFAULT_GATEWAY})")
    ] = None,
    user: Annotated[str, typer.Option(help="user of the gateway")] = "admin",
    password_file: Annotated[
        Path | None, typer.Option(help="file with the password (default: no credentials are sent)")
    ] = None,
    namespace: Annotated[str, typer.Option(help="namespace of the functions (default: the gateway's)")] = "",
    timeout: Annotated[float, typer.Option(help="seconds to wait for an answer", min=0.1, max=3600.0)] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on standard output")] = False,
) -> None:
    """Tell what a gateway is, and what it would refuse or drop of a stack, before anything is deployed.

    Exit code 0: nothing that was asked for is refused or dropped; 1: something is; 2: bad input; 3: the
    gateway cannot be asked.
    """
    from keystage.openfaas.client import Client
    from keystage.openfaas.errors import BadAddress, BadPassword, OpenFaasError
    from keystage.openfaas.exchange import Wire, read_password
    from keystage.openfaas.stack import StackError, deployments, read_stack

    wanted: list[Deployment] = []
    try:
        if stack is not None:
            content = read_stack(stack)
            wanted = deployments(content, stack.parent)
            gateway = gateway or content.provider.gateway
        credentials = read_password(user, password_file) if password_file is not None else None
        client = Client(Wire(gateway or DEFAULT_GATEWAY, credentials, timeout), namespace)
    except (StackError, BadAddress, BadPassword) as error:
        fail(error, BAD_INPUT)
    try:
        info, taken, found = _ask(client, wanted)
    except OpenFaasError as error:
        fail(error, NOT_ASKED)
    biting = sum(finding.bites for finding in found)
    if as_json:
        told = {"gateway": client.wire.url, "info": info, "limits": taken, "findings": found}
        tell_json(told)
        raise typer.Exit(1 if biting else 0)
    _tell(client, info, taken)
    for finding in found:
        typer.echo(str(finding))
    typer.echo(f"{len(wanted)} functions looked at: {biting} findings, {len(found) - biting} notices")
    raise typer.Exit(1 if biting else 0)


def _ask(client: Client, wanted: list[Deployment]) -> tuple[GatewayInfo, Limits, list[Finding]]:
    """What the gateway is, what it takes, and what it will not do."""
    from keystage.openfaas.findings import check
    from keystage.openfaas.provider import kind_of, limits

    info = client.info()
    taken = limits(kind_of(info))
    return info, taken, check(wanted, taken, _present(client))


def _tell(client: Client, info: GatewayInfo, taken: Limits) -> None:
    provider = info.provider
    typer.echo(
        f"{client.wire.url}: {taken.name} (provider {provider.provider or 'unnamed'} "
        f"{provider.version.release or 'without version'}, orchestration "
        f"{provider.orchestration or 'unnamed'}, gateway {info.version.release or 'without version'})"
    )
    most = "any number of" if taken.most is None else f"{taken.least} to {taken.most}"
    functions = "any number of" if taken.functions is None else f"at most {taken.functions}"
    typer.echo(f"takes {functions} functions, {most} replicas each")


def _present(client: Client) -> Present:
    """What is deployed already; a gateway that does not tell secrets is not asked twice."""
    from keystage.openfaas.errors import Failed, NotFound, Refused
    from keystage.openfaas.findings import Present

    functions = frozenset(status.name for status in client.functions())
    try:
        return Present(functions, frozenset(secret.name for secret in client.secrets()))
    except (Failed, NotFound, Refused):
        return Present(functions)
