"""`keystage load-agent`: sends parts of others' plans. Reads flags; `keystage.loadgen` does the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from keystage.cli.errors import fail


def load_agent(
    secret_file: Annotated[Path, typer.Option(help="file with the secret that `keystage load` must know")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 for a free one")] = 8090,
    bind: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
) -> None:
    """Send parts of plans for `keystage load --agent` on other machines."""
    import asyncio
    import contextlib

    from keystage.loadgen.sending.agent import serve

    try:
        secret = secret_file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        fail(f"--secret-file {secret_file} cannot be read: {error}", 2)

    async def run() -> None:
        ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(serve(bind, port, secret, ready))
        waiting: set[asyncio.Future[Any]] = {serving, ready}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            typer.echo(f"load agent listens on {bind}:{ready.result()}")
        await serving

    try:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(run())
    except ValueError as error:
        fail(f"--secret-file {secret_file}: {error}", 2)
    except OSError as error:
        fail(f"cannot listen on {bind}:{port}: {error.strerror or error}", 1)
