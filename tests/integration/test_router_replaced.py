"""A router behind one address is replaced by another process elsewhere: its workers find the new one."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.pods import free_port
from support.processes import WAIT_S, get, wait_for
from support.service_address import ServiceAddress
from support.wire_nodes import NodesFunction, ready_stages

HOSTS = ("127.0.0.2", "127.0.0.3")


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ks", dir="/tmp") as name:
        yield Path(name)


def tokens(url: str) -> list[int]:
    body = {"model": "em", "prompt": [1, 2, 3], "max_tokens": 5, "temperature": 0, "return_token_ids": True}
    status, answer = get(f"{url}/v1/completions", json.dumps(body).encode())
    assert status == 200, answer
    ids: list[int] = json.loads(answer)["choices"][0]["token_ids"]
    return ids


@pytest.mark.slow
@pytest.mark.parametrize("loses", [False, True], ids=["killed", "node lost"])
def test_workers_find_the_new_router_at_the_old_address(folder: Path, loses: bool) -> None:
    """As in pods: every process is a node, the router's name is another's address, workers have hosts."""
    function = NodesFunction(folder, "looping", 2)
    port = free_port()
    service = ServiceAddress("127.0.0.10", port)
    name = f"tcp://127.0.0.10:{port}"
    try:
        service.backend = HOSTS[0]
        env = {"KEYSTAGE_ROUTER": name, "KEYSTAGE_WIRE_HOST": "", "KEYSTAGE_WIRE_BIND": HOSTS[0]}
        first, url = function.on("ra", "router", "ra", **env)
        for stage, host in enumerate(("127.0.0.4", "127.0.0.5")):
            function.on(
                f"w{stage}", "worker", f"w{stage}", KEYSTAGE_STAGES=str(stage), KEYSTAGE_ROUTER=name,
                KEYSTAGE_WIRE_HOST=host,
            )  # fmt: skip
        wait_for(lambda: ready_stages(url) == {0, 1}, "both stages at the first router")
        assert len(tokens(url)) == 5
        if not loses:
            first.kill()
            first.wait(WAIT_S)
        service.move(HOSTS[1], loses=loses)
        env["KEYSTAGE_WIRE_BIND"] = HOSTS[1]
        _, url = function.on("rb", "router", "rb", **env)
        wait_for(lambda: ready_stages(url) == {0, 1}, "both stages at the second router")
        assert len(tokens(url)) == 5
    finally:
        function.stop()
        service.close()
