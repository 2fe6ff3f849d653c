"""Counters of the gateway, under the names an OpenFaaS gateway has, for dashboards made for one.

Written by `gateway.proxy`, `gateway.websocket` and `gateway.queue_attempt` per invocation, read by
`GET /metrics`. Unknown functions are not counted: a stranger must not be able to make time series.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from keystage.gateway.backend import FunctionState
from keystage.gateway.names import NAMESPACE
from keystage.wire.metric_spec import ANSWER_BOUNDS_S

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPEN_TYPE = "application/openmetrics-text"
_END = b"# EOF\n"
CLIENT_GONE = 499
"""Counted as the status where nobody was there any more to be answered."""
GAVE_UP = "503"
"""Counted as the status of those that waited for a replica in vain."""
_STARTED = "gateway_function_invocation_started"
MOST_GONE = 256
"""Functions whose counters outlive them: long enough for whoever looks why one is gone."""


class Metrics:
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
            buckets=ANSWER_BOUNDS_S,
        )
        self._exported: list[Collector] = []
        self._series: dict[tuple[str, int], tuple[Counter, Histogram]] = {}
        self._count: dict[str, int] = {}
        self._in_flight: dict[str, int] = {}
        self._begun: set[str] = set()
        self.touched: set[str] = set()
        self.stir: Callable[[], object] = lambda: None

    def export(self, collector: Collector) -> None:
        """Adds another part's metrics to what is exported."""
        self._exported.append(collector)

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

    def end(self, function: str, status: int, seconds: float, trace_id: str = "") -> None:
        """An invocation ended.

        Args:
            function: whose.
            status: `CLIENT_GONE` means that the client went away.
            seconds: it took.
            trace_id: of its trace, empty: it is not traced; told beside the time it took.
        """
        series = self._series.get((function, status))
        if series is None:
            labels = (_labelled(function), str(status))
            series = (self._total.labels(*labels), self._seconds.labels(*labels))
            self._series[function, status] = series
        series[0].inc()
        series[1].observe(seconds, {"trace_id": trace_id} if trace_id else None)
        left = self._in_flight.pop(function, 0) - 1
        if left > 0:
            self._in_flight[function] = left
        self._touch(function)

    def _forget_gone(self, present: set[str]) -> None:
        """Functions come and go: of those that are gone the newest few are kept, so series stay bounded."""
        gone = [name for name in self._count if name not in present and name not in self._in_flight]
        forgotten = set(gone[:-MOST_GONE])
        for name in forgotten:
            del self._count[name]
        for function, status in [key for key in self._series if key[0] in forgotten]:
            labels = (_labelled(function), str(status))
            self._total.remove(*labels)
            self._seconds.remove(*labels)
            del self._series[function, status]
        for name in [name for name in self._begun - present if name not in self._count]:
            self._total.remove(_labelled(name), GAVE_UP)
            self._begun.remove(name)

    def _touch(self, function: str) -> None:
        if function not in self.touched:
            self.touched.add(function)
            self.stir()

    def look(self, functions: Sequence[FunctionState]) -> Shown:
        """What is to be shown: all that only the gateway's event loop may read, quickly.

        Args:
            functions: that there are.
        """
        present = {state.deployment.service for state in functions}
        self._forget_gone(present)
        # A rate does not see a series' first value: what people are called for begins at zero.
        for name in present - self._begun:
            self._total.labels(_labelled(name), GAVE_UP)
        self._begun |= present
        replicas = GaugeMetricFamily("gateway_service_count", "Replicas wanted", labels=["function_name"])
        for state in functions:
            replicas.add_metric([_labelled(state.deployment.service)], state.replicas)
        others = [metric for collector in self._exported for metric in collector.collect()]
        return Shown(self._registry, (replicas, *others), tuple(self._count.items()))

    def render(self, functions: Sequence[FunctionState], accept: str = "") -> tuple[bytes, str]:
        """`look` and `written` at once."""
        return written(self.look(functions), accept)


@dataclasses.dataclass(frozen=True, slots=True)
class Shown(Collector):
    """What `Metrics.look` saw. Of the registry the newest values are shown: its locks are its own.

    Attributes:
        registry: counters by function and status.
        others: everything else.
        begun: invocations by function.
    """

    registry: CollectorRegistry
    others: tuple[Metric, ...]
    begun: tuple[tuple[str, int], ...]

    def collect(self) -> Iterator[Metric]:
        """What is exported, without the creation times that this client adds to a counter."""
        for metric in self.registry.collect():
            metric.samples = [s for s in metric.samples if not s.name.endswith("_created")]
            yield metric
        yield from self.others


def written(shown: Shown, accept: str = "") -> tuple[bytes, str]:
    """Prometheus text and its content type: OpenMetrics, with exemplars, for those who ask for it.

    Of ten thousand functions it takes seconds: not on an event loop that has requests to serve.

    Args:
        shown: what there is to show.
        accept: the header of who asks.
    """
    # OpenFaaS' name of this counter does not end in `_total`, which the client library insists on.
    # Function names need no escaping: `gateway.names.check_name`.
    encode, kind_of_text = choose_encoder(accept)
    is_open = kind_of_text.startswith(OPEN_TYPE)
    kind = "unknown" if is_open else "counter"  # its name is none of a counter there
    lines = [f"# HELP {_STARTED} Function invocations begun", f"# TYPE {_STARTED} {kind}"]
    for function, count in shown.begun:
        lines.append(f'{_STARTED}{{function_name="{_labelled(function)}"}} {count}.0')
    more = "\n".join(lines).encode() + b"\n"
    if is_open:
        return encode(shown).removesuffix(_END) + more + _END, kind_of_text
    return encode(shown) + more, CONTENT_TYPE


def _labelled(function: str) -> str:
    """A function as its label names it."""
    return f"{function}.{NAMESPACE}"
