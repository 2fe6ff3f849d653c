"""`bench scheduler`: what it replays is what it recorded, and what it reports."""

import itertools

import pytest

from keystage.bench import scheduler


def test_a_script_replays_with_the_same_batches() -> None:
    script = scheduler.record(5, 4, arrivals=300)
    again = scheduler.record(5, 4, arrivals=300)
    assert script == again
    assert sum(kind == 0 for kind, _, _ in script) == 300
    assert any(kind == 1 for kind, _, _ in script)
    times_s = [now_s for _, _, now_s in script]
    assert times_s == sorted(times_s)
    assert scheduler.replay(5, 4, script) > 0


def test_the_exponent_is_the_larger_one() -> None:
    sizes = list(itertools.product(scheduler.MODELS, scheduler.REPLICAS))
    seconds = [3e-6 * models**0.05 * replicas**0.2 for models, replicas in sizes]
    assert scheduler._exponent(sizes, seconds) == pytest.approx(0.2)
    assert scheduler._exponent(sizes, [4e-6] * len(sizes)) == pytest.approx(0.0, abs=1e-9)
