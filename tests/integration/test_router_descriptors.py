"""A router started with few descriptors allowed takes as many connections as the hard limit lets it."""

from __future__ import annotations

import json
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from support.processes import EmulatedFunction, get

SOFT = 128
HARD = 256
IDLE = 2 * SOFT


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ks", dir="/tmp") as name:
        yield Path(name)


@pytest.mark.slow
def test_more_connections_than_the_soft_limit_are_taken(folder: Path) -> None:
    function = EmulatedFunction(folder, "looping", 1)
    idle: list[socket.socket] = []
    try:
        _, url = function.start("router", "r", prefix=("prlimit", f"--nofile={SOFT}:"))
        function.start("worker", "w", KEYSTAGE_STAGES="0")
        place = urlsplit(url)
        idle += [socket.create_connection((place.hostname, place.port)) for _ in range(IDLE)]
        body = {"model": "em", "prompt": [1, 2, 3], "max_tokens": 2, "temperature": 0}
        status, answer = get(f"{url}/v1/completions", json.dumps(body).encode())
        assert status == 200, answer
    finally:
        for connection in idle:
            connection.close()
        function.stop()


@pytest.mark.slow
def test_a_router_at_its_bound_says_so_and_is_not_taken_for_dead(folder: Path) -> None:
    function = EmulatedFunction(folder, "looping", 1)
    idle: list[socket.socket] = []
    try:
        _, url = function.start("router", "r", prefix=("prlimit", f"--nofile={HARD}:{HARD}"))
        function.start("worker", "w", KEYSTAGE_STAGES="0")
        place = urlsplit(url)
        body = json.dumps({"model": "em", "prompt": [1, 2, 3], "max_tokens": 2, "temperature": 0}).encode()
        idle += [socket.create_connection((place.hostname, place.port)) for _ in range(2 * HARD)]
        for _ in range(3):
            assert get(f"{url}/_/health")[0] == 200
            assert get(f"{url}/_/ready")[0] == 200
            status, answer = get(f"{url}/v1/completions", body)
            assert (status, json.loads(answer)["error"]["code"]) == (503, "too_many_connections")
        for connection in idle:
            connection.close()
        end_s = time.monotonic() + 30
        while get(f"{url}/v1/completions", body)[0] != 200:
            assert time.monotonic() < end_s
    finally:
        for connection in idle:
            connection.close()
        function.stop()
