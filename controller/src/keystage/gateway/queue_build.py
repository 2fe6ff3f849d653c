"""Puts the parts of asynchronous calls together as the settings say. Called by `gateway.app`."""

from __future__ import annotations

from keystage.gateway.config import GatewaySettings
from keystage.gateway.metrics import Metrics
from keystage.gateway.queue import Bounds, CallQueue
from keystage.gateway.queue_address import CallbackRules
from keystage.gateway.queue_attempt import Attempts
from keystage.gateway.queue_backoff import Backoff
from keystage.gateway.queue_callback import Callbacks
from keystage.gateway.queue_calls import AsyncCalls
from keystage.gateway.queue_memory import MemoryQueue
from keystage.gateway.queue_runner import RetryRules, Runner
from keystage.gateway.queue_slots import Slots
from keystage.gateway.replicas import Replicas
from keystage.wire.metrics import Samples

RETRY_CAP_S = 60.0
CALLBACK_ATTEMPTS = 5


def build_async_calls(
    settings: GatewaySettings, replicas: Replicas, metrics: Metrics, timeout_s: float
) -> AsyncCalls:
    """The ASGI face with queue and worker behind it; its metrics are exported with the others.

    Args:
        settings: the gateway's.
        replicas: where calls are run.
        metrics: counts invocations.
        timeout_s: longest time of one attempt.
    """
    bounds = Bounds(settings.async_entries, settings.async_bytes)
    queue: CallQueue = MemoryQueue(bounds)
    if settings.redis is not None:
        # Only who needs Redis pays for the import of its client.
        from keystage.gateway.queue_redis import RedisQueue

        queue = RedisQueue(settings.redis.get_secret_value(), bounds, settings.async_lease_s)
    rules = CallbackRules(settings.callback_hosts)
    runner = Runner(
        queue,
        Attempts(replicas, metrics, timeout_s=timeout_s, answer_bytes=settings.async_answer_bytes),
        Callbacks(rules, Backoff(CALLBACK_ATTEMPTS, settings.async_retry_s, RETRY_CAP_S)),
        Slots(settings.async_per_function, settings.async_in_flight),
        RetryRules(
            Backoff(settings.async_attempts, settings.async_retry_s, RETRY_CAP_S), settings.async_retry_codes
        ),
        settings.async_drain_s,
    )
    calls = AsyncCalls(queue, runner, replicas, rules, settings.async_body_bytes)
    metrics.export(Samples(calls.samples))
    return calls
