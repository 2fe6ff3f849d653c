"""Who a gateway is, what it takes, and what is told before it bites."""

from __future__ import annotations

import msgspec
import pytest

from keystage.local.api import Deployment
from keystage.openfaas.advice import deadline_s, duration_s
from keystage.openfaas.findings import Finding, Present, check
from keystage.openfaas.provider import Kind, kind_of, limits
from keystage.openfaas.types import FunctionStatus, GatewayInfo, decoded

ZERO = "com.openfaas.scale.zero"
MIN, MAX = "com.openfaas.scale.min", "com.openfaas.scale.max"
IMAGE = "ghcr.io/example/x:1"


def plain(name: str = "f", **labels: str) -> Deployment:
    return Deployment(service=name, image=IMAGE, labels=labels)


def biting(deployment: Deployment, kind: Kind, present: Present | None = None) -> list[Finding]:
    return [f for f in check([deployment], limits(kind), present or Present()) if f.bites]


def notices(deployment: Deployment, kind: Kind) -> set[str]:
    return {f.limit for f in check([deployment], limits(kind), Present()) if not f.bites}


@pytest.mark.parametrize(
    ("provider", "orchestration", "kind"),
    [
        ("keystage-local", "keystage", "keystage"),
        ("keystage-kubernetes", "kubernetes", "keystage"),
        ("faas-netes-ce", "kubernetes", "openfaas-ce"),
        ("faas-netes", "kubernetes", "openfaas-pro"),
        ("faas-netes-operator", "kubernetes", "openfaas-pro"),
        ("faasd", "containerd", "faasd"),
        ("faasd-ce", "containerd", "faasd"),
        ("faas-memory", "", "unknown"),
        ("", "", "unknown"),
    ],
)
def test_a_gateway_is_known_by_its_provider(provider: str, orchestration: str, kind: Kind) -> None:
    body = msgspec.json.encode({"provider": {"provider": provider, "orchestration": orchestration}})
    assert kind_of(decoded(body, GatewayInfo)) == kind


@pytest.mark.parametrize(
    "body", [b"{}", b'{"provider": null}', b'{"provider": {"version": null}, "arch": null}']
)
def test_a_gateway_that_says_little_is_unknown(body: bytes) -> None:
    assert kind_of(decoded(body, GatewayInfo)) == "unknown"


def test_what_go_leaves_out_has_its_zero_value() -> None:
    told = decoded(b'{"name": "f", "labels": null, "envVars": {"A": null}, "limits": null}', FunctionStatus)
    assert (told.replicas, told.availableReplicas, told.labels, told.envVars) == (0, 0, {}, {})


@pytest.mark.parametrize(
    ("kind", "asked", "stated"),
    [
        ("openfaas-ce", 0, 1),
        ("openfaas-ce", 9, 5),
        ("openfaas-ce", 3, 3),
        ("faasd", 4, 1),
        ("openfaas-pro", 0, 0),
        ("openfaas-pro", 90, 90),
        ("unknown", 90, 90),
    ],
)
def test_replica_numbers_are_bounded_by_what_is_taken(kind: Kind, asked: int, stated: int) -> None:
    assert limits(kind).bounded(asked) == stated


# Each names the function, the limit, the bound and the actual value.
CE: list[tuple[Deployment, str, str, str, str]] = [
    (plain(**{MAX: "8"}), f"label {MAX}", "5", "8", "refused"),
    (plain(**{MIN: "6"}), f"label {MIN}", "5", "6", "refused"),
    (plain(**{ZERO: "true"}), f"label {ZERO}", "at least one replica", "true", "refused"),
    (plain(**{MIN: "0"}), f"label {MIN}", "1", "0", "dropped"),
    (
        plain(**{"com.openfaas.scale.type": "rps"}),
        "label com.openfaas.scale.type",
        "not available",
        "rps",
        "refused",
    ),
    (
        Deployment(service="f", image=IMAGE, limits={"nvidia.com/gpu": "2", "memory": "1Gi"}),
        "limits nvidia.com/gpu",
        "cpu and memory only",
        "2",
        "dropped",
    ),
    (
        Deployment(service="f", image=IMAGE, envVars={"KEYSTAGE_DEVICE": "cuda:0"}),
        "KEYSTAGE_DEVICE",
        "no GPU in any container",
        "cuda:0",
        "dropped",
    ),
    (
        Deployment(service="f", image=IMAGE, constraints=["a=b", "c=d"]),
        "constraints",
        "ignored",
        "a=b, c=d",
        "dropped",
    ),
    (
        Deployment(service="f", image=IMAGE, namespace="dev"),
        "namespace",
        "openfaas-fn",
        "dev",
        "refused",
    ),
    (Deployment(service="f"), "image", "required", "none", "refused"),
    (
        Deployment(service="f", image=IMAGE, annotations={"eks.amazonaws.com/role": "r"}),
        "annotation eks.amazonaws.com/role",
        "none of amazonaws.com or gke.io",
        "r",
        "refused",
    ),
    (
        Deployment(service="f", image=IMAGE, annotations={"topic": "a,b"}),
        "annotation topic",
        "one topic",
        "a,b",
        "refused",
    ),
]


