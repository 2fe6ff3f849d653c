"""A router function's process: configuration, mailbox, core, HTTP face on one event loop.

Exit codes: 0 stopped by signal, 2 bad configuration, bundle or address, 1 a bug.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import sys

import msgspec
import uvicorn
import zmq
from prometheus_client import REGISTRY
from pydantic import ValidationError

from keystage.bundle import home
from keystage.bundle.errors import BundleError
from keystage.bundle.store import load
from keystage.router.config import RouterConfig
from keystage.router.face import Face
from keystage.router.metrics import of_traces, samples
from keystage.router.node import RouterNode
from keystage.router.text import load_text
from keystage.wire.descriptors import raise_descriptors
from keystage.wire.endpoints import EndpointError, listen, watch_lifeline
from keystage.wire.errors import WireError
from keystage.wire.events import EventLog
from keystage.wire.http_protocol import PassingProtocol
from keystage.wire.metrics import Sample, Samples
from keystage.wire.opening import open_router
from keystage.wire.tracing import Tracer, open_tracer

log = logging.getLogger("keystage.router")

COLLECT_AFTER = (20_000, 20, 20)
"""Container objects made and not freed before the youngest are looked at: as in the gateway. With Python's
700, collections took a quarter of the CPU of face and core, and more with traces, whose records live on."""
KEEP_ALIVE_S = 130
"""Longer than any client or proxy keeps an idle connection (90 s), so that none is cut in use."""


async def serve(config: RouterConfig) -> None:
    """Runs one router until it is told to stop.

    Raises:
        BundleError: the bundle cannot be read.
        EndpointError: the HTTP address is taken.
        WireError: a setting of the wire cannot be used.
        zmq.ZMQError: the inbox address is taken.
    """
    folder = await asyncio.to_thread(
        home.local_folder, config.bundle, home.folder_in(config.run, config.bundle)
    )
    pipeline = load(folder)
    text = load_text(pipeline, folder)
    listening = listen(config.http)
    node = RouterNode(
        pipeline,
        open_router(config.router),
        config.bounds(),
        EventLog(config.events, config.replica),
        config.max_body_bytes,
        config.waves,
        config.batch_settings_of(pipeline),
    )
    tracer = open_tracer(config.pipeline, {"service.instance.id": config.replica})
    node.watch(tracer, is_counting=config.metrics)
    node.start()
    REGISTRY.register(Samples(lambda: _shown(node, tracer)))
    encoder = msgspec.json.Encoder()
    face = Face(
        node,
        pipeline,
        text,
        stats=lambda: encoder.encode(node.stats()),
        ready=lambda: True,
        healthy=lambda: True,
        tracer=tracer,
    )
    server = uvicorn.Server(
        uvicorn.Config(
            face,
            loop="uvloop",
            http=PassingProtocol,
            ws="none",
            lifespan="off",
            proxy_headers=False,
            log_level="warning",
            access_log=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=5,
        )
    )
    _settle_memory()
    log.info("router of %s is up", pipeline.name)
    await server.serve(sockets=[listening])
    await node.stop()
    if tracer is not None:
        await asyncio.to_thread(tracer.stop)


def _settle_memory() -> None:
    """Everything is loaded: exempts it from garbage collection, and makes that rarer."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)


def _shown(node: RouterNode, tracer: Tracer | None) -> list[Sample]:
    gathered = samples(node.stats(), node.served)
    return gathered if tracer is None else gathered + of_traces(tracer.sent, tracer.dropped)


def main() -> int:
    """Runs one router; returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        config = RouterConfig()  # type: ignore[call-arg]  # filled from the environment
        watch_lifeline(config.lifeline_fd)
        raise_descriptors()  # a connection each, while they wait: a burst is more than a soft limit of 1,024
        asyncio.run(serve(config))
    except (ValidationError, BundleError, EndpointError, WireError) as error:
        print(f"keystage router: {error}", file=sys.stderr)  # noqa: T201
        return 2
    except zmq.ZMQError as error:
        print(f"keystage router: cannot bind {config.router}: {error}", file=sys.stderr)  # noqa: T201
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
