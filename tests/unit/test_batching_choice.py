"""Names of batchings: what is read, and what is refused by name."""

from __future__ import annotations

import pytest

from keystage.batching.choice import BatchingChoice, parse_batching, parse_late
from keystage.batching.partial_slo import PartialSlo
from keystage.batching.policies import Deferred, Eager, Timeout
from keystage.batching.stage_policy import policy_of
from keystage.router.api import BATCH_BOUNDS
from keystage.router.config import RouterConfig
from keystage.wire.metrics import METRICS

NEEDED = {"pipeline": "p", "bundle": "file:///b", "router": "ipc:///r"}


def test_each_is_read_and_written_back() -> None:
    for text, policy in (
        ("eager", Eager()),
        ("timeout:2.5", Timeout(0.0025)),
        ("deferred", Deferred()),
        ("partial-slo", PartialSlo()),
    ):
        choice = parse_batching(text)
        assert str(choice) == text
        assert policy_of(choice) == policy


NONSENSE = (
    "", "Eager", "greedy", "deferred:1", "eager:", "timeout", "timeout:", "timeout:-1", "timeout:nan",
    "timeout:1e9",
)  # fmt: skip


@pytest.mark.parametrize("text", NONSENSE)
def test_nonsense_is_refused_by_name(text: str) -> None:
    with pytest.raises(
        ValueError, match=r"is no batching: it must be eager|timeout needs milliseconds, 0 to 60000"
    ):
        parse_batching(text)


def test_late_is_one_of_two() -> None:
    assert (parse_late("demote"), parse_late("refuse")) == ("demote", "refuse")
    with pytest.raises(ValueError, match="'ignore' must be demote or refuse"):
        parse_late("ignore")


def test_a_router_reads_them_and_the_pipelines_objective() -> None:
    config = RouterConfig(**NEEDED, batching="timeout:5", late="refuse", slo='{"deadline_s": 0.25}')
    settings = config.batch_settings()
    assert settings.batching == BatchingChoice("timeout", 0.005)
    assert (settings.late, settings.objective_s) == ("refuse", 0.25)
    for name, value in (("batching", "later"), ("late", "never")):
        with pytest.raises(ValueError, match=f"{value}"):
            RouterConfig(**{**NEEDED, name: value})


@pytest.mark.parametrize("slo", ["", "{}", '{"ttft_s": 1}', '{"deadline_s": null}'])
def test_an_objective_may_state_no_deadline(slo: str) -> None:
    assert RouterConfig(**NEEDED, slo=slo).batch_settings().objective_s is None


@pytest.mark.parametrize(
    ("slo", "said"),
    [
        ("{", "a JSON object such as"),
        ("3", "a JSON object such as"),
        ('{"deadline_s": "x"}', "a JSON object such as"),
        ("[" * 5000, "a JSON object such as"),
        ('{"x":' + "[" * 100_000, "a JSON object such as"),
        ('{"deadline_s": 0}', "more than 0 and finite, it is 0"),
        ('{"deadline_s": -1}', "more than 0 and finite, it is -1"),
    ],
)
def test_an_objective_that_is_nonsense_is_refused(slo: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RouterConfig(**NEEDED, slo=slo)


def test_the_metric_has_the_buckets_of_the_counters() -> None:
    assert METRICS["keystage_stage_batch_items"].bounds == BATCH_BOUNDS
