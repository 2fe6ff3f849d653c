"""Which headers cross the gateway; close codes; time-outs along the chain."""

from __future__ import annotations

import pytest

from keystage.gateway.headers import SERVED_BY, end_to_end, for_client, for_replica
from keystage.gateway.timeouts import silence_s
from keystage.gateway.websocket_codes import fitting, sendable

HOPS = [
    (b"Keep-Alive", b"timeout=5"),
    (b"Transfer-Encoding", b"chunked"),
    (b"TE", b"trailers"),
    (b"Trailer", b"X-Sum"),
    (b"Upgrade", b"h2c"),
    (b"Proxy-Connection", b"keep-alive"),
    (b"Proxy-Authenticate", b"Basic"),
    (b"Proxy-Authorization", b"Basic eA=="),
]


def test_hop_by_hop_headers_stay_and_repeated_ones_cross_in_order() -> None:
    pairs = [
        (b"Connection", b"close, X-Hop , http2-settings"),
        (b"X-Hop", b"1"),
        (b"connection", b"x-other"),
        (b"X-Other", b"1"),
        (b"HTTP2-Settings", b"x"),
        *HOPS,
        (b"Set-Cookie", b"a=1"),
        (b"Vary", b"accept"),
        (b"set-cookie", b"b=2"),
        (b"content-length", b"3"),
    ]
    kept = [
        (b"set-cookie", b"a=1"),
        (b"vary", b"accept"),
        (b"set-cookie", b"b=2"),
        (b"content-length", b"3"),
    ]
    assert end_to_end(pairs) == kept
    assert for_client([(b"X-Call-Id", b"theirs"), (b"X-Start-Time", b"1"), SERVED_BY, *pairs]) == kept


def test_replica_learns_who_called_and_how() -> None:
    pairs = [(b"host", b"example.org"), (b"expect", b"100-continue"), (b"accept", b"*/*")]
    assert for_replica(pairs, client="10.0.0.2", scheme="wss", version="1.0") == [
        (b"accept", b"*/*"),
        (b"x-forwarded-for", b"10.0.0.2"),
        (b"x-forwarded-proto", b"https"),
        (b"x-forwarded-host", b"example.org"),
        (b"via", b"1.0 keystage"),
    ]


def test_what_a_proxy_in_front_told_stays_and_is_added_to() -> None:
    pairs = [
        (b"host", b"gateway:8080"),
        (b"x-forwarded-for", b"10.0.0.1"),
        (b"x-forwarded-for", b"10.0.0.2"),
        (b"x-forwarded-proto", b"https"),
        (b"x-forwarded-host", b"example.org"),
        (b"via", b"1.1 ingress"),
        (b"forwarded", b"for=10.0.0.1"),
    ]
    assert for_replica(pairs, client="10.0.0.3", scheme="http", version="1.1") == [
        (b"forwarded", b"for=10.0.0.1"),
        (b"x-forwarded-for", b"10.0.0.1, 10.0.0.2, 10.0.0.3"),
        (b"x-forwarded-proto", b"https"),
        (b"x-forwarded-host", b"example.org"),
        (b"via", b"1.1 ingress, 1.1 keystage"),
    ]
    odd = dict(for_replica([(b"x-forwarded-proto", b"gopher")], client="", scheme="http", version="1.1"))
    assert odd[b"x-forwarded-proto"] == b"http"
    assert b"x-forwarded-host" not in odd


def test_close_codes_cross_if_they_may_be_sent() -> None:
    for code in (1000, 1001, 1002, 1003, *range(1007, 1015), 3000, 4000, 4999):
        assert sendable(code, 1011) == code
    assert sendable(1005, 1011) == 1000
    for code in (0, 999, 1004, 1006, 1015, 1016, 2999, 5000):
        assert sendable(code, 1011) == 1011
    assert fitting("ü" * 62) == "ü" * 61
    assert fitting("x" * 123) == "x" * 123


@pytest.mark.parametrize(("timeout_s", "waits_s"), [(600.0, 605.0), (100.0, 102.0), (0.5, 1.0)])
def test_gateway_waits_a_little_longer_than_a_function_may_take(timeout_s: float, waits_s: float) -> None:
    assert silence_s(timeout_s) == pytest.approx(waits_s)
