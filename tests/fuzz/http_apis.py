"""schemathesis over every HTTP API, against live processes.

Gateway, routers of each kind, worker, KeysManager, supervisor.
Gateway and routers are held against the documents that they serve. The others have none of their own
(`documents`): there only server errors, hangs and the death of the process count.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from support.conformance import GATEWAY, generated
from support.local_function import function

from fuzz import documents
from fuzz.runner import Outcome
from keystage.bundle.api import emulated
from keystage.bundle.program import bundle_program
from keystage.bundle.split import split
from keystage.bundle.store import load, write
from keystage.local.pipeline import deployments_for
from keystage.local.world import LocalWorld

SERVER_ERRORS = """
[checks]
not_a_server_error.expected-statuses = ["2xx", "4xx", "429", "502", "503", "504"]
"""
ONLY_SERVER_ERRORS = "--checks=not_a_server_error"
ROUTER = """
[checks]
not_a_server_error.expected-statuses = ["2xx", "4xx", "503", "504"]
positive_data_acceptance.enabled = false
"""
BEARER = """
[auth.openapi.bearer]
bearer = "${KEYSTAGE_TEST_PASSWORD}"
"""
DEVICE = "emulated:alpha=0.0001,beta=0.0001"
_COUNT = re.compile(r"(\d+) generated")
READY_S = 120.0
END_S = 60.0
LEAST_S = 5.0
"""For each, whatever the start of all those processes took."""


def apis(corpus: Path, seconds: float, seed: int) -> Iterator[Outcome]:
    """All of them, one after another."""
    found: list[Outcome] = []
    asyncio.run(_all(found, corpus / "http", seconds, seed))
    yield from found


async def _all(found: list[Outcome], corpus: Path, seconds: float, seed: int) -> None:
    corpus.mkdir(parents=True, exist_ok=True)
    begun_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="keystage-fuzz-") as place:
        folder = Path(place)
        async with _world(folder) as (world, routers):
            user, password = world.credentials
            known = {"KEYSTAGE_TEST_USER": user, "KEYSTAGE_TEST_PASSWORD": password}
            runs: list[tuple[str, str, str, dict[str, str], tuple[str, ...]]] = [
                ("gateway", GATEWAY, f"{world.gateway_url}/openapi.json", known, ()),
                *((f"router-{name}", ROUTER, f"{url}/openapi.json", {}, ()) for name, url in routers.items()),
            ]
            worker = f"http://{(await world.wait_ready('tiny-stage-0'))[0].address}"
            runs.append(_undocumented("worker", folder, documents.worker(), worker, known))
            async with _keysmanager(folder) as (address, token), _forwarded(world) as control:
                held = {"KEYSTAGE_TEST_PASSWORD": token}
                runs.append(_undocumented("keysmanager", folder, documents.keysmanager(), address, held))
                runs.append(_undocumented("supervisor", folder, documents.control(), control, known))
                left_s = max(10.0, seconds - (time.monotonic() - begun_s))
                shares = sum(_share(run[0]) for run in runs)
                for run in runs:
                    run_s = _share(run[0]) * max(LEAST_S, left_s / shares)
                    outcome = await _one(folder, corpus, run, run_s, seed)
                    found.append(outcome)
            logs = "".join(path.read_text(errors="replace") for path in sorted(world.home.logs.glob("*.log")))
        if "Traceback (most recent call last)" in logs:
            where = logs.index("Traceback (most recent call last)")
            found.append(Outcome("http-logs", 0, 0, 0.0, (logs[where - 500 : where + 3000],), 0.0, 0))


def _share(name: str) -> int:
    """The gateway has most operations by far."""
    return 4 if name == "gateway" else 1


def _undocumented(
    name: str, folder: Path, document: documents.Document, url: str, env: dict[str, str]
) -> tuple[str, str, str, dict[str, str], tuple[str, ...]]:
    file = folder / f"{name}.json"
    file.write_text(json.dumps(document))
    config = SERVER_ERRORS + (BEARER if "security" in document else "")
    return name, config, str(file), env, ("--url", url, ONLY_SERVER_ERRORS)


async def _one(
    folder: Path,
    corpus: Path,
    run: tuple[str, str, str, dict[str, str], tuple[str, ...]],
    seconds: float,
    seed: int,
) -> Outcome:
    name, config, url, env, more = run
    begun_s = time.monotonic()
    try:
        code, said = await generated(
            folder, name, config, url, "--max-time", str(max(1, round(seconds))), *more,
            "--suppress-health-check",
            "all", seed=seed, run_s=seconds + END_S, **env,
        )  # fmt: skip
    except TimeoutError:
        code, said = 1, f"it hung: no end {END_S:g} s after its time"
    (corpus / f"{name}.txt").write_text(said)
    counted = _COUNT.search(said.replace(",", ""))
    count = int(counted[1]) if counted else 0
    faults = (said[-5000:],) if code else ()
    if not count and not faults:
        faults = (f"no request was made in {seconds:.0f} s: more --seconds are needed",)
    return Outcome(f"http-{name}", count, 0, time.monotonic() - begun_s, faults, 0.0, 0)


@contextlib.asynccontextmanager
async def _world(folder: Path) -> AsyncIterator[tuple[LocalWorld, dict[str, str]]]:
    tiny = folder / "tiny"
    tiny.mkdir()
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    looping = emulated("tiny", 2, execution="looping", context_length=64)
    write(tiny, type(looping)(**{**_fields(looping), "chat_template": template}))
    bundles = {"tiny": tiny}
    for name, shape in (("bert", "bert-tiny"), ("images", "wide_resnet-tiny")):
        bundles[name] = await asyncio.to_thread(
            split, f"random:{shape}", 1, "uniform", folder / name, name, "fp32"
        )
    bundles["drawn"] = await asyncio.to_thread(bundle_program, "program:diffusion", folder / "drawn", "drawn")
    env = {"KEYSTAGE_WAKE_S": "0.1", "KEYSTAGE_KEYSMANAGER_OFF": "1"}
    async with LocalWorld(
        folder / "state", gateway_port=0, controller=False, env=env, keysmanager=False
    ) as world:
        await world.deploy(function())
        for name, bundle in bundles.items():
            device = DEVICE if name == "tiny" else "cpu"
            await world.deploy(*deployments_for(bundle, load(bundle), device=device))
        for record in world.supervisor.loaded():
            await world.wait_ready(record.deployment.service, timeout_s=READY_S)
        urls = {}
        for name in bundles:
            urls[name] = f"http://{(await world.wait_ready(name))[0].address}"
        yield world, urls


def _fields(struct: object) -> dict[str, object]:
    return {name: getattr(struct, name) for name in struct.__struct_fields__}  # type: ignore[attr-defined]


@contextlib.asynccontextmanager
async def _keysmanager(folder: Path) -> AsyncIterator[tuple[str, str]]:
    """A daemon of its own, its address and token."""
    token, file = secrets.token_hex(16), folder / "token"
    file.touch(0o600)
    file.write_text(token)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        env = {
            **{key: value for key, value in os.environ.items() if not key.startswith("KEYSTAGE_")},
            "KEYSTAGE_KEYSMANAGER": str(folder / "keys.sock"),
            "KEYSTAGE_KEYSMANAGER_STATE": str(folder / "keys"),
            "KEYSTAGE_KEYSMANAGER_LISTEN": f"fd://{listening.fileno()}",
            "KEYSTAGE_KEYSMANAGER_TOKEN_FILE": str(file),
        }  # fmt: skip
        program = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "keystage.keysmanager.app", env=env, pass_fds=(listening.fileno(),),
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            yield f"http://127.0.0.1:{port}", token
            if program.returncode is not None:
                raise RuntimeError(f"the KeysManager ended with {program.returncode}")
        finally:
            if program.returncode is None:
                program.terminate()
                await program.wait()


@contextlib.asynccontextmanager
async def _forwarded(world: LocalWorld) -> AsyncIterator[str]:
    """The supervisor's UNIX socket, on a TCP port of this machine alone."""

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, forth = await asyncio.open_unix_connection(str(world.home.control))
        await asyncio.gather(copy(reader, forth), copy(back, writer))

    server = await asyncio.start_server(forward, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
