"""Counters of the gateway, under the names an OpenFaaS gateway has, for dashboards made for one.

Written by `gateway.proxy`, `gateway.websocket` and `gateway.queue_attempt` per invocation, read by
`GET /metrics`. Unknown functions are not counted: a stranger must not be able to make time series.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from keystage.gateway.backend import FunctionState
from keystage.gateway.names import NAMESPACE

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
CLIENT_GONE = 499
"""Counted as the status where nobody was there any more to be answered."""
_STARTED = "gateway_function_invocation_started"


class Metrics(Collector):
    """One registry per gateway, so that two can live in one process.

    Attributes:
        touched: functions of which an invocation began or ended since somebody took them out.
        stir: called whenever one is added.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._total = Counter(
            "gateway_function_invocation",
            "Function invocations by status code",
            ["function_name", "code"],
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
        self._count: dict[str, int] = {}
        self._in_flight: dict[str, int] = {}
        self.touched: set[str] = set()
        self.stir: Callable[[], object] = lambda: None

    def export(self, collector: Collector) -> None:
        """Adds another part's metrics to what is exported."""
        self._registry.register(collector)

    def in_flight(self, function: str) -> int:
        """Invocations of a function that have begun and not ended, waiting ones included."""
        return self._in_flight.get(function, 0)

    def invocations(self, function: str) -> int:
        """Invocations of a function since the gateway started."""
        return self._count.get(function, 0)

    def begin(self, function: str) -> None:
        """An invocation begins."""
        self._count[function] = self._count.get(function, 0) + 1
        self._in_flight[function] = self._in_flight.get(function, 0) + 1
        self._touch(function)

    def end(self, function: str, status: int, seconds: float) -> None:
        """An invocation ended; `CLIENT_GONE` as `status` means that the client went away."""
        series = self._series.get((function, status))
        if series is None:
            labels = (f"{function}.{NAMESPACE}", str(status))
            series = (self._total.labels(*labels), self._seconds.labels(*labels))
            self._series[function, status] = series
        series[0].inc()
        series[1].observe(seconds)
        left = self._in_flight.pop(function, 0) - 1
        if left > 0:
            self._in_flight[function] = left
        self._touch(function)

    def _touch(self, function: str) -> None:
        if function not in self.touched:
            self.touched.add(function)
            self.stir()

    def collect(self) -> Iterator[Metric]:
        """What is exported, without the creation times that this client adds to a counter."""
        for metric in self._registry.collect():
            metric.samples = [s for s in metric.samples if not s.name.endswith("_created")]
            yield metric

    def render(self, functions: Sequence[FunctionState]) -> bytes:
        """Prometheus text, format 0.0.4."""
        self._replicas.clear()
        for state in functions:
            self._replicas.labels(f"{state.deployment.service}.{NAMESPACE}").set(state.replicas)
        # OpenFaaS' name of this counter does not end in `_total`, which the client library insists on.
        # Function names need no escaping: `gateway.names.check_name`.
        lines = [f"# HELP {_STARTED} Function invocations begun", f"# TYPE {_STARTED} counter"]
        for function, count in self._count.items():
            lines.append(f'{_STARTED}{{function_name="{function}.{NAMESPACE}"}} {count}.0')
        return generate_latest(self) + "\n".join(lines).encode() + b"\n"
