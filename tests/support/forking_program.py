"""Stands in for an image that runs a program per request, such as OpenFaaS's `functions/alpine`.

The local backend runs no images but web servers. `forking_program.py NAME ARGUMENTS..` is one: each
request starts the program of that name, its body is the program's input, its output the answer; method,
query and headers are environment variables `Http_*`, and two lines are logged, as a classic watchdog
does. `handler` is a redirector.
"""

import asyncio
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import uvicorn

NAME = sys.argv[1]
MOUNT = "/var/openfaas/secrets"
FOLDER = os.environ.get("secret_mount_path", "")  # noqa: SIM112  (OpenFaaS names it so)


def command() -> list[str]:
    """The real program with its arguments; secrets are where they are mounted, else where it is told."""
    arguments = sys.argv[2:]
    if FOLDER and not Path(MOUNT).exists():
        arguments = [argument.replace(MOUNT, FOLDER) for argument in arguments]
    return [shutil.which(NAME, path="/usr/bin:/bin") or NAME, *arguments]


async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """Serves one request."""
    if scope["type"] != "http":
        return
    if scope["path"].startswith("/_/"):
        await answer(send, 200, b"OK")
        return
    if NAME == "handler":
        await answer(send, 302, b"", [(b"location", os.environ["destination"].encode())])  # noqa: SIM112
        return
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    variables = {
        "Http_" + name.decode().title().replace("-", "_"): value.decode("latin-1")
        for name, value in scope["headers"]
    }
    variables |= {"Http_Method": scope["method"], "Http_Query": scope["query_string"].decode()}
    begun_s = time.monotonic()
    print(time.strftime("%Y/%m/%d %H:%M:%S"), "Forking fprocess.", flush=True)
    process = (
        await asyncio.to_thread(  # unlike uvloop's pipes it lets a program end without reading its input
            subprocess.run,
            command(),
            input=body,
            stdout=subprocess.PIPE,
            env={**os.environ, **variables},
            check=False,
        )
    )
    output = process.stdout
    took = f"{time.monotonic() - begun_s:.4f} seconds"
    print(time.strftime("%Y/%m/%d %H:%M:%S"), f"Wrote {len(output)} Bytes - Duration: {took}", flush=True)
    await answer(send, 500 if process.returncode else 200, output)


async def answer(send: Any, status: int, body: bytes, headers: Any = ()) -> None:
    """Sends a whole answer."""
    await send({"type": "http.response.start", "status": status, "headers": list(headers)})
    await send({"type": "http.response.body", "body": body})


if __name__ == "__main__":
    uvicorn.run(app, port=int(os.environ["PORT"]), lifespan="off", log_level="warning", access_log=False)
