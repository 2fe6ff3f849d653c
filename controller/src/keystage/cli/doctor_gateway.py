"""What `keystage doctor` asks of a running gateway: health, credentials, time-outs along the chain.

A stock OpenFaaS gateway is then judged by `doctor_openfaas`. It reads and changes nothing.
"""

from __future__ import annotations

import http.client
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from keystage.cli.doctor_report import Check, judged

if TYPE_CHECKING:
    from keystage.openfaas.client import Client
    from keystage.openfaas.types import FunctionStatus

AREA = "gateway"
ANSWER_S = 10.0
DEFAULT_S = 600.0
"""The gateway's own default of KEYSTAGE_TIMEOUT_S."""


def checks(client: Client, password_file: Path | None, timeout_s: float | None) -> list[Check]:
    """Everything about one gateway.

    Args:
        client: of its REST API.
        password_file: where its credentials came from, None: none are sent.
        timeout_s: what it lets a function take, None: not known here.
    """
    from keystage.cli import doctor_openfaas
    from keystage.openfaas.errors import NotFound, OpenFaasError
    from keystage.openfaas.provider import kind_of, limits

    url = client.wire.url
    found = [_health(url)]
    if password_file is not None:
        found.append(_mode(password_file))
    try:
        info = client.info()
        functions = client.functions()
    except OpenFaasError as error:
        advice = (
            "nothing there speaks OpenFaaS' API" if isinstance(error, NotFound) else "see --password-file"
        )
        return [*found, _unreachable(url, str(error), advice)]
    kind = kind_of(info)
    taken = limits(kind)
    found.append(
        Check(
            area=AREA,
            level="ok",
            thing=url,
            bound="an OpenFaaS API that takes the credentials",
            actual=f"{taken.name}, {len(functions)} functions",
        )
    )
    if kind == "keystage":
        found += ready(functions)
        found += timeouts(functions, timeout_s or DEFAULT_S, is_known=timeout_s is not None)
    else:
        found += doctor_openfaas.checks(taken, functions)
    return found


def is_keystage(client: Client) -> bool:
    """Whether it is Keystage's own gateway; one that does not answer is taken for it."""
    from keystage.openfaas.errors import OpenFaasError
    from keystage.openfaas.provider import kind_of

    try:
        return kind_of(client.info()) == "keystage"
    except OpenFaasError:
        return True


def ready(functions: Iterable[FunctionStatus]) -> list[Check]:
    """Functions that should have replicas and have none ready."""
    return [
        judged(
            AREA,
            f"function {function.name}",
            "1 ready replica or more",
            f"{function.availableReplicas} of {function.replicas}",
            "warn",
            f"requests wait: faas-cli describe {function.name}, faas-cli logs {function.name}",
            is_met=function.availableReplicas > 0,
        )
        for function in functions
        if function.replicas > 0
    ]


def timeouts(functions: Iterable[FunctionStatus], gateway_s: float, *, is_known: bool) -> list[Check]:
    """Whether each one on the way waits longer than what is behind it.

    Args:
        functions: as deployed; only what their deployment states is seen.
        gateway_s: what the gateway lets a function take.
        is_known: whether that is read, not its default.
    """
    from keystage.openfaas.advice import TIMEOUTS, deadline_s, duration_s

    found = []
    for function in functions:
        asked = {name: duration_s(function.envVars.get(name, "")) for name in TIMEOUTS}
        if "KEYSTAGE_DEADLINE_S" in function.envVars:
            asked["KEYSTAGE_DEADLINE_S"] = deadline_s(function.envVars["KEYSTAGE_DEADLINE_S"])
        name, longest_s = max(asked.items(), key=lambda item: item[1] or 0.0)
        if not longest_s:
            continue  # it is told the gateway's own time
        found.append(
            judged(
                AREA,
                f"time-outs of {function.name}",
                f"at most the gateway's KEYSTAGE_TIMEOUT_S, {gateway_s:g} s"
                + ("" if is_known else " unless it was changed"),
                f"{name} {longest_s:g} s",
                "warn",
                "the gateway gives up first, and the client gets 504 instead of the answer",
                is_met=longest_s <= gateway_s,
            )
        )
    return found


def _health(url: str) -> Check:
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=ANSWER_S)
    try:
        connection.request("GET", parts.path.rstrip("/") + "/healthz")
        answer = connection.getresponse()
        body = answer.read(200).decode("utf-8", "replace").strip()
    except (OSError, http.client.HTTPException) as error:
        return _unreachable(
            url, str(error) or type(error).__name__, "is it running, and is this its address?"
        )
    finally:
        connection.close()
    return judged(
        AREA,
        f"{url}/healthz",
        "200",
        f"{answer.status} {body}",
        "fail",
        "it cannot see functions and replicas",
        is_met=answer.status == http.client.OK,
    )


def _unreachable(url: str, actual: str, advice: str) -> Check:
    return Check(area=AREA, level="fail", thing=url, bound="an answer", actual=actual, advice=advice)


def _mode(file: Path) -> Check:
    mode = stat.S_IMODE(file.stat().st_mode)
    return judged(
        AREA,
        f"password file {file}",
        "mode 0600",
        f"{mode:04o}",
        "warn",
        "others of this machine can read it: chmod 600",
        is_met=not mode & 0o077,
    )
