"""What depends on things a gateway does not tell: registries, time-outs, Accept, the pods' network. Pure.

Used by `openfaas.findings`, which makes findings of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

from keystage.local.api import Deployment, role_of
from keystage.local.durations import parse_go_duration
from keystage.local.labels import FACTOR, MAX, MIN, whole
from keystage.openfaas.provider import Limits

Fields = tuple[str, str, str, Literal["refused", "dropped", "notice"], str]
"""limit, bound, actual, effect, why"""

TIMEOUTS = ("read_timeout", "write_timeout", "exec_timeout")
ROUTER_DEADLINE_S = 600.0
"""The router's default of KEYSTAGE_DEADLINE_S."""


def advice(deployment: Deployment, limits: Limits) -> Iterator[Fields]:
    """What may bite one function."""
    role = role_of(deployment)
    if not limits.has_private_images and deployment.image:
        yield (
            "image",
            "pullable without credentials, and anew at every start",
            deployment.image,
            "notice",
            "a private image is refused; an update with one is answered 200 and changes nothing",
        )
    yield from _time(deployment, limits, role)
    if limits.is_steered:
        return
    if role == "router":
        yield from _router(deployment, limits)
    if role in ("router", "stage"):
        yield from _wiring(deployment, role)


def duration_s(text: str) -> float | None:
    """Seconds of a Go duration (`1m30s`) or a bare integer, None where it is neither."""
    seconds = whole(text)
    if seconds is not None:
        return float(seconds)
    try:
        return parse_go_duration(text)
    except ValueError:
        return None


def deadline_s(text: str) -> float:
    """A router's deadline as it reads it, its default where it has none that is a number above 0."""
    try:
        seconds = float(text)
    except ValueError:
        return ROUTER_DEADLINE_S
    return seconds if 0 < seconds < math.inf else ROUTER_DEADLINE_S


def _time(deployment: Deployment, limits: Limits, role: str) -> Iterator[Fields]:
    if limits.answer_s is None:
        return
    asked = {name: duration_s(deployment.envVars.get(name, "")) for name in TIMEOUTS}
    if role == "router":
        asked["KEYSTAGE_DEADLINE_S"] = deadline_s(deployment.envVars.get("KEYSTAGE_DEADLINE_S", ""))
    name, longest_s = max(asked.items(), key=lambda item: item[1] or 0.0)
    if longest_s is not None and longest_s > limits.answer_s:
        yield (
            "time of an answer",
            f"{limits.answer_s:g} s unless the gateway's upstream_timeout was raised",
            f"{name} {longest_s:g} s",
            "notice",
            "a longer generation is cut off: 502 with an empty body",
        )


def _router(deployment: Deployment, limits: Limits) -> Iterator[Fields]:
    labels = deployment.labels
    if limits.streams_by_accept:
        yield (
            "streaming",
            "requests with Accept: text/event-stream",
            "any request with stream=true",
            "notice",
            "others get the whole answer at its end: set the header (the OpenAI client: default_headers)",
        )
    if limits.has_scaling and labels.get(FACTOR) != "0" and labels.get(MIN, "1") != labels.get(MAX):
        yield (
            f"label {FACTOR}",
            '"0"',
            labels.get(FACTOR, "absent"),
            "notice",
            "above 5 requests a second the gateway's alerts add routers, each with queues of its own",
        )


def _wiring(deployment: Deployment, role: str) -> Iterator[Fields]:
    """Router and workers are pods of their own there, and talk to each other directly."""
    address = deployment.envVars.get("KEYSTAGE_ROUTER", "")
    if "tcp" not in address:
        yield (
            "KEYSTAGE_ROUTER",
            "tcp://HOST:PORT, the same at the router and every stage",
            address or "absent",
            "dropped",
            "router and workers never find each other; see docs/openfaas.md",
        )
    elif role == "router" and "KEYSTAGE_WIRE_BIND" not in deployment.envVars:
        yield (
            "KEYSTAGE_WIRE_BIND",
            "0.0.0.0 where KEYSTAGE_ROUTER names a Service",
            "absent",
            "notice",
            "a router listens where KEYSTAGE_ROUTER says, and a Service's address is not its own",
        )
    if "KEYSTAGE_WIRE_KEY_FILE" not in deployment.envVars:
        yield (
            "KEYSTAGE_WIRE_KEY_FILE",
            "a secret that router and workers share",
            "absent",
            "dropped",
            "they refuse to talk between nodes without it",
        )
    bundle = deployment.envVars.get("KEYSTAGE_BUNDLE", "")
    if bundle.startswith("file:"):
        yield (
            "KEYSTAGE_BUNDLE",
            "a path inside the image, or http(s)://",
            bundle,
            "notice",
            "there are no volumes: a path of this machine is not there",
        )
