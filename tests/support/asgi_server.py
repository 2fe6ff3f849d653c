"""An ASGI application behind a real HTTP server in a thread of the test."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import uvicorn

WAIT_S = 30.0


@contextlib.contextmanager
def serving(application: Any) -> Iterator[str]:
    """Serves on a free port of 127.0.0.1 and yields the address; ends the server with the context."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        config = uvicorn.Config(
            application, lifespan="off", log_level="critical", timeout_graceful_shutdown=1
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(timeout=WAIT_S)
    assert not thread.is_alive()
