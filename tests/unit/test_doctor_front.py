"""Who stands in front of a gateway, by the headers of an answer."""

from __future__ import annotations

import pytest

from keystage.cli.doctor_front import link, own_timeout_s


@pytest.mark.parametrize(
    ("headers", "told_s", "words"),
    [
        (
            {"server": "nginx/1.22.1"},
            None,
            "proxy_read_timeout 60 s of proxy nginx/1.22.1 (unless it was changed)",
        ),
        ({"server": "envoy"}, None, "the route's timeout 15 s of proxy envoy (unless it was changed)"),
        ({"server": "Apache/2.4"}, None, "ProxyTimeout 60 s of proxy Apache/2.4 (unless it was changed)"),
        ({"server": "nginx"}, 30.0, "proxy_read_timeout 30 s of proxy nginx"),
        ({"via": "1.1 Caddy"}, 30.0, "--proxy-timeout 30 s of proxy 1.1 Caddy"),
        ({}, 30.0, "--proxy-timeout 30 s of proxy"),
    ],
)
def test_a_proxy_is_a_link_of_the_chain(headers: dict[str, str], told_s: float | None, words: str) -> None:
    assert str(link(headers, told_s)) == words


@pytest.mark.parametrize("headers", [{}, {"server": "something of one's own"}, {"via": "1.1 Caddy"}])
def test_without_a_known_default_nothing_is_guessed(headers: dict[str, str]) -> None:
    assert link(headers, None) is None


@pytest.mark.parametrize("url", ["http://192.0.2.1:8080", "http://127.0.0.1:1", "http://gateway.invalid"])
def test_a_gateway_whose_process_is_not_here_tells_nothing(url: str) -> None:
    assert own_timeout_s(url) is None
