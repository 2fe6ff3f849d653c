"""Counters of the gateway, under the names an OpenFaaS gateway has, for dashboards made for one.

Written by `gateway.proxy` per invocation, read by `GET /metrics`. Unknown functions are not
counted: a stranger must not be able to make time series.
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from keystage.gateway.backend import FunctionState
from keystage.gateway.names import NAMESPACE


class Metrics:
    """One registry per gateway, so that two can live in one process."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._total = Counter(
            "gateway_function_invocation",
            "Function invocations by status code",
            ["function_name", "code"],
            registry=self._registry,
        )
        self._started = Counter(
            "gateway_function_invocation_started",
            "Function invocations begun",
            ["function_name"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            "gateway_functions_seconds",
            "Seconds from request to end of answer",
            ["function_name", "code"],
            registry=self._registry,
        )
        self._replicas = Gauge(
            "gateway_service_count", "Replicas wanted", ["function_name"], registry=self._registry
        )
        self._series: dict[tuple[str, int], tuple[Counter, Histogram]] = {}
        self._begun: dict[str, Counter] = {}
        self._count: dict[str, int] = {}

    def invocations(self, function: str) -> int:
        """Invocations of a function since the gateway started."""
        return self._count.get(function, 0)

    def begin(self, function: str) -> None:
        """An invocation begins."""
        self._count[function] = self._count.get(function, 0) + 1
        counter = self._begun.get(function)
        if counter is None:
            counter = self._begun[function] = self._started.labels(f"{function}.{NAMESPACE}")
        counter.inc()

    def end(self, function: str, status: int, seconds: float) -> None:
        """An invocation ended; `status` 499 means that the client went away."""
        series = self._series.get((function, status))
        if series is None:
            labels = (f"{function}.{NAMESPACE}", str(status))
            series = (self._total.labels(*labels), self._seconds.labels(*labels))
            self._series[function, status] = series
        series[0].inc()
        series[1].observe(seconds)

    def render(self, functions: Sequence[FunctionState]) -> bytes:
        """Prometheus text."""
        self._replicas.clear()
        for state in functions:
            self._replicas.labels(f"{state.deployment.service}.{NAMESPACE}").set(state.replicas)
        return generate_latest(self._registry)
