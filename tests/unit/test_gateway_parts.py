"""The gateway's pure parts: names, credentials, choice of replica, queries."""

from __future__ import annotations

import base64

import pytest

from keystage.gateway.auth import Credentials
from keystage.gateway.backend import BadRequest, Endpoint, UnknownFunction
from keystage.gateway.balance import Balancer
from keystage.gateway.names import check_namespace, function_name
from keystage.gateway.queries import LogQuery
from keystage.gateway.routes import ROUTES
from keystage.gateway.types import rfc3339


def test_names_may_carry_the_one_namespace() -> None:
    assert function_name("f") == function_name("f.openfaas-fn") == "f"
    for name in ("f.other", ".", "f."):
        with pytest.raises(UnknownFunction, match="openfaas-fn"):
            function_name(name)
    check_namespace("")
    check_namespace("openfaas-fn")
    with pytest.raises(BadRequest, match="'kube-system'"):
        check_namespace("kube-system")


def test_a_route_says_every_status_once() -> None:
    for route in ROUTES:
        statuses = [answer.status for answer in route.answers]
        assert len(statuses) == len(set(statuses)), (route.method, route.path)


def basic(text: bytes) -> str:
    return "Basic " + base64.b64encode(text).decode()


def test_credentials_admit_exactly_themselves() -> None:
    credentials = Credentials("admin", "s3:cret")
    assert credentials.admit(basic(b"admin:s3:cret"))
    assert credentials.admit(basic(b"admin:s3:cret").replace("Basic", "basic"))
    for header in (
        None,
        "",
        "Basic",
        "Basic !!!",
        "Basic \xff",
        "Bearer " + base64.b64encode(b"admin:s3:cret").decode(),
        basic(b"admin:s3:cre"),
        basic(b"admin:s3:cret2"),
        basic(b"root:s3:cret"),
        basic(b"\xff"),
    ):
        assert not credentials.admit(header)
    assert "cret" not in repr(credentials)


def test_least_in_flight_wins_and_ties_go_to_the_first() -> None:
    balancer = Balancer()
    replicas = [Endpoint("a", "h:1"), Endpoint("b", "h:2"), Endpoint("c", "h:3")]
    picked = [balancer.acquire(replicas) for _ in range(7)]
    assert [p.replica for p in picked if p] == ["a", "b", "c", "a", "b", "c", "a"]
    balancer.release(replicas[1])
    assert balancer.acquire(replicas) == replicas[1]
    assert balancer.acquire(replicas, {"b", "c"}) == replicas[0]
    assert balancer.acquire(replicas, {"a", "b", "c"}) is None
    assert balancer.acquire([]) is None
    for replica, count in (("a", 4), ("b", 2), ("c", 2)):
        assert balancer.in_flight(replica) == count
    for _ in range(4):
        balancer.release(replicas[0])
    assert balancer.in_flight("a") == 0


def test_log_queries_are_read_as_faas_cli_writes_them() -> None:
    query = LogQuery.parse({"name": "f", "tail": "-1", "follow": "true", "since": "1970-01-01T00:00:01.5Z"})
    assert (query.tail, query.follow, query.since_s) == (None, True, 1.5)
    assert LogQuery.parse({"name": "f", "tail": "10"}).tail == 10
    assert rfc3339(1.5) == "1970-01-01T00:00:01.500000Z"
    for query_, said in [
        ({}, "name is missing"),
        ({"name": "f", "tail": "all"}, "tail must be an integer of at most 19 digits, not 'all'"),
        ({"name": "f", "since": "yesterday"}, "since must be an RFC 3339 time .*, not 'yesterday'"),
    ]:
        with pytest.raises(BadRequest, match=said):
            LogQuery.parse(query_)
