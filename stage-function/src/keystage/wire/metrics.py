"""Every metric Keystage exposes, in one place: name, kind, labels, meaning.

Names are `keystage_<noun>_<unit>`; labels are pipeline, stage, replica, node and reason, besides the way that
starts and loads took (phase, via, source), a GPU's own (gpu), the tenant behind an API key, and for functions
and asynchronous calls the function_name of OpenFaaS. Parts gather `Sample`s from their own counters and call
`expose`; nothing else defines a metric.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar as PrometheusExemplar

from keystage.wire.metric_spec import (
    ANSWER_BOUNDS_S,
    BATCH_BOUNDS_ITEMS,
    START_BOUNDS_S,
    MetricSpec,
)

METRICS: dict[str, MetricSpec] = {
    "keystage_worker_sessions": MetricSpec(
        "gauge", ("pipeline", "replica"), "Sessions or items held by the worker"
    ),
    "keystage_worker_kv_tokens": MetricSpec(
        "gauge", ("pipeline", "replica"), "KV token positions in the blocks that are taken at the worker"
    ),
    "keystage_worker_corrupt_tensors": MetricSpec(
        "counter",
        ("pipeline", "replica"),
        "Tensors that came otherwise than they were sent (KEYSTAGE_WIRE_CHECKSUM); computed again",
    ),
    "keystage_preemptions": MetricSpec(
        "counter",
        ("pipeline", "replica"),
        "Sessions that the owner of their path took the KV blocks from; they wait and are replayed",
    ),
    "keystage_stage_kv_blocks": MetricSpec(
        "gauge",
        ("pipeline", "stage", "replica"),
        "KV blocks of 16 positions; the stages of one worker share them",
    ),
    "keystage_stage_kv_blocks_used": MetricSpec(
        "gauge", ("pipeline", "stage", "replica"), "KV blocks that sessions hold"
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
    "keystage_stage_wave_wait_seconds": MetricSpec(
        "counter",
        ("pipeline", "stage", "replica"),
        "Seconds from a wave's arrival to its turn: its activation's way, and waves before it (looping)",
    ),
    "keystage_requests": MetricSpec("counter", ("pipeline",), "Requests accepted by the router"),
    "keystage_requests_completed": MetricSpec("counter", ("pipeline",), "Requests answered completely"),
    "keystage_requests_refused": MetricSpec("counter", ("pipeline", "reason"), "Requests refused, by reason"),
    "keystage_tenant_requests": MetricSpec(
        "counter", ("pipeline", "tenant"), "Requests whose turn came, by the tenant behind their API key"
    ),
    "keystage_tenant_work": MetricSpec(
        "counter",
        ("pipeline", "tenant"),
        "Their work: tokens of prompt and answer at most (looping), or requests",
    ),
    "keystage_tenant_refused": MetricSpec(
        "counter",
        ("pipeline", "tenant"),
        "Requests refused when they came, for what waits or their deadline",
    ),
    "keystage_tenant_waiting_requests": MetricSpec(
        "gauge", ("pipeline", "tenant"), "Requests that wait; single-pass and programs: those under way, too"
    ),
    "keystage_replayed_tokens": MetricSpec(
        "counter", ("pipeline",), "Tokens computed again after a death, a drain or a move"
    ),
    "keystage_session_moves": MetricSpec("counter", ("pipeline",), "Sessions moved to another path"),
    "keystage_requests_due": MetricSpec(
        "counter",
        ("pipeline",),
        "Requests with an objective that ended: their own deadline, `KEYSTAGE_SLO`, or looping TTFT 2 s",
    ),
    "keystage_requests_in_time": MetricSpec(
        "counter", ("pipeline",), "Those of them answered within it: their rate is the goodput"
    ),
    "keystage_request_seconds": MetricSpec(
        "histogram", ("pipeline",), "Seconds from admission to the end of the answer", ANSWER_BOUNDS_S
    ),
    "keystage_first_token_seconds": MetricSpec(
        "histogram", ("pipeline",), "Seconds from admission to the first token", ANSWER_BOUNDS_S
    ),
    "keystage_late_copies": MetricSpec(
        "counter",
        ("pipeline",),
        "Moves that waited 5 s in vain for a copy of KV state, and went on by replay",
    ),
    "keystage_overdue_drains": MetricSpec(
        "counter", ("pipeline",), "Replicas whose drain time was over while they still held something"
    ),
    "keystage_replica_rests": MetricSpec(
        "counter",
        ("pipeline",),
        "Times that a worker was given nothing for a while, slow beside others (KEYSTAGE_SLOW_FACTOR)",
    ),
    "keystage_replica_is_resting": MetricSpec(
        "gauge", ("pipeline", "replica"), "1 while the router gives it nothing because it is slow"
    ),
    "keystage_requests_set_apart": MetricSpec(
        "counter", ("pipeline",), "Requests that ran apart from others, because a worker had died with them"
    ),
    "keystage_requests_convicted": MetricSpec(
        "counter", ("pipeline",), "Requests that were failed because workers died of them"
    ),
    "keystage_keyed_requests": MetricSpec(
        "counter",
        ("pipeline", "found"),
        "Requests with an Idempotency-Key, by what was there: new, running, kept, resumed, reused (refused)",
    ),
    "keystage_keyed_records": MetricSpec("gauge", ("pipeline",), "Requests with a key that are known"),
    "keystage_keyed_bytes": MetricSpec("gauge", ("pipeline",), "Bytes of kept answers to such requests"),
    "keystage_journal_is_away": MetricSpec(
        "gauge", ("pipeline",), "1 while the journal's Redis cannot be asked; they are in memory alone then"
    ),
    "keystage_journal_losses": MetricSpec("counter", ("pipeline",), "Times that this Redis was lost"),
    "keystage_journal_round_trips": MetricSpec(
        "counter", ("pipeline",), "Writes to the journal, each with all that was new at its time"
    ),
    "keystage_journal_tokens": MetricSpec("counter", ("pipeline",), "Tokens in these writes"),
    "keystage_journal_taken_over": MetricSpec(
        "counter", ("pipeline",), "Requests of other routers that this one went on with"
    ),
    "keystage_journal_fenced": MetricSpec(
        "counter", ("pipeline",), "Requests of this router that another one went on with"
    ),
    "keystage_spans_sent": MetricSpec("counter", (), "Spans that the collector of traces took"),
    "keystage_spans_dropped": MetricSpec(
        "counter", (), "Spans that the collector did not take, or for which there was no room"
    ),
    "keystage_stage_arrivals": MetricSpec(
        "counter", ("pipeline", "stage"), "Items that arrived at the stage's queue"
    ),
    "keystage_stage_arrival_gap_seconds": MetricSpec(
        "counter", ("pipeline", "stage"), "Sum of the gaps between arrivals"
    ),
    "keystage_stage_arrival_gap_seconds_squared": MetricSpec(
        "counter",
        ("pipeline", "stage"),
        "Sum of the squared gaps: with gaps and arrivals the CV over any window",
    ),
    "keystage_stage_queue_items": MetricSpec("gauge", ("pipeline", "stage"), "Items waiting for the stage"),
    "keystage_stage_in_flight_items": MetricSpec("gauge", ("pipeline", "stage"), "Items being served"),
    "keystage_stage_waits": MetricSpec("counter", ("pipeline", "stage"), "Items that left the queue"),
    "keystage_stage_wait_seconds": MetricSpec(
        "counter", ("pipeline", "stage"), "Total waiting time of items that left the queue"
    ),
    "keystage_stage_services": MetricSpec("counter", ("pipeline", "stage"), "Items served"),
    "keystage_stage_service_seconds": MetricSpec(
        "counter", ("pipeline", "stage"), "Total service time of served items"
    ),
    "keystage_stage_sojourn_seconds": MetricSpec(
        "counter", ("pipeline", "stage"), "Total wait and service of served items"
    ),
    "keystage_stage_handoff_seconds": MetricSpec(
        "counter",
        ("pipeline", "stage"),
        "Total time from sent to a worker to answered that was not compute (not in looping pipelines)",
    ),
    "keystage_stage_ready_replicas": MetricSpec("gauge", ("pipeline", "stage"), "Replicas that are ready"),
    "keystage_stage_due_items": MetricSpec(
        "counter", ("pipeline", "stage"), "Items with a stage deadline that left the stage or were given up"
    ),
    "keystage_stage_late_items": MetricSpec(
        "counter", ("pipeline", "stage"), "Items that left the stage after its deadline"
    ),
    "keystage_stage_dropped_items": MetricSpec(
        "counter", ("pipeline", "stage"), "Items refused because they could not meet the stage's deadline"
    ),
    "keystage_stage_batch_items": MetricSpec(
        "histogram", ("pipeline", "stage"), "Items of a batch (not in looping pipelines)", BATCH_BOUNDS_ITEMS
    ),
    "keystage_replica_served_seconds": MetricSpec(
        "counter", ("pipeline", "replica"), "Seconds since the replica became ready at this router"
    ),
    "keystage_replica_idle_seconds": MetricSpec(
        "counter",
        ("pipeline", "replica"),
        "Seconds of these in which the router had given it nothing (not in looping pipelines)",
    ),
    "keystage_start_seconds": MetricSpec(
        "histogram",
        ("node", "pipeline", "via", "phase"),
        "Seconds from replica wanted to a phase of its start",
        START_BOUNDS_S,
    ),
    "keystage_starts": MetricSpec("counter", ("node", "via"), "Replicas started, by how"),
    "keystage_parameter_gives": MetricSpec(
        "counter",
        ("node", "source"),
        "Stages' parameters given to replicas, by where they were: memory and gpu are hits of the cache",
    ),
    "keystage_start_refusals": MetricSpec("counter", ("node", "reason"), "Requests refused, by HTTP status"),
    "keystage_loads": MetricSpec("counter", ("node", "source"), "Parameters loaded, by where they came from"),
    "keystage_load_bytes": MetricSpec("counter", ("node", "source"), "Bytes of parameters loaded"),
    "keystage_load_seconds": MetricSpec("counter", ("node", "source"), "Seconds spent loading parameters"),
    "keystage_load_failures": MetricSpec("counter", ("node",), "Loads that failed with every source"),
    "keystage_holder_evictions": MetricSpec("counter", ("node",), "Holders ended by the daemon"),
    "keystage_holder_deaths": MetricSpec("counter", ("node",), "Holders that ended unasked"),
    "keystage_holders": MetricSpec("gauge", ("node",), "Stages held in host memory and ready to fork"),
    "keystage_holder_bytes": MetricSpec(
        "gauge", ("node", "pipeline", "stage"), "Host memory of a holder's segments"
    ),
    "keystage_holder_claims": MetricSpec(
        "gauge", ("node", "pipeline", "stage"), "Consumers that map a holder's segments"
    ),
    "keystage_memory_limit_bytes": MetricSpec("gauge", ("node",), "Effective memory limit of the node"),
    "keystage_memory_used_bytes": MetricSpec(
        "gauge", ("node",), "Anonymous, shared and unevictable memory; page cache does not count"
    ),
    "keystage_memory_budget_bytes": MetricSpec("gauge", ("node",), "Memory that may be used before eviction"),
    "keystage_segment_bytes": MetricSpec("gauge", ("node",), "Memory of all segments"),
    "keystage_fork_server_restarts": MetricSpec(
        "counter", ("node",), "Times the fork server was started again"
    ),
    "keystage_standbys": MetricSpec("gauge", ("node",), "Standby workers"),
    "keystage_view_age_seconds": MetricSpec(
        "gauge", (), "Seconds since gateway or controller last knew what functions and replicas there are"
    ),
    "keystage_leader": MetricSpec("gauge", (), "1 where this controller decides, 0 where it stands by"),
    "keystage_function_desired_replicas": MetricSpec(
        "gauge", ("function_name",), "Replicas that the controller decided on"
    ),
    "keystage_function_ready_replicas": MetricSpec("gauge", ("function_name",), "Replicas that serve"),
    "keystage_stage_desired_replicas": MetricSpec(
        "gauge", ("pipeline", "stage"), "Replicas that the controller decided on"
    ),
    "keystage_stage_starting_replicas": MetricSpec("gauge", ("pipeline", "stage"), "Replicas on their way"),
    "keystage_stage_is_key": MetricSpec(
        "gauge", ("pipeline", "stage"), "1 for the stage that is first in the order of key stages"
    ),
    "keystage_stage_arrival_rps": MetricSpec(
        "gauge", ("pipeline", "stage"), "Arrivals a second as the controller estimates them"
    ),
    "keystage_stage_arrival_cv": MetricSpec(
        "gauge", ("pipeline", "stage"), "Coefficient of variation of the gaps between arrivals, estimated"
    ),
    "keystage_stage_utilisation_ratio": MetricSpec(
        "gauge",
        ("pipeline", "stage"),
        "Arrival rate over capacity of the ready replicas; looping: busy part of their time",
    ),
    "keystage_pipeline_held": MetricSpec(
        "gauge", ("pipeline",), "1 while the controller holds its numbers for want of statistics"
    ),
    "keystage_decisions": MetricSpec(
        "counter", ("reason",), "Changes that the controller decided on, by what kind of change it is"
    ),
    "keystage_ticks": MetricSpec("counter", (), "Decisions of the controller, changes or none"),
    "keystage_platform_failures": MetricSpec(
        "counter", (), "Ticks at which the controller could not observe or apply"
    ),
    "keystage_async_accepted": MetricSpec("counter", ("function_name",), "Asynchronous calls accepted"),
    "keystage_async_refused": MetricSpec(
        "counter", ("reason",), "Asynchronous calls of known functions refused, by HTTP status"
    ),
    "keystage_async_queue_calls": MetricSpec(
        "gauge",
        ("function_name",),
        "Calls in the queue, running ones included; every gateway tells all of Redis",
    ),
    "keystage_async_oldest_seconds": MetricSpec(
        "gauge",
        ("function_name",),
        "Age of the oldest call that waits or runs since it was queued or due again",
    ),
    "keystage_async_in_flight_calls": MetricSpec(
        "gauge", ("function_name",), "Asynchronous calls that this gateway runs"
    ),
    "keystage_async_retries": MetricSpec(
        "counter", ("function_name",), "Attempts that failed and are tried again"
    ),
    "keystage_async_dead_letters": MetricSpec("counter", ("function_name",), "Calls given up"),
    "keystage_async_callbacks": MetricSpec(
        "counter", ("function_name", "reason"), "Answers for callbacks, delivered or failed"
    ),
    "keystage_gpu_free_bytes": MetricSpec("gauge", ("node", "gpu"), "Free memory of a GPU, by its UUID"),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Exemplar:
    """One traced observation.

    Attributes:
        trace_id: of the trace, 32 hexadecimal digits.
        value: what was observed.
        at_s: Unix seconds.
    """

    trace_id: str
    value: float
    at_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """One value of a metric.

    Attributes:
        name: key of `METRICS`.
        labels: value of each label.
        value: the value; of a histogram the sum of what was observed.
        counts: of a histogram: observations at most each bound, and in all (one more than bounds).
        exemplars: of a histogram: a traced observation of each bucket, None where there is none; empty: none.
    """

    name: str
    labels: Mapping[str, str]
    value: float
    counts: tuple[int, ...] = ()
    exemplars: tuple[Exemplar | None, ...] = ()


_FAMILIES: Mapping[str, type[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


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
                family = families[sample.name] = _FAMILIES[spec.kind](
                    sample.name, spec.meaning, labels=spec.labels
                )
            labels = [sample.labels[label] for label in spec.labels]
            if isinstance(family, HistogramMetricFamily):
                bounds = [*(str(bound) for bound in spec.bounds), "+Inf"]
                family.add_metric(labels, _buckets(bounds, sample), sample.value)
            else:
                assert isinstance(family, CounterMetricFamily | GaugeMetricFamily)
                family.add_metric(labels, sample.value)
        yield from families.values()


def _buckets(bounds: Sequence[str], sample: Sample) -> Sequence[Any]:
    """Buckets as the client library takes them, with exemplars where there are any."""
    if not sample.exemplars:
        return list(zip(bounds, sample.counts, strict=True))
    found = [
        PrometheusExemplar({"trace_id": seen.trace_id}, seen.value, seen.at_s) if seen is not None else None
        for seen in sample.exemplars
    ]
    return list(zip(bounds, sample.counts, found, strict=True))


def expose(samples: Iterable[Sample]) -> bytes:
    """Prometheus text of the given samples.

    Raises:
        KeyError: a name or label that `METRICS` does not know.
    """
    registry = CollectorRegistry(auto_describe=False)
    gathered = list(samples)
    registry.register(Samples(lambda: gathered))
    return generate_latest(registry)
