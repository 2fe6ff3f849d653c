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
from keystage.bundle.errors import BundleError, SplitError
from keystage.bundle.store import load
from keystage.router.api_keys import KeysError
from keystage.router.client_protocol import Clients
from keystage.router.config import RouterConfig
from keystage.router.face import Face
from keystage.router.idempotency_build import keyed_requests
from keystage.router.idempotency_runs import KeyedRequests
from keystage.router.metrics import of_keys, of_traces, samples
from keystage.router.node import RouterNode
from keystage.router.text import load_text
from keystage.wire.crowd import places
from keystage.wire.descriptors import raise_descriptors
from keystage.wire.endpoints import EndpointError, listen, watch_lifeline
from keystage.wire.errors import WireError
from keystage.wire.events import EventLog
from keystage.wire.faults import faults_of
from keystage.wire.garbage import collect_young
from keystage.wire.metrics import Sample, Samples
from keystage.wire.opening import open_router
from keystage.wire.tracing import Tracer, open_tracer
from keystage.wire.upkeep import one_heap

log = logging.getLogger("keystage.router")

COLLECT_AFTER = (20_000, 20, 20)
"""Container objects made and not freed before the youngest are looked at: as in the gateway. With Python's
700, collections took a quarter of the CPU of face and core, and more with traces, whose records live on."""
BACKLOG = 2048
KEEP_ALIVE_S = 130
"""Longer than any client or proxy keeps an idle connection (90 s), so that none is cut in use."""


async def serve(config: RouterConfig, descriptors: int) -> None:
    """Runs one router until it is told to stop.

    Args:
        config: from the environment.
        descriptors: that the process may have open.

    Raises:
        BundleError: the bundle cannot be read.
        EndpointError: the HTTP address is taken.
        KeysError: the file of API keys cannot be used.
        WireError: a setting of the wire cannot be used.
        zmq.ZMQError: the inbox address is taken.
    """
    folder = await asyncio.to_thread(
        home.local_folder, config.bundle, home.folder_in(config.run, config.bundle)
    )
    pipeline = load(folder)
    text = load_text(pipeline, folder)
    keys = config.keys()
    listening = listen(config.http)
    node = RouterNode(
        pipeline,
        open_router(config.router),
        config.bounds(keys),
        EventLog(config.events, config.replica),
        config.max_body_bytes,
        config.waves,
        config.batch_settings_of(pipeline),
        config.slow_factor,
    )
    tracer = open_tracer(config.pipeline, {"service.instance.id": config.replica})
    node.watch(tracer, is_counting=config.metrics)
    node.start()
    keyed = keyed_requests(config, pipeline, node.incarnation)
    keyed.start()
    REGISTRY.register(Samples(lambda: _shown(node, keyed, tracer)))
    encoder = msgspec.json.Encoder()
    face = Face(
        node,
        pipeline,
        text,
        stats=lambda: encoder.encode(node.stats()),
        ready=lambda: True,
        healthy=lambda: True,
        tracer=tracer,
        keyed=keyed,
        keys=keys,
    )
    most = config.most_connections or places(descriptors)
    # What comes at once may be as much as what waits; one body has always room.
    body_bytes = max(config.queue_bytes, 2 * config.max_body_bytes)
    spare = max(4, (descriptors - most) // 4)  # half of what is kept is for everything else
    clients = Clients(most, min(spare, most), body_bytes)
    server = uvicorn.Server(
        uvicorn.Config(
            face,
            loop="uvloop",
            http=clients.protocol(),
            ws="none",
            lifespan="off",
            proxy_headers=False,
            log_level="warning",
            access_log=False,
            backlog=min(BACKLOG, spare),  # so many are accepted before the first of them is counted
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=5,
        )
    )
    _settle_memory()
    log.info("router of %s is up", pipeline.name)
    watching = asyncio.create_task(clients.watch())
    tidying = asyncio.create_task(collect_young())
    await server.serve(sockets=[listening])
    watching.cancel()
    tidying.cancel()
    await keyed.stop()
    await node.stop()
    if tracer is not None:
        await asyncio.to_thread(tracer.stop)


def _settle_memory() -> None:
    """Everything is loaded: exempts it from garbage collection, and makes that rarer."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)


def _shown(node: RouterNode, keyed: KeyedRequests, tracer: Tracer | None) -> list[Sample]:
    stats = node.stats()
    gathered = [*samples(stats, node.served), *of_keys(stats.pipeline, keyed.stats())]
    return gathered if tracer is None else gathered + of_traces(tracer.sent, tracer.dropped)


def main() -> int:
    """Runs one router; returns the exit code."""
    one_heap()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        config = RouterConfig()  # type: ignore[call-arg]  # filled from the environment
        watch_lifeline(config.lifeline_fd)
        # A connection each, while they wait: a burst is more than a soft limit of 1,024.
        asyncio.run(serve(config, raise_descriptors()))
    except ValidationError as error:
        for fault in faults_of(error):
            print(f"keystage router: {fault}", file=sys.stderr)  # noqa: T201
        return 2
    except (BundleError, SplitError, EndpointError, KeysError, WireError) as error:
        print(f"keystage router: {error}", file=sys.stderr)  # noqa: T201
        return 2
    except zmq.ZMQError as error:
        print(f"keystage router: cannot bind {config.router}: {error}", file=sys.stderr)  # noqa: T201
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