@pytest.mark.parametrize(("deployment", "limit", "bound", "actual", "effect"), CE, ids=[c[1] for c in CE])
def test_the_community_edition_limits_are_told(
    deployment: Deployment, limit: str, bound: str, actual: str, effect: str
) -> None:
    (found,) = biting(deployment, "openfaas-ce")
    assert (found.function, found.limit, found.bound, found.actual, found.effect) == (
        "f", limit, bound, actual, effect,
    )  # fmt: skip
    for part in ("function f", limit, bound, actual):
        assert part in str(found)
    if limit != "namespace":
        assert biting(deployment, "openfaas-pro") == []


def test_a_function_within_the_limits_bites_nowhere() -> None:
    modest = Deployment(
        service="f", image=IMAGE, labels={MIN: "1", MAX: "5", ZERO: "false"}, limits={"cpu": "1"}
    )
    kinds: list[Kind] = ["keystage", "openfaas-ce", "openfaas-pro", "faasd", "unknown"]
    for kind in kinds:
        if kind != "faasd":  # which has one replica
            assert biting(modest, kind) == []
    assert [f.actual for f in biting(modest, "faasd")] == ["5"]
    assert notices(modest, "keystage") == set()


def test_the_number_of_functions_counts_those_that_are_there() -> None:
    eight = [plain(f"s{k}") for k in range(8)]
    there = frozenset(f"old{k}" for k in range(7))
    assert not any(f.bites for f in check(eight, limits("openfaas-ce"), Present(there)))
    (found,) = [f for f in check(eight, limits("openfaas-ce"), Present(there | {"more", "still"})) if f.bites]
    assert (found.bound, found.actual) == ("15", "17 (9 deployed already)")
    assert "the last 2 of these would fail" in found.why
    again = Present(there | {d.service for d in eight})  # an update of what is there
    assert not any(f.bites for f in check(eight, limits("openfaas-ce"), again))
    assert not any(f.bites for f in check(eight * 3, limits("openfaas-pro"), Present(there)))


def test_secrets_must_be_there_if_that_can_be_seen() -> None:
    needy = msgspec.structs.replace(plain(), secrets=["a", "b"])
    assert biting(needy, "openfaas-pro") == []
    (found,) = biting(needy, "openfaas-pro", Present(secrets=frozenset({"a"})))
    assert (found.limit, found.actual, found.effect) == ("secret b", "absent", "refused")


def pipeline_function(role: str, **env: str) -> Deployment:
    variables = {
        "KEYSTAGE_ROLE": role,
        "KEYSTAGE_ROUTER": "tcp://p:7000",
        "KEYSTAGE_WIRE_BIND": "0.0.0.0",
        "KEYSTAGE_WIRE_KEY_FILE": "/k",
        **env,
    }
    return Deployment(service="p", image=IMAGE, envVars=variables)


def test_routers_hear_of_time_streaming_and_alerts() -> None:
    router = pipeline_function("router")
    assert {"time of an answer", "streaming", "label com.openfaas.scale.factor"} <= notices(
        router, "openfaas-ce"
    )
    short = pipeline_function("router", KEYSTAGE_DEADLINE_S="50")
    quiet = msgspec.structs.replace(short, labels={"com.openfaas.scale.factor": "0"})
    assert notices(quiet, "openfaas-ce") == {"streaming", "image"}
    assert notices(router, "keystage") == set()


def test_stages_on_other_gateways_must_be_told_where_the_router_is() -> None:
    lost = Deployment(
        service="p", image=IMAGE, envVars={"KEYSTAGE_ROLE": "stage", "KEYSTAGE_BUNDLE": "file:///b"}
    )
    assert {f.limit for f in biting(lost, "openfaas-pro")} == {"KEYSTAGE_ROUTER", "KEYSTAGE_WIRE_KEY_FILE"}
    assert "KEYSTAGE_BUNDLE" in notices(lost, "openfaas-pro")
    assert biting(lost, "keystage") == []
    assert biting(pipeline_function("stage"), "openfaas-ce") == []
    unbound = pipeline_function("router")
    del unbound.envVars["KEYSTAGE_WIRE_BIND"]
    assert "KEYSTAGE_WIRE_BIND" in notices(unbound, "openfaas-ce")
    assert "KEYSTAGE_WIRE_BIND" not in notices(pipeline_function("router"), "openfaas-ce")
    assert "replicas" in notices(pipeline_function("stage"), "openfaas-ce")


def test_the_most_certain_come_first() -> None:
    bad = Deployment(service="f", image=IMAGE, constraints=["x"], labels={MAX: "9"})
    assert [f.effect for f in check([bad], limits("openfaas-ce"), Present())] == [
        "refused",
        "dropped",
        "notice",
    ]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90.0),
        ("1m5s", 65.0),
        ("1.5h", 5400.0),
        ("250ms", 0.25),
        ("", None),
        ("1m x", None),
        ("-1s", None),
    ],
)
def test_go_durations(text: str, seconds: float | None) -> None:
    assert duration_s(text) == seconds


@pytest.mark.parametrize(
    ("text", "seconds"), [("90.5", 90.5), ("30", 30.0), ("", 600.0), ("1m", 600.0), ("nan", 600.0)]
)
def test_a_router_s_deadline_is_read_as_the_router_reads_it(text: str, seconds: float) -> None:
    assert deadline_s(text) == seconds
