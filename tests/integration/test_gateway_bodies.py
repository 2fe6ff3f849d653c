"""Bodies of the management API at their bounds: the largest secret, and what is said of one too large."""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import os
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from support.local_function import authorization

from keystage.gateway.rest_system import MAX_SECRET_BODY_BYTES
from keystage.local.api import MAX_SECRET_BYTES
from keystage.local.world import LocalWorld

Send = Callable[[str, str, bytes], tuple[int, str]]


def run(tmp_path: Path, work: Callable[[LocalWorld, Send], None]) -> None:
    async def inside() -> None:
        async with (
            asyncio.timeout(100),
            LocalWorld(tmp_path / "state", gateway_port=0, controller=False) as world,
        ):
            address = urlsplit(world.gateway_url).netloc
            headers = authorization(*world.credentials)

            def send(method: str, path: str, body: bytes) -> tuple[int, str]:
                """Sends all before it reads, as simple clients do."""
                connection = http.client.HTTPConnection(address, timeout=20)
                try:
                    connection.request(method, path, body, headers)
                    answer = connection.getresponse()
                    return answer.status, answer.read().decode()
                finally:
                    connection.close()

            await asyncio.to_thread(work, world, send)

    asyncio.run(inside())


def as_faas_cli(name: str, value: bytes) -> bytes:
    """Both members, the text with a replacement character, escaped, for every byte that is none."""
    text = value.decode("utf-8", "replace")
    raw = base64.b64encode(value).decode()
    return json.dumps({"name": name, "namespace": "", "value": text, "rawValue": raw}).encode()


@pytest.mark.slow
def test_secrets_of_every_documented_size_are_taken_as_faas_cli_sends_them(tmp_path: Path) -> None:
    def work(world: LocalWorld, send: Send) -> None:
        values = {
            "one": b"x",
            "text": "grüße <&>\n".encode(),
            "binary": os.urandom(900_000),
            "escaped": b"\x01" * MAX_SECRET_BYTES,
            "most": b"\xff" * MAX_SECRET_BYTES,
        }
        for name, value in values.items():
            assert send("POST", "/system/secrets", as_faas_cli(name, value)) == (202, ""), name
            assert (world.home.secrets / name).read_bytes() == value
        assert send("PUT", "/system/secrets", as_faas_cli("one", b"\xfe")) == (202, "")
        assert (world.home.secrets / "one").read_bytes() == b"\xfe"
        status, text = send("POST", "/system/secrets", as_faas_cli("more", b"\xff" * (MAX_SECRET_BYTES + 1)))
        said = f"secret more must have 1..{MAX_SECRET_BYTES} bytes, not {MAX_SECRET_BYTES + 1}\n"
        assert (status, text) == (400, said)

    run(tmp_path, work)


def test_who_sends_too_much_reads_why(tmp_path: Path) -> None:
    def work(_: LocalWorld, send: Send) -> None:
        for path, bound in (
            ("/system/functions", 1 << 20),
            ("/system/scale-function/f", 1 << 20),
            ("/system/secrets", MAX_SECRET_BODY_BYTES),
        ):
            status, text = send("POST", path, b" " * (24 << 20))
            assert (status, f"at most {bound} are taken" in text) == (413, True), (path, text)

    run(tmp_path, work)
