"""A real router and worker: API keys from a secret that changes, and deadlines that cannot be met."""

from __future__ import annotations

import hashlib
import http.client
import json
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from support.processes import EmulatedFunction, get, wait_for

KEY, NEW = "ks-first", "ks-second"


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ks", dir="/tmp") as name:
        yield Path(name)


def ask(url: str, tokens: int = 2, **headers: str) -> tuple[int, dict[str, str], Any]:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    try:
        body = json.dumps({"prompt": [1, 2], "max_tokens": tokens, "temperature": 0}).encode()
        connection.request("POST", "/", body, {k.replace("_", "-"): v for k, v in headers.items()})
        answer = connection.getresponse()
        raw = answer.read()
        return answer.status, {k.lower(): v for k, v in answer.getheaders()}, json.loads(raw)
    finally:
        connection.close()


def line(tenant: str, key: str) -> str:
    return f"{tenant} {hashlib.sha256(key.encode()).hexdigest()}\n"


@pytest.mark.slow
def test_keys_come_from_the_function_s_secret_and_change_without_a_restart(folder: Path) -> None:
    secrets = folder / "secrets"
    secrets.mkdir()
    (secrets / "router-keys").write_text(line("team", KEY))
    function = EmulatedFunction(folder, "looping", 1)
    try:
        _, url = function.start(
            "router", "r", KEYSTAGE_API_KEYS="secret:router-keys", secret_mount_path=str(secrets)
        )
        function.start("worker", "w", KEYSTAGE_STAGES="0")
        assert ask(url)[0] == 401
        assert ask(url, Authorization=f"Bearer {KEY}")[0] == 200
        assert ask(url, Authorization=f"Bearer {NEW}")[0] == 401
        (secrets / "router-keys").write_text(line("team", KEY) + line("other", NEW))
        wait_for(lambda: ask(url, Authorization=f"Bearer {NEW}")[0] == 200, "the new key is known")
        told = get(f"{url}/metrics")[1].decode()
        assert 'keystage_tenant_requests_total{pipeline="em",tenant="other"} 1.0' in told
        for secret in (KEY, NEW, hashlib.sha256(KEY.encode()).hexdigest()):
            assert secret not in told
            assert secret not in get(f"{url}/_/stats")[1].decode()
    finally:
        function.stop()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "cannot be read: No such file or directory"),
        ("team my-own-key\n", "line 1: the key of team must be"),
    ],
)
def test_a_router_without_usable_keys_does_not_start_open(
    folder: Path, content: str | None, why: str
) -> None:
    path = folder / "keys"
    if content is not None:
        path.write_text(content)
    function = EmulatedFunction(folder, "looping", 1)
    try:
        process, _ = function.start("router", "r", wait=False, KEYSTAGE_API_KEYS=str(path))
        _, told = process.communicate(timeout=60)
        assert process.returncode == 2
        assert f"API keys in {path}" in told.decode()
        assert why in told.decode()
        assert "my-own-key" not in told.decode()
        assert "Traceback" not in told.decode()
    finally:
        function.stop()


@pytest.mark.slow
def test_what_cannot_be_in_time_is_refused_at_once_and_what_can_is_not(folder: Path) -> None:
    function = EmulatedFunction(folder, "looping", 1)
    statuses: list[int] = []
    try:
        _, url = function.start("router", "r")
        device = "emulated:alpha=0,beta=0.03"
        function.start("worker", "w", KEYSTAGE_STAGES="0", KEYSTAGE_SLOTS="2", KEYSTAGE_DEVICE=device)
        waiting = [
            threading.Thread(target=lambda: statuses.append(ask(url, tokens=12)[0])) for _ in range(40)
        ]
        for thread in waiting:
            thread.start()

        def counters() -> Any:
            return json.loads(get(f"{url}/_/stats")[1])

        wait_for(lambda: counters()["completed"] >= 8, "the drain rate is known")
        assert counters()["stages"][0]["queue"] >= 10
        status, headers, body = ask(url, tokens=12, X_Keystage_Deadline_S="0.6")
        assert (status, body["error"]["code"]) == (429, "deadline_unreachable")
        assert 1 <= int(headers["retry-after"]) <= 30
        assert "tokens a second" in body["error"]["message"]
        assert ask(url, tokens=12, X_Keystage_Deadline_S="50")[0] == 200
        for thread in waiting:
            thread.join(60)
        assert statuses == [200] * 40
        assert counters()["refused"]["deadline_unreachable"] == 1
    finally:
        function.stop()
