"""What the benchmarks of the whole compute without a world: models, traces, scores, rows and figures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from keystage.bench.paper_arrivals import PaperTraceError
from keystage.bench.paper_models import BERT, MODELS
from keystage.bench.whole_client import RouterCount, Sent, sent_of
from keystage.bench.whole_models import STAGES, one_each_rps, parts, stage_specs
from keystage.bench.whole_score import Score, live_score, score_of
from keystage.bench.whole_table import Pair, draw, policy_figures, rows, sim_figures
from keystage.bench.whole_trace import STAND_IN, CountTrace, load
from keystage.bench.whole_world import Outcome, Plan, Served
from keystage.loadgen.sender import Row

# ---------------------------------------------------------------- models


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.name)
def test_stages_and_the_whole_take_the_published_time(model: object) -> None:
    assert isinstance(model, type(BERT))
    stages = parts(model)
    (whole,) = parts(model, whole=True)
    assert len(stages) == STAGES
    assert sum(p.item_s for p in stages) == pytest.approx(model.exec_s)
    assert whole.item_s == pytest.approx(model.exec_s)
    assert {p.most for p in stages} == {model.most}
    assert whole.gpus == (3 if model.name == "OPT-66B" else 1)


def test_a_part_names_its_device_and_its_stage() -> None:
    (first, *_) = parts(BERT)
    assert first.device == f"emulated:alpha={first.alpha_s:.6f},beta={first.beta_s:.6f}"
    (spec,) = stage_specs([first], [3], most_replicas=20, occupied_s=0.001)
    assert (spec.replicas, spec.max_replicas, spec.most) == (3, 20, first.most)
    assert spec.beta_s == pytest.approx(first.beta_s + 0.001)
    assert one_each_rps(BERT) == pytest.approx(4 / 0.137)


# ---------------------------------------------------------------- traces


def write_sample(folder: Path, counts: list[list[int]]) -> Path:
    columns = [str(480 + k) for k in range(len(counts[0]))]
    lines = [",".join(["HashOwner", "HashApp", "HashFunction", "Trigger", *columns])]
    lines += [",".join([f"o{i}", f"a{i}", f"f{i}", "http", *map(str, row)]) for i, row in enumerate(counts)]
    path = folder / "azure-functions-2019" / "sample100_8h_invocations.csv"
    path.parent.mkdir()
    path.write_text("\n".join(lines) + "\n")
    return folder


def test_a_replayed_window_holds_the_files_counts_in_the_dealt_order(tmp_path: Path) -> None:
    folder = write_sample(tmp_path, [[5, 0, 7], [1, 2, 3], [4, 4, 0]])
    trace = load(100, folder)
    assert trace.names == ("a0/f0", "a1/f1", "a2/f2")
    assert trace.dealt(2, 0, 3).tolist() == [[9, 4, 7], [1, 2, 3]]
    first, second = trace.times_s(2, 1, 2, 10.0, seed=4)
    assert np.histogram(first, [0, 6, 12])[0].tolist() == [4, 7]
    assert np.histogram(second, [0, 6, 12])[0].tolist() == [2, 3]
    again = trace.times_s(2, 1, 2, 10.0, seed=4)
    assert np.array_equal(again[0], first)
    assert not np.array_equal(trace.times_s(2, 1, 2, 10.0, seed=5)[0], first)


def test_speed_brings_the_same_arrivals_closer(tmp_path: Path) -> None:
    trace = load(100, write_sample(tmp_path, [[50, 60]]))
    (slow,), (fast,) = trace.times_s(1, 0, 2, 1.0, 1), trace.times_s(1, 0, 2, 100.0, 1)
    assert fast == pytest.approx(slow / 100)


def test_a_folder_without_the_sample_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(PaperTraceError, match=r"lacks azure-functions-2019/sample500_8h_invocations\.csv"):
        load(500, tmp_path)


def test_the_stand_in_looks_like_the_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keystage.bench.whole_trace._found", lambda _name, _given: None)
    trace = load(100, None)
    again = load(100, None)
    totals = trace.counts.sum(axis=1)
    shape = STAND_IN[100]
    assert trace.path is None
    assert "stand-in" in trace.source
    assert np.array_equal(trace.counts, again.counts)
    assert trace.counts.shape == (100, 480)
    assert totals.sum() == pytest.approx(shape.total, rel=0.05)
    assert totals[0] / totals.sum() == pytest.approx(shape.top_ratio, rel=0.05)
    every = trace.counts.sum(axis=0)
    assert every.std() / every.mean() == pytest.approx(shape.minute_cv, rel=0.4)
    times_s = trace.times_s(3, 0, 10, 10.0, seed=2)
    assert [len(t) for t in times_s] == trace.dealt(3, 0, 10).sum(axis=1).tolist()


def test_times_that_do_not_hold_the_counts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = CountTrace(("a",), np.array([[3.0, 4.0]]), None, "a trace")
    monkeypatch.setattr(CountTrace, "_placed", lambda *_: [np.array([1.0, 2.0, 3.0])])
    with pytest.raises(PaperTraceError, match="pipeline 0 do not hold the file's counts"):
        trace.times_s(1, 0, 2, 1.0, 0)


# ---------------------------------------------------------------- scores


def test_every_row_has_an_end_that_is_known() -> None:
    served = Row(0, 0.0, 0.001, 0.2, 0.2, 200)
    refused = Row(1, 0.1, 0.1, None, 0.2, 429, error="http_429: queue of 10 is full")
    strange = Row(2, 0.2, 0.2, None, 0.3, 418, error="http_418: teapot")
    broken = Row(3, 0.3, 0.3, None, 0.4, 0, error="connect: refused")
    sent = sent_of([served, refused, strange, broken])
    assert sent.refused == {"429 queue of 10 is full": 1}
    assert sent.failed == {"http_418": 1, "connect": 1}
    assert sent.unaccounted == 0
    assert sent.latency_s.tolist() == pytest.approx([0.2, np.inf, np.inf, np.inf])
    assert sent.lag_s.tolist() == pytest.approx([0.001, 0, 0, 0])
    lost = Sent(sent.scheduled_s, sent.sent_s, sent.ended_s, sent.is_served, sent.refused, {})
    assert lost.unaccounted == 2


def test_an_unserved_request_counts_with_its_age_and_not_as_goodput() -> None:
    found = score_of(
        [np.array([0.1, 0.3, np.inf]), np.array([0.6])],
        [np.array([9.0, 9.0, 5.0]), np.array([9.0])],
        [0.2, 1.0],
        duration_s=2.0,
        gpu_s=8.0,
        queues=[1.0, 3.0],
        starts=2,
    )
    assert (found.counted, found.unserved, found.starts) == (4, 1, 2)
    assert found.mean_s == pytest.approx((0.1 + 0.3 + 5.0 + 0.6) / 4)
    assert found.slowdown == pytest.approx((0.1 / 0.04 + 0.3 / 0.04 + 5.0 / 0.04 + 0.6 / 0.2) / 4)
    assert found.goodput_rps == pytest.approx(2 / 2.0)
    assert found.met_ratio == pytest.approx(0.5)
    assert found.queue == 2.0


def test_a_live_score_counts_gpus_of_each_replica() -> None:
    functions = parts(MODELS[3], whole=True)
    served = Served("opt", functions, np.array([0.0, 1.0]), 2.0, (1,))
    sent = Sent(
        np.array([0.0, 1.0]), np.array([0.0, 1.0]), np.array([0.5, 1.4]), np.array([True, False]),
        {}, {"connect": 1}, (0.5,), RouterCount(1, 1),
    )  # fmt: skip
    plan = Plan((served,), 10.0, None, 24)
    found = live_score(Outcome(plan, (sent,), ((1.5,),), 0, (), 2, 0.1, 0, np.empty((0, 6))))
    assert found.gpu_s == pytest.approx(1.5 * 3 * 10)
    assert found.mean_s == pytest.approx((0.5 + 9.0) / 2)
    assert found.queue == 0.5


# ---------------------------------------------------------------- tables


def a_score(mean_s: float, *, goodput_rps: float = 10.0, gpu_s: float = 100.0) -> Score:
    return Score(
        1000, 0, mean_s, mean_s / 0.137, (mean_s,) * 4 + (2 * mean_s,), goodput_rps, gpu_s, 1.0, 3, 60.0
    )


def some_pairs() -> list[Pair]:
    found = []
    for seed, factor in ((0, 1.0), (1, 2.0)):
        for cv in ("1", "4"):
            found.append(
                Pair(f"cv {cv}", cv, seed, "keystage", a_score(0.1 * factor), a_score(0.09 * factor))
            )
            found.append(Pair(f"cv {cv}", cv, seed, "cocktail", a_score(0.4), a_score(0.44)))
    return found


def test_figures_are_ours_over_theirs_by_seed_and_simulated_over_live() -> None:
    pairs = some_pairs()
    found = policy_figures(pairs, "keystage")
    assert found["latency_vs_cocktail"].samples == pytest.approx([0.25, 0.5])
    assert found["gpu_seconds_vs_cocktail"].samples == pytest.approx([1.0, 1.0])
    beside = sim_figures(pairs)
    assert sorted(beside["latency_sim_vs_live"].samples) == pytest.approx([0.9] * 4 + [1.1] * 4)
    assert beside["gpu_seconds_sim_vs_live"].median == 1.0
    assert not any(figure.is_noisy for figure in (found | beside).values())


def test_rows_have_one_shape_and_a_ratio_beside_each_pair_of_worlds(tmp_path: Path) -> None:
    pairs = some_pairs()
    table = rows(pairs)
    assert [row["world"] for row in table[:3]] == ["live", "simulated", "sim / live"]
    assert len(table) == 2 * 2 * 3
    assert len({tuple(row) for row in table}) == 1
    assert table[2]["mean_ms"] == pytest.approx(0.9)
    assert draw(tmp_path / "new" / "x.png", pairs, "CV", "title").read_bytes().startswith(b"\x89PNG")


def test_a_ratio_to_nothing_is_infinite_and_noticed() -> None:
    pairs = [
        Pair("a", "a", 0, "keystage", a_score(0.1, goodput_rps=1.0), None),
        Pair("a", "a", 0, "off", a_score(0.1, goodput_rps=0.0), None),
    ]
    assert policy_figures(pairs, "keystage")["goodput_vs_off"].is_noisy
