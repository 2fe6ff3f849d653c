"""Models, cells and worlds of the paper experiment: what is the paper's, and what is assumed of it."""

from __future__ import annotations

import numpy as np
import pytest

from keystage.bench.paper_cells import CVS, FULL, QUICK, SHORT
from keystage.bench.paper_models import BERT, CORES, MODELS, Model, stage_parts
from keystage.bench.paper_world import (
    DISK_BPS,
    GPU_BYTES,
    GPUS,
    MEMORY_BPS,
    SERVERS,
    Cache,
    Terms,
    case_study,
    gpus_of_whole,
    paper_world,
)
from keystage.simulator.check import check_world

TABLE_1 = {
    "Whisper-9B": (2.9, 677, 0.074),
    "BERT-21B": (43, 1195, 0.137),
    "LLAMA-7B": (14, 225, 0.243),
    "OPT-66B": (132, 581, 0.278),
    "WideResnet": (16, 295, 0.646),
}
TIMES = np.array([0.5, 1.0, 2.0])
CACHES: tuple[Cache, ...] = ("none", "reactive", "ahead")


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.name)
def test_a_model_is_table_1s_row(model: Model) -> None:
    size_gb, operators, exec_s = TABLE_1[model.name]
    assert (model.size_bytes / 1e9, model.operators, model.exec_s) == pytest.approx(
        (size_gb, operators, exec_s)
    )
    assert model.service_s(1) == pytest.approx(exec_s)


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.name)
def test_stages_sum_to_the_whole_and_are_uneven_within_bounds(model: Model) -> None:
    stages = paper_world(model, TIMES, 5.0, Terms("A")).pipelines[0].stages
    alone = [s.alpha_s + s.cpu_core_s / s.cores + s.beta_s for s in stages]
    assert len(stages) == 8
    assert sum(alone) == pytest.approx(model.exec_s)
    assert np.mean(model.factors) == pytest.approx(1)
    assert min(model.factors) >= 0.8 - 1e-12
    assert 1.04 < max(model.factors) <= 1.2 + 1e-12  # there is a key stage
    assert all(s.alpha_s > 0 for s in stages)


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.name)
def test_the_largest_batch_alone_keeps_within_one_and_a_half(model: Model) -> None:
    assert model.service_s(model.most) <= 1.5 * model.exec_s + 1e-12
    assert model.most == 4 or model.service_s(model.most + 1) > 1.5 * model.exec_s


def test_more_cores_shrink_a_tenth_of_the_time() -> None:
    alpha_s, beta_s, cpu_core_s = stage_parts(BERT)[0]
    alone_s = alpha_s + beta_s + cpu_core_s / CORES
    assert cpu_core_s / CORES == pytest.approx(0.1 * alone_s)


def test_loading_is_the_papers() -> None:
    assert pytest.approx(45) == 43e9 / DISK_BPS
    assert pytest.approx(0.8) == 5.4e9 / MEMORY_BPS
    rival, printed, ours = (paper_world(BERT, TIMES, 5.0, Terms("A", cache=c)).load for c in CACHES)
    assert (rival.holders, rival.memory_bps) == ("none", 0)
    assert (printed.holders, printed.prewarm) == ("key-stages", False)
    assert ours.prewarm
    assert (ours.holders, ours.disk_bps) == ("ran", rival.disk_bps)


def test_table_b_gives_everybody_the_same_loading() -> None:
    loads = [
        paper_world(BERT, TIMES, 5.0, Terms("B", is_whole=w, cache=c)).load
        for w in (False, True)
        for c in CACHES
    ]
    assert len(set(loads)) == 1
    assert loads[0].holders == "all"


def test_a_whole_model_takes_as_many_gpus_as_it_needs() -> None:
    assert {m.name: gpus_of_whole(m) for m in MODELS} == {
        "Whisper-9B": 1, "BERT-21B": 1, "LLAMA-7B": 1, "OPT-66B": 3, "WideResnet": 1,
    }  # fmt: skip
    world = paper_world(MODELS[3], TIMES, 5.0, Terms("B", is_whole=True))
    (stage,) = world.pipelines[0].stages
    assert (stage.gpus, stage.replicas, stage.max_replicas) == (
        3,
        3,
        SERVERS,
    )  # one to a server: a fourth GPU is over
    assert world.budget_replicas == SERVERS
    assert stage.parameter_bytes <= stage.gpus * GPU_BYTES
    assert stage.alpha_s + stage.beta_s + stage.cpu_core_s / stage.cores == pytest.approx(0.278)


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.name)
@pytest.mark.parametrize("is_whole", [False, True])
def test_every_world_can_be(model: Model, is_whole: bool) -> None:
    for terms in (Terms("A", is_whole=is_whole), Terms("B", is_whole=is_whole)):
        check_world(paper_world(model, TIMES, 1.5, terms))
    check_world(case_study(TIMES))


def test_full_has_enough_arrivals_where_a_cv_matters() -> None:
    assert len(FULL.seeds) >= 5
    assert min(FULL.seeds) > 4  # those the policy was developed on
    assert FULL.cvs == CVS
    for cv in FULL.cvs:
        pooled = sum(c.rate_rps * c.duration_s for c in FULL.cells() if c.load == "cv" and c.cv == cv)
        assert pooled >= 2000 * cv**2


def test_short_forms_hold_the_cells_of_the_named_figures() -> None:
    for size in (QUICK, SHORT):
        assert {"trace", "cv 8"} <= {cell.group for cell in size.cells()}
        assert len(size.seeds) >= 2
        assert not set(size.seeds) & {*range(5), *FULL.seeds}


def test_no_cv_cell_asks_for_more_than_whole_models_can_serve() -> None:
    for cell in FULL.cells():
        if cell.load != "cv":
            continue
        model = cell.of
        instances = SERVERS * (GPUS // gpus_of_whole(model))
        assert cell.rate_rps * model.service_s(model.most) / model.most <= 0.75 * instances * (1 + 1e-9)
        if model.name != "OPT-66B":
            assert cell.rate_rps == pytest.approx(3 * 8 / model.exec_s)
