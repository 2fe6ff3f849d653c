"""The controller's port for probes and metrics."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from keystage.controller.health import HealthServer


class State:
    """What the server is told."""

    def __init__(self) -> None:
        self.ill = ""
        self.unready = ""


@pytest.fixture
def state() -> State:
    return State()


@pytest.fixture
def server(state: State) -> Iterator[HealthServer]:
    made = HealthServer(0, lambda: state.ill, lambda: state.unready, lambda: b"keystage_leader 1\n")
    made.start()
    yield made
    made.stop()


def get(server: HealthServer, path: str, method: str = "GET") -> tuple[int, bytes]:
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def test_well(server: HealthServer) -> None:
    assert get(server, "/healthz") == (200, b"ok\n")
    assert get(server, "/readyz?verbose") == (200, b"ok\n")
    assert get(server, "/metrics") == (200, b"keystage_leader 1\n")


def test_not_well_says_why(server: HealthServer, state: State) -> None:
    state.ill = "the loop turned 61 s ago last"
    assert get(server, "/healthz") == (503, b"the loop turned 61 s ago last\n")
    assert get(server, "/readyz")[0] == 200
    state.unready = "the cluster was seen 99 s ago last"
    assert get(server, "/readyz") == (503, b"the cluster was seen 99 s ago last\n")


def test_nothing_else_is_served(server: HealthServer) -> None:
    assert get(server, "/")[0] == 404
    assert get(server, "/healthz", "POST")[0] == 501


def test_it_can_be_stopped_before_it_was_started() -> None:
    HealthServer(0, str, str, bytes).stop()
