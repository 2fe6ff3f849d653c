"""Every metric Keystage exposes, in one place: name, kind, labels, meaning.

Names are `keystage_<noun>_<unit>`; labels are pipeline, stage, replica, node and reason only. Parts
gather `Sample`s from their own counters and call `expose`; nothing else defines a metric.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


@dataclasses.dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric.

    Attributes:
        kind: `counter` or `gauge`.
        labels: label names in order.
        meaning: what it says, with its unit.
    """

    kind: str
    labels: tuple[str, ...]
    meaning: str


METRICS: dict[str, MetricSpec] = {
    "keystage_worker_sessions": MetricSpec(
        "gauge", ("pipeline", "replica"), "Sessions or items held by the worker"
    ),
    "keystage_worker_kv_tokens": MetricSpec(
        "gauge", ("pipeline", "replica"), "KV token positions reserved at the worker"
    ),
    "keystage_stage_busy_seconds": MetricSpec(
        "counter", ("pipeline", "stage", "replica"), "Seconds of compute"
    ),
    "keystage_stage_batches": MetricSpec(
        "counter", ("pipeline", "stage", "replica"), "Waves or batches computed"
    ),
    "keystage_stage_rows": MetricSpec(
        "counter", ("pipeline", "stage", "replica"), "Sessions stepped or items computed"
    ),
    "keystage_requests": MetricSpec("counter", ("pipeline",), "Requests accepted by the router"),
    "keystage_requests_completed": MetricSpec("counter", ("pipeline",), "Requests answered completely"),
    "keystage_requests_refused": MetricSpec("counter", ("pipeline", "reason"), "Requests refused, by reason"),
    "keystage_replayed_tokens": MetricSpec(
        "counter", ("pipeline",), "Tokens computed again after a death, a drain or a move"
    ),
    "keystage_session_moves": MetricSpec("counter", ("pipeline",), "Sessions moved to another path"),
    "keystage_stage_arrivals": MetricSpec(
        "counter", ("pipeline", "stage"), "Items that arrived at the stage's queue"
    ),
    "keystage_stage_queue_items": MetricSpec("gauge", ("pipeline", "stage"), "Items waiting for the stage"),
    "keystage_stage_in_flight_items": MetricSpec("gauge", ("pipeline", "stage"), "Items being served"),
    "keystage_stage_wait_seconds": MetricSpec(
        "counter", ("pipeline", "stage"), "Total waiting time of items that left the queue"
    ),
    "keystage_stage_service_seconds": MetricSpec(
        "counter", ("pipeline", "stage"), "Total service time of served items"
    ),
    "keystage_stage_ready_replicas": MetricSpec("gauge", ("pipeline", "stage"), "Replicas that are ready"),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """One value of a metric."""

    name: str
    labels: Mapping[str, str]
    value: float


class Samples(Collector):
    """A Prometheus collector over samples that are gathered anew at every scrape.

    Args:
        gather: returns the present samples; names and labels must be in `METRICS`.
    """

    def __init__(self, gather: Callable[[], Iterable[Sample]]) -> None:
        self._gather = gather

    def collect(self) -> Iterator[Metric]:
        """One family per metric."""
        families: dict[str, Metric] = {}
        for sample in self._gather():
            spec = METRICS[sample.name]
            family = families.get(sample.name)
            if family is None:
                kind = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
                family = families[sample.name] = kind(sample.name, spec.meaning, labels=spec.labels)
            assert isinstance(family, CounterMetricFamily | GaugeMetricFamily)
            family.add_metric([sample.labels[label] for label in spec.labels], sample.value)
        yield from families.values()


def expose(samples: Iterable[Sample]) -> bytes:
    """Prometheus text of the given samples.

    Raises:
        KeyError: a name or label that `METRICS` does not know.
    """
    registry = CollectorRegistry(auto_describe=False)
    gathered = list(samples)
    registry.register(Samples(lambda: gathered))
    return generate_latest(registry)
