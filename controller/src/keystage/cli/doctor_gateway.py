"""What `keystage doctor` asks of a running gateway: health, credentials, time-outs, clocks, versions.

A stock OpenFaaS gateway is then judged by `doctor_openfaas`. It reads and changes nothing.
"""

from __future__ import annotations

import http.client
import stat
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from keystage.cli import doctor_chain, doctor_clock, doctor_front, doctor_versions
from keystage.cli.doctor_chain import Link
from keystage.cli.doctor_report import Check, judged
from keystage.cli.figures import clean

if TYPE_CHECKING:
    from keystage.observability.api import Report
    from keystage.openfaas.client import Client
    from keystage.openfaas.errors import OpenFaasError
    from keystage.openfaas.types import FunctionStatus

AREA = "gateway"
ANSWER_S = 10.0
_IS_IT = "is it running (`keystage up`), and is this its address?"
_UNAUTHORISED = (
    "user or password are wrong: --user, --password-file. `keystage up` keeps them in credentials/ of its "
    "state folder, the chart in Secret basic-auth: kubectl -n keystage get secret basic-auth "
    "-o jsonpath='{.data.basic-auth-password}' | base64 -d"
)


def checks(
    client: Client,
    password_file: Path | None,
    timeout_s: float | None,
    outer: Sequence[Link] = (),
    clocks: Mapping[str, float] | None = None,
    proxy_s: float | None = None,
) -> list[Check]:
    """Everything about one gateway.

    Args:
        client: of its REST API.
        password_file: where its credentials came from, None: none are sent.
        timeout_s: what it lets a function take, None: not known here.
        outer: who waits in front of it, the outermost first.
        clocks: seconds that others of its world are ahead of this machine.
        proxy_s: how long what stands in front of it waits, None: not known.
    """
    from keystage.cli import doctor_openfaas
    from keystage.openfaas.errors import OpenFaasError
    from keystage.openfaas.provider import kind_of, limits

    url = client.wire.url
    health, headers = _health(url)
    found = [health]
    if password_file is not None:
        found.append(_mode(password_file))
    if headers is None:
        return found  # nobody answers: a second question would wait as long
    try:
        info = client.info()
        functions = client.functions()
    except OpenFaasError as error:
        return [*found, _unreachable(url, str(error), _advice(error))]
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
        proxy = doctor_front.link(headers, proxy_s) if not outer or proxy_s is not None else None
        way = (*outer, proxy) if proxy is not None else tuple(outer)
        known_s = timeout_s or doctor_front.own_timeout_s(url)
        found += timeouts(
            functions, known_s or doctor_front.DEFAULT_S, is_known=known_s is not None, outer=way
        )
        found += _told(client, info.version.release, clocks or {})
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


def timeouts(
    functions: Iterable[FunctionStatus], gateway_s: float, *, is_known: bool, outer: Sequence[Link] = ()
) -> list[Check]:
    """Time-outs on the way to each function that states some of its own, and to all others.

    Args:
        functions: as deployed; only what their deployment states is seen.
        gateway_s: what the gateway lets a function take.
        is_known: whether that is read, not its default.
        outer: who waits in front of it, the outermost first.
    """
    from keystage.openfaas.advice import TIMEOUTS, deadline_s, duration_s

    way = [*outer, Link("the gateway", "KEYSTAGE_TIMEOUT_S", gateway_s, is_known)]
    found = []
    has_others = False
    for function in functions:
        asked = {name: duration_s(function.envVars.get(name, "")) for name in TIMEOUTS}
        if "KEYSTAGE_DEADLINE_S" in function.envVars:
            asked["KEYSTAGE_DEADLINE_S"] = deadline_s(function.envVars["KEYSTAGE_DEADLINE_S"])
        own = [Link(function.name, name, seconds) for name, seconds in asked.items() if seconds]
        has_others |= not own  # such a one is told the gateway's own time
        if own:
            found.append(doctor_chain.check(AREA, function.name, way, own))
    if has_others or not found:
        found.append(doctor_chain.check(AREA, "functions without their own", way, ()))
    return found


def _told(client: Client, version: str, clocks: Mapping[str, float]) -> list[Check]:
    """Controller, clocks and versions, by what the gateway reports."""
    from keystage.cli.asking import NotAsked, Source

    ahead = dict(clocks)
    clock_s = doctor_clock.gateway_clock(client.wire)
    if clock_s is not None:
        ahead["the gateway"] = clock_s
    versions = {doctor_versions.HERE: doctor_versions.own(), "the gateway": version}
    try:
        report, old = Source(client.wire).judged()
    except NotAsked as error:
        found = [_controller(str(error))]
    else:
        found = [_controller(old or report.trouble, report)]
        versions["the controller"] = report.version
        if not old:
            ahead["the controller"] = report.at_s - time.time()
    return [*found, doctor_clock.check(AREA, ahead), doctor_versions.check(AREA, versions)]


def _controller(trouble: str, report: Report | None = None) -> Check:
    acts = f"number {report.number} of {report.controller}" if report is not None else "no report"
    return judged(
        AREA,
        "controller's report",
        "one of the last seconds, and a controller that acts",
        clean(trouble) or acts,
        "warn",
        "nothing is scaled: logs/_controller.log of the state folder, or "
        "kubectl -n keystage logs -l app.kubernetes.io/component=controller",
        is_met=not trouble,
    )


def _advice(error: OpenFaasError) -> str:
    from keystage.openfaas.errors import NotFound, Unauthorised

    if isinstance(error, NotFound):
        return "nothing there speaks OpenFaaS' API"
    if isinstance(error, Unauthorised):
        return _UNAUTHORISED
    return _IS_IT


def _health(url: str) -> tuple[Check, dict[str, str] | None]:
    """Whether it answers, and the headers of its answer, None: there is none."""
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=ANSWER_S)
    try:
        connection.request("GET", parts.path.rstrip("/") + "/healthz")
        answer = connection.getresponse()
        body = answer.read(200).decode("utf-8", "replace").strip()
    except (OSError, http.client.HTTPException) as error:
        return _unreachable(url, str(error) or type(error).__name__, _IS_IT), None
    finally:
        connection.close()
    check = judged(
        AREA,
        f"{url}/healthz",
        "200",
        f"{answer.status} {clean(body)}",
        "fail",
        "it cannot see functions and replicas: see its log, and whether it is what answers at this address",
        is_met=answer.status == http.client.OK,
    )
    return check, {name.lower(): value for name, value in answer.getheaders()}


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
