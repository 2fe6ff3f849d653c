"""Parts of the benchmarks after Symphony: rates, advice in an emulated cluster, fewest GPUs, gaps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from keystage.batching.advice import AdviceSettings
from keystage.batching.api import Delays
from keystage.batching.partition_problem import division, violations
from keystage.bench import symphony
from keystage.bench.batching_cluster import serve
from keystage.bench.batching_models import TABLE_2, capacity_rps
from keystage.bench.flat_top import _gaps, _peak, _row, offered, resnets
from keystage.bench.frame import BenchResult, Figure
from keystage.bench.partition import MILLION_PARAMETERS, draw, drifted, random_search
from keystage.bench.results_page import write_page
from keystage.bench.symphony_autoscaled import Autoscaled
from keystage.bench.symphony_changing import Changing, course, rows
from keystage.bench.symphony_fewest import Asked, fewest
from keystage.bench.symphony_goodput import Cell, search, zoo
from keystage.bench.symphony_rates import MEAN_LOAD, SURGE, drawn_arrivals, rates, weights
from keystage.bench.symphony_systems import OURS, RIVALS, system


def test_rates_have_their_mean_and_their_surge() -> None:
    found = rates(5, 100, 1000.0, weights(5, 1), 1)
    total = found.sum(axis=1)
    begin, end, load = SURGE
    surging = np.zeros(100, dtype=bool)
    surging[int(begin * 100) : int(end * 100)] = True
    assert total[surging] == pytest.approx(load * 1000.0)
    assert total[~surging].mean() == pytest.approx(MEAN_LOAD * 1000.0, rel=0.1)
    assert (found > 0).all()
    assert np.array_equal(found, rates(5, 100, 1000.0, weights(5, 1), 1))


def test_drawn_arrivals_come_at_their_rates() -> None:
    drawn = drawn_arrivals(np.array([[100.0, 0.0], [0.0, 300.0]]), 2)
    assert (np.diff(drawn.times_s) >= 0).all()
    assert set(drawn.model[drawn.times_s < 1]) == {0}
    assert set(drawn.model[drawn.times_s >= 1]) == {1}
    assert len(drawn.times_s) == pytest.approx(400, abs=80)


def test_an_autoscaled_run_counts_every_request_and_follows_the_advice() -> None:
    seconds = course(Changing(replicas=16, seconds=12, follows=True, seed=0))
    settled = sum(s.good + s.bad for s in seconds)
    assert sum(s.arrived for s in seconds) == pytest.approx(settled, rel=0.1)
    assert min(s.replicas for s in seconds[2:]) < 16
    assert all(s.used <= s.replicas for s in seconds)
    made = rows(Changing(16, 12, True, 0), seconds)
    assert [row["part"] for row in made] == ["before the surge", "surge", "after"]


def test_advice_that_is_not_followed_changes_nothing() -> None:
    model = TABLE_2[0].model
    drawn = drawn_arrivals(np.full((8, 1), 900.0), 1)
    kept: list[Autoscaled] = []

    def make() -> Autoscaled:
        inner = system(OURS, [model], [1.0])(900.0)
        settings = AdviceSettings(add_s=1.0, release_s=2.0)
        kept.append(Autoscaled(inner, [model.profile], settings, 8, follows=False, start_s=1.0))
        return kept[-1]

    wrapped = serve(make, [model], drawn, 8, seconds=8.0, warm_s=0.0)
    plain = serve(lambda: system(OURS, [model], [1.0])(900.0), [model], drawn, 8, seconds=8.0, warm_s=0.0)
    assert wrapped.good.sum() == plain.good.sum()
    assert {s.replicas for s in kept[0].seconds[:-1]} == {8}
    assert any(s.advice < 0 for s in kept[0].seconds)


def test_fewest_is_the_first_number_that_holds() -> None:
    models = zoo("A100", "strong")[:3]
    asked = Asked(OURS, models, 0, 50, "three")
    number = fewest(asked)
    assert number is not None
    assert capacity_rps(models, [1 / 3] * 3, number) >= 15_000


def test_the_zoo_is_divided_by_batching_effect() -> None:
    strong, weak = zoo("1080Ti", "strong"), zoo("1080Ti", "weak")
    assert len(strong) + len(weak) == len(zoo("1080Ti", "mixed")) == 35
    assert min(m.profile.beta_s / m.profile.alpha_s for m in strong) > 2
    assert "BERT" in {m.name for m in weak}


def test_a_search_finds_less_than_the_capacity() -> None:
    models = resnets()[:2]
    found = search(Cell(OURS, models, 3, 0.0, 1.0, 0, 100, "two"))
    assert 0.5 * capacity_rps(models, [0.5, 0.5], 3) < found < capacity_rps(models, [0.5, 0.5], 3)


def test_gaps_are_points_from_the_flat_top_of_the_highest_goodput() -> None:
    served = offered(OURS, resnets(), 3000.0, 0.5, 1)
    rows = [_row(OURS, 1.0, seed, served) for seed in range(2)]
    rate, goodput_rps = rows[0]["offered_rps"], rows[0]["goodput_rps"]
    better = {**rows[0], "load": 2.0, "goodput_rps": 2 * goodput_rps}
    worse = {**better, "goodput_rps": goodput_rps / 2}
    rival = {**better, "system": "eager", "goodput_rps": 9 * goodput_rps}
    assert _peak([*rows, better, better, worse, rival]) == 2 * goodput_rps
    assert _gaps([rows[0], rival], 2 * rate) == ([], [pytest.approx(100 * (served.idle_ratio - 0.5))])
    assert _gaps([rows[0], rival], rate / 2) == ([pytest.approx(100 * (served.bad_ratio - 0.5))], [])


def test_only_ours_reckons_with_delays() -> None:
    with pytest.raises(ValueError, match="eager reckons with no delays"):
        system("eager", resnets(), [0.1] * 10, Delays(0.001))
    assert system(OURS, resnets(), [0.1] * 10, Delays(0.001))(1.0).queued(0) == 0


def test_ratios_are_paired_by_seed_and_their_interval_is_students() -> None:
    systems = {name: [2.0, 2.0] for name in RIVALS} | {OURS: [4.0, 6.0]}
    assert symphony._over_best(systems) == [2.0, 3.0]
    assert symphony._interval([2.0, 3.0]) == "2.5 ± 6.4"
    assert symphony._interval([2.0]) == "2"


def test_partition_problems_are_of_the_zoo_and_drift_keeps_the_division() -> None:
    problem = draw(40, 3, 1)
    assert {m.name.rsplit("-", 1)[0] for m in problem.models} <= set(MILLION_PARAMETERS)
    best, drawn = random_search(problem, 0.05, 1)
    assert best is not None
    assert drawn >= 64
    assert violations(problem, best.assigned) == {}
    later = drifted(problem, division(problem, best.assigned, "random", 0.0), 1)
    assert later.current == best.assigned
    assert [m.static_bytes for m in later.models] == [m.static_bytes for m in problem.models]


def test_a_page_has_its_tables_figures_and_notes(tmp_path: Path) -> None:
    result = BenchResult(
        [{"a": 1, "b": 0.25}], {"x_ratio": Figure([1.0, 2.0, 3.0], "x", "1", 9.0)}, ["noted"]
    )
    page = write_page("thing", "A thing", result, tables={"Part": result.rows}, folder=tmp_path)
    text = page.read_text()
    assert "| 1 | 0.25 |" in text
    assert "| x_ratio | 2 | 1.5 .. 2.5 | 3 | x | 1 |" in text
    assert "- noted" in text
    assert (tmp_path / "thing.json").exists()
