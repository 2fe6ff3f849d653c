"""A router started with few descriptors allowed takes as many connections as the hard limit lets it."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from support.processes import EmulatedFunction, get

SOFT = 128
IDLE = 2 * SOFT


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ks", dir="/tmp") as name:
        yield Path(name)


@contextlib.contextmanager
def inherited_soft_limit(most: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_more_connections_than_the_soft_limit_are_taken(folder: Path) -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 4 * IDLE:
        pytest.skip(f"the hard limit of open files is below {4 * IDLE}")
    function = EmulatedFunction(folder, "looping", 1)
    idle: list[socket.socket] = []
    try:
        with inherited_soft_limit(SOFT):
            _, url = function.start("router", "r")
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
