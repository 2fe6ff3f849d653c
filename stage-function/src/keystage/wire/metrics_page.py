"""docs/metrics.md, made of the registry of all metrics.

`python -m keystage.wire.metrics_page > docs/metrics.md` (`make metrics`) writes it, and a test says when the page
is not the registry's. Nothing of a metric is written by
hand but what `wire.metrics` says of it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from keystage.wire.metric_spec import MetricSpec
from keystage.wire.metrics import METRICS

PARTS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (
        "Router",
        "`GET /metrics` of a pipeline's function. Its histograms carry exemplars, the ids of traces, for those who ask for OpenMetrics ([traces](traces.md)).",
        ("keystage_request", "keystage_first_token", "keystage_replayed", "keystage_session_moves",
         "keystage_late_copies", "keystage_overdue_drains", "keystage_keyed_", "keystage_journal_", "keystage_spans", "keystage_replica_"),
    ),
    (
        "Controller, of its decisions",
        "`GET /metrics` on `KEYSTAGE_HEALTH_PORT`: always on Kubernetes, elsewhere where that is set.",
        ("keystage_stage_desired", "keystage_stage_starting", "keystage_stage_is_key", "keystage_stage_arrival_rps",
         "keystage_stage_arrival_cv", "keystage_stage_utilisation", "keystage_pipeline_held", "keystage_decisions",
         "keystage_ticks", "keystage_platform_failures", "keystage_leader", "keystage_function_"),
    ),
    (
        "Worker",
        "`GET /metrics` of a stage's replica.",
        ("keystage_worker_", "keystage_preemptions", "keystage_stage_kv", "keystage_stage_busy",
         "keystage_stage_batches", "keystage_stage_rows", "keystage_stage_wave_wait"),
    ),
    ("Router, by stage", "`GET /metrics` of a pipeline's function.", ("keystage_stage_",)),
    (
        "Gateway",
        "`GET /metrics`, with `gateway_function_invocation_total`, `gateway_function_invocation_started`, `gateway_functions_seconds` (labels function_name and code) and `gateway_service_count` as OpenFaaS names them. The age of the view is the controller's, too.",
        ("keystage_async_", "keystage_view_age"),
    ),
    (
        "KeysManager",
        "`GET /metrics` on the TCP face, for holders of the internal token ([keysmanager.md](keysmanager.md)). On a cluster the controller tells of starts: `keystage_starts_total` and `keystage_start_seconds` of the parked pods that it made workers, and (`via=\"process\"`, `phase=\"ready\"`) of stages' fresh pods.",
        ("keystage_",),
    ),
)  # fmt: skip
"""Who shows what: a metric is of the first part that names how it begins."""

_HEAD = """# Metrics

Made by `make metrics` from `keystage.wire.metrics`; do not edit. Counters end in `_total`, histograms in `_bucket`,
`_sum` and `_count`. Units are in the names. Labels are bounded: stages and replicas are those that there are,
reasons a fixed few, and the counters of functions that are gone are forgotten.

A counter of what people are called for begins at zero: `increase` does not see a series' first value. Alerts on these
metrics are in `charts/keystage/rules/keystage.yaml`, each with the section here that says what to do.

What is asked of them most:

| question | expression |
|---|---|
| arrival rate of a stage | `rate(keystage_stage_arrivals_total[1m])` |
| its CV over five minutes | `sqrt(n * q / s^2 - 1)`, n, s, q the `increase[5m]` of arrivals, gap seconds, gap squares |
| mean wait | `rate(keystage_stage_wait_seconds_total[1m]) / rate(keystage_stage_waits_total[1m])` |
| mean service | `rate(keystage_stage_service_seconds_total[1m]) / rate(keystage_stage_services_total[1m])` |
| mean hand-off | `rate(keystage_stage_handoff_seconds_total[1m]) / rate(keystage_stage_services_total[1m])` |
| mean hand-off of a wave (looping) | `rate(keystage_stage_wave_wait_seconds_total[1m]) / rate(keystage_stage_batches_total[1m])` |
| goodput | `rate(keystage_requests_in_time_total[1m])` |
| SLO attainment | `rate(keystage_requests_in_time_total[5m]) / rate(keystage_requests_due_total[5m])` |
| cold starts by source | `increase(keystage_starts_total[15m])` by via, `increase(keystage_loads_total[15m])` by source |
| how long they took | `histogram_quantile(0.95, sum by (le, via) (rate(keystage_start_seconds_bucket{phase="ready"}[15m])))` |
| cache: bytes | `keystage_segment_bytes` beside `keystage_memory_budget_bytes` |
| cache: hits | `increase(keystage_parameter_gives_total{source=~"memory\\|gpu"}[15m])` over the same of every source |
"""


def part_of(name: str) -> str:
    """Which part shows a metric."""
    return next(part for part, _, begins in PARTS if name.startswith(begins))


def page() -> str:
    """The page."""
    return "\n".join([_HEAD, *_sections()])


def _sections() -> Iterator[str]:
    for part, where, _ in PARTS:
        yield f"## {part}\n{where}\n\n| metric | kind | labels | meaning |\n|---|---|---|---|"
        for name, spec in sorted(METRICS.items()):
            if part_of(name) == part:
                yield _row(name, spec)
        yield ""


def _row(name: str, spec: MetricSpec) -> str:
    shown = f"{name}_total" if spec.kind == "counter" else name
    bounds = f"; bounds {', '.join(f'{bound:g}' for bound in spec.bounds)}" if spec.bounds else ""
    meaning = spec.meaning.replace("|", "\\|")
    return f"| `{shown}` | {spec.kind} | {', '.join(spec.labels) or '-'} | {meaning}{bounds} |"


if __name__ == "__main__":
    sys.stdout.write(page())
